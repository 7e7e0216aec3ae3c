"""One HTTP call of a job: where to, what is sent, and what of the answer counts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from tallybook._model.provider import Provider
from tallybook._worker.run.context import Context
from tallybook.errors import AddressRefused, CallFailed, ConfigError
from tallybook.extra.tasks import _provider
from tallybook.extra.tasks._address import Allowed
from tallybook.extra.tasks._masking import Mask
from tallybook.extra.tasks._provider import HEADER_NAME, bare, is_header_value, needed, option, quiet, text_setting

# A status after which the next attempt would end the same. 408, 425 and 429 say "later", 5xx "not now", and 401, 403 and 407
# are about the provider's credentials: the job is right, and goes when these are.
_LATER = {401, 403, 407, 408, 425, 429}
_MOVED_FOR_GOOD = {301, 308}
# What is ours to say, or a secret's place: of a secret the args know nothing.
_OURS = {
    "host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect", "accept-encoding",
}  # fmt: skip
_SECRET = {"authorization", "proxy-authorization", "cookie"}
_CONNECT = 5.0
_SHOWN = 500
_HOST = re.compile(r"[a-z0-9._-]{1,253}", re.IGNORECASE)


def is_final(status: int) -> bool:
    """Whether another attempt cannot end better after this status."""
    return status in _MOVED_FOR_GOOD or (400 <= status < 500 and status not in _LATER)


def body_of(who: str, body: Any, text: str | None, *, needed: bool) -> bytes | None:
    """The bytes to send: the JSON value in its shortest form, or the text as it is. They are made once, and signed and sent."""
    if body is not None and text is not None:
        raise CallFailed(f"{who}: give body or text, not both", no_retry=True)
    if text is not None:
        return text.encode()
    if body is None and needed:
        raise CallFailed(f"{who}: there is neither body nor text", no_retry=True)
    return None if body is None else json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Answer:
    """What came back. Names of headers are in small letters; of several of one name the last counts."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


@dataclass(frozen=True)
class Call:
    """Whom to call and how, from a provider's settings; `who` is what errors say of it, and the only thing."""

    who: str
    provider: Provider | None
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    mask: Mask = field(repr=False)
    allowed: Allowed = field(default_factory=Allowed)
    ca: str | None = field(default=None, repr=False)
    timeout: float = 20.0

    @classmethod
    @quiet
    def to_provider(cls, who: str, provider: Provider, *, path: str | None = None, query: Any = None) -> Call:
        """To the provider's own URL, a setting or, where it holds a secret itself, a secret. ConfigError, CallFailed."""
        secret = provider.secrets.get("url")
        url = secret.reveal() if secret is not None else text_setting(provider, "url")
        where = option(provider, "url")
        secure = not provider.secrets or provider.settings.get("allow_http") is True
        try:
            url = checked_url(url, allow_http=secure)
        except ValueError as error:
            raise ConfigError(where, None, f"{error}") from None
        try:
            static = _checked_headers(who, _provider.static_headers(provider))
        except CallFailed as error:  # it is the provider that is wrong, and not the job
            raise ConfigError(option(provider, "headers"), None, f"{error}") from None
        auth = _provider.auth_headers(provider)
        pairs = [*_pairs(who, query), *_token_pair(provider)]
        allowed = Allowed.of(provider.settings.get("allow", []), option=option(provider, "allow"))
        ca = text_setting(provider, "ca") if "ca" in provider.settings else None
        mask = Mask.of(provider, *auth.values())
        url, timeout = _joined(who, url, path, pairs), _provider.seconds(provider, 20.0)
        return cls(who, provider, url, {**static, **auth}, mask, allowed, ca, timeout)

    @classmethod
    def to_url(cls, who: str, url: str, *, query: Any = None) -> Call:
        """To a URL that the args say: any public one, without a secret."""
        try:
            url = checked_url(url, allow_http=True)
        except ValueError as error:
            raise CallFailed(f"{who}: url: {error}", no_retry=True) from None
        return cls(who, None, _joined(who, url, None, _pairs(who, query)), {}, Mask())

    async def make(
        self,
        ctx: Context,
        method: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        more: Mapping[str, Any] | None = None,
        most: int,
        cut: bool,
    ) -> Answer:
        """Send it and read at most `most` bytes of the answer: what is longer is cut, or is an error.

        `headers` are the task's, `more` those of the args, which may not say what is ours. The whole call, from the name's
        resolution to the answer's last byte, takes at most the timeout. It takes a turn at the provider, which hears of a 429.
        CallFailed, AddressRefused.
        """
        transport = needed(self.who, "tallybook.extra.tasks._transport", "webhooks")
        taken = {name.lower() for name in (*self.headers, *headers)}
        theirs = _checked_headers(self.who, more or {}, taken=taken)
        for name, value in headers.items():
            if not is_header_value(value):  # a line break would make two headers of it
                raise CallFailed(f"{self.who}: {name}: its value cannot stand in a header", no_retry=True)
        async with nullcontext() if self.provider is None else ctx.provider(self.provider):
            got = await self._made(transport, method, body, theirs, headers, most, cut=cut)
            if isinstance(got, Exception):
                raise got
            if got.status == 429 and self.provider is not None and self.provider.settings.get("limits"):
                raise self.refusal(got)
        return got

    async def _made(
        self,
        transport: Any,
        method: str,
        body: bytes | None,
        theirs: Mapping[str, str],
        headers: Mapping[str, str],
        most: int,
        *,
        cut: bool,
    ) -> Answer | Exception:
        """The answer, or what went wrong: an error that came through this frame would show the secrets in it."""
        sent = _merged({"User-Agent": "tallybook", "Accept-Encoding": "identity"}, theirs, self.headers, headers)
        if body is None and method in ("POST", "PUT", "PATCH"):
            body = b""
        limits = dict.fromkeys(("read", "write", "pool"), self.timeout) | {"connect": min(_CONNECT, self.timeout)}
        try:
            async with asyncio.timeout(self.timeout), transport.pool(self.allowed, self.ca) as pool:
                extensions = {"timeout": limits}
                async with pool.stream(method, self.url, headers=sent, content=body, extensions=extensions) as got:
                    said = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in got.headers}
                    return Answer(got.status, said, await self._read(got.aiter_stream(), most, cut=cut))
        except AddressRefused as error:
            return AddressRefused(error.reason or "", provider=self._name, who=self.who)
        except CallFailed as error:
            return bare(error)
        except TimeoutError:
            return self._failed(f"there was no whole answer within {self.timeout:g} s")
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {self.mask.text(str(error)) or 'no answer'}")

    async def _read(self, chunks: Any, most: int, *, cut: bool) -> bytes:
        found = bytearray()
        async for chunk in chunks:
            found += chunk
            if len(found) > most:
                if not cut:
                    raise CallFailed(
                        f"{self.who}: the answer has more than {most} bytes", provider=self._name, no_retry=True
                    )
                break
        return bytes(found[:most])

    def refusal(self, answer: Answer, hint: str | None = None) -> CallFailed:
        """The error for an answer that is no success, with the beginning of what it says."""
        said = " ".join(self.mask.text(answer.text()).split())[:_SHOWN]
        text = f"{self.who}: status {answer.status}" + (f": {said}" if said else "")
        waits = {name: answer.headers[name] for name in ("retry-after", "date") if name in answer.headers}
        return CallFailed(
            text, provider=self._name, status=answer.status, headers=waits, no_retry=is_final(answer.status), hint=hint
        )

    def _failed(self, what: str) -> CallFailed:
        return CallFailed(f"{self.who}: {what}", provider=self._name)

    @property
    def _name(self) -> str | None:
        return None if self.provider is None else self.provider.name


def _merged(*groups: Mapping[str, str]) -> dict[str, str]:
    """All headers, of one name the last, in whatever letters it is written: two would be sent otherwise."""
    found = {name.lower(): (name, value) for group in groups for name, value in group.items()}
    return dict(found.values())


def checked_url(url: str, *, allow_http: bool) -> str:
    """The URL, whose host is what will be called. ValueError, which does not show it: it may hold a secret."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ValueError("a URL is ASCII without spaces; a name in other letters is written in its form with xn--")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("it cannot be read") from None
    if parts.scheme not in ("https", "http") or not host:
        raise ValueError("a URL like https://example.com/path is wanted")
    if parts.username is not None or parts.password is not None:
        raise ValueError("user and password belong into the provider's setting user and secret password")
    if ":" not in host and not (
        _HOST.fullmatch(host) and all(0 < len(one) < 64 for one in host.removesuffix(".").split("."))
    ):
        raise ValueError("its host is no name")
    if parts.scheme == "http" and not allow_http:
        raise ValueError("a provider with secrets is called by https, unless its settings say allow_http")
    return urlunsplit(parts._replace(fragment=""))


def _joined(who: str, url: str, path: str | None, pairs: list[tuple[str, str]]) -> str:
    """The URL with a path below its own, and more of a query. Nothing in them leads to another host or above the path."""
    parts = urlsplit(url)
    if path is not None:
        segments = (
            path.replace("\\", "/").lower().replace("%2e", ".").replace("%2f", "/").replace("%5c", "/").split("/")
        )
        if not path.startswith("/") or not path.isprintable() or "?" in path or "#" in path or ".." in segments:
            hint = 'It begins with /, has no "..", and the query goes into query'
            raise CallFailed(f"{who}: the path is none", no_retry=True, hint=hint)
        parts = parts._replace(path=parts.path.rstrip("/") + quote(path, safe="/%:@!$&'()*+,;=~"))
    query = "&".join(filter(None, (parts.query, urlencode(pairs))))
    return urlunsplit(parts._replace(path=parts.path or "/", query=query))


def _pairs(who: str, query: Any) -> list[tuple[str, str]]:
    found = []
    for name, value in (query or {}).items():
        if isinstance(value, bool):
            value = str(value).lower()
        if not isinstance(value, str | int | float):
            raise CallFailed(f"{who}: query: {name} is neither a text nor a number", no_retry=True)
        found.append((name, str(value)))
    return found


def _token_pair(provider: Provider) -> list[tuple[str, str]]:
    """For providers that want their key in the query."""
    if "token_query" not in provider.settings or "token" not in provider.secrets:
        return []
    return [(text_setting(provider, "token_query"), provider.secrets["token"].reveal())]


def _checked_headers(who: str, headers: Mapping[str, Any], *, taken: set[str] | None = None) -> dict[str, str]:
    """The headers, of which none is ours and none could smuggle in another. CallFailed, for good."""
    for name, value in headers.items():
        low = name.lower()
        if not HEADER_NAME.fullmatch(name) or not is_header_value(value):
            raise CallFailed(f"{who}: header {name!r}: its name or value cannot stand in a header", no_retry=True)
        if low in _OURS or low.startswith("webhook-") or low in (taken or ()):
            raise CallFailed(f"{who}: header {name!r} is not for you to set", no_retry=True)
        if low in _SECRET:
            hint = "Put it into the provider, as its secret token or password"
            raise CallFailed(f"{who}: header {name!r} is a secret's place", no_retry=True, hint=hint)
    return dict(headers)
