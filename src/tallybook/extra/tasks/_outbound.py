"""One HTTP call of a job: its URL, its headers and body, and its answer."""

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
from tallybook.extra.tasks._provider import HEADER_NAME, Mask, is_header_value, needed, option, quiet, text_setting

# A 4xx is final, except these. 408, 425 and 429 mean "later". 401, 403 and 407 are about the provider's credentials:
# the job is right, and succeeds once these are corrected.
_LATER = {401, 403, 407, 408, 425, 429}
_MOVED_FOR_GOOD = {301, 308}
# Headers that only the task sets, and headers for secrets, which args never contain.
_OURS = {
    "host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect",
    "accept-encoding",
}  # fmt: skip
_SECRET = {"authorization", "proxy-authorization", "cookie"}
_CONNECT = 5.0
_SHOWN = 500
_MOST = 256_000
Headers = Mapping[str, str]
_HOST = re.compile(r"[a-z0-9._-]{1,253}", re.IGNORECASE)


def body_of(who: str, body: Any, text: str | None, *, needed: bool) -> bytes | None:
    """Return the bytes to sign and to send: the JSON value in its shortest form, or the text as it is."""
    if body is not None and text is not None:
        raise CallFailed(f"{who}: pass body or text, not both", no_retry=True)
    if text is not None:
        return text.encode()
    if body is None and needed:
        raise CallFailed(f"{who}: pass body or text", no_retry=True)
    return None if body is None else json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Answer:
    """The answer of a server. Names of headers are lower case; of several with the same name the last one counts."""

    status: int
    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)

    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


@dataclass(frozen=True)
class Call:
    """A call as a provider's settings describe it. Errors show `who` and nothing else of it."""

    who: str
    provider: Provider | None
    url: str = field(repr=False)
    headers: Headers = field(repr=False)
    mask: Mask = field(repr=False)
    allowed: Allowed = field(default_factory=Allowed)
    ca: str | None = field(default=None, repr=False)
    timeout: float = 20.0

    @classmethod
    @quiet
    def to_provider(cls, who: str, provider: Provider, *, path: str | None = None, query: Any = None) -> Call:
        """Return a call to the provider's own URL: a setting, or a secret. Raises ConfigError and CallFailed."""
        secret = provider.secrets.get("url")
        url = secret.reveal() if secret is not None else text_setting(provider, "url")
        where = option(provider, "url")
        secure = not provider.secrets or provider.settings.get("allow_http") is True
        try:
            url = checked_url(url, allow_http=secure)
        except ValueError as error:
            raise ConfigError(where, None, f"{error}") from None
        static = provider.settings.get("headers", {})
        if not isinstance(static, Mapping):
            raise ConfigError(option(provider, "headers"), static, "not an object of names and texts")
        try:
            static = _checked_headers(who, static)
        except CallFailed as error:  # the provider is wrong, not the job
            raise ConfigError(option(provider, "headers"), None, f"{error}") from None
        auth = _provider.auth_headers(provider)
        pairs = _pairs(who, query)
        if "token_query" in provider.settings and "token" in provider.secrets:
            pairs.append((text_setting(provider, "token_query"), provider.secrets["token"].reveal()))
        allowed = Allowed.of(provider.settings.get("allow", []), option=option(provider, "allow"))
        ca = text_setting(provider, "ca") if "ca" in provider.settings else None
        mask = Mask.of(provider, *auth.values())
        url, timeout = _joined(who, url, path, pairs), _provider.seconds(provider, 20.0)
        return cls(who, provider, url, {**static, **auth}, mask, allowed, ca, timeout)

    @classmethod
    def to_url(cls, who: str, url: str, *, query: Any = None) -> Call:
        """Return a call to a URL of the args: any public one, without secrets."""
        try:
            url = checked_url(url, allow_http=True)
        except ValueError as error:
            raise CallFailed(f"{who}: url: {error}", no_retry=True) from None
        return cls(who, None, _joined(who, url, None, _pairs(who, query)), {}, Mask())

    async def make(
        self, ctx: Context, method: str, body: bytes | None, ours: Headers, more: Any = None, cut: int | None = None
    ) -> Answer:
        """Send the request and read the answer up to `cut` bytes; without `cut`, more than 256,000 are an error.

        `ours` are headers of the task; `more` are those of the args, which cannot replace them. The whole call, from
        the name's resolution to the last byte of the answer, takes at most the timeout. It takes a turn at the
        provider's rate limits and reports a 429 to them. Raises CallFailed and AddressRefused.
        """
        transport = needed(self.who, "tallybook.extra.tasks._transport", "webhooks")
        taken = {name.lower() for name in (*self.headers, *ours)}
        theirs = _checked_headers(self.who, more or {}, taken=taken)
        for name, value in ours.items():
            if not is_header_value(value):  # a line break would split it into two headers
                raise CallFailed(f"{self.who}: {name}: its value is not valid in a header", no_retry=True)
        async with nullcontext() if self.provider is None else ctx.provider(self.provider):
            got = await self._made(transport, method, body, theirs, ours, cut)
            if isinstance(got, Exception):
                raise got
            if got.status == 429 and self.provider is not None and self.provider.settings.get("limits"):
                raise self.refusal(got)
        return got

    async def _made(
        self, transport: Any, method: str, body: bytes | None, theirs: Headers, ours: Headers, cut: int | None
    ) -> Answer | Exception:
        """Return the answer or an error: one that is raised through this frame would expose its secrets."""
        groups = ({"User-Agent": "tallybook", "Accept-Encoding": "identity"}, theirs, self.headers, ours)
        # The last of a name counts, ignoring case; otherwise both would be sent.
        sent = dict({name.lower(): (name, value) for group in groups for name, value in group.items()}.values())
        if body is None and method in ("POST", "PUT", "PATCH"):
            body = b""
        limits = dict.fromkeys(("read", "write", "pool"), self.timeout) | {"connect": min(_CONNECT, self.timeout)}
        try:
            async with asyncio.timeout(self.timeout), transport.pool(self.allowed, self.ca) as pool:
                extensions = {"timeout": limits}
                async with pool.stream(method, self.url, headers=sent, content=body, extensions=extensions) as got:
                    said = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in got.headers}
                    return Answer(got.status, said, await self._read(got.aiter_stream(), cut))
        except AddressRefused as error:
            return AddressRefused(error.reason or "", provider=self._name, who=self.who)
        except CallFailed as error:
            return _provider.bare(error)
        except TimeoutError:
            return self._failed(f"no complete answer within {self.timeout:g} s")
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {self.mask.text(str(error)) or 'no answer'}")

    async def _read(self, chunks: Any, cut: int | None) -> bytes:
        found = bytearray()
        async for chunk in chunks:
            found += chunk
            if cut is None and len(found) > _MOST:
                raise self._failed(f"the answer has more than {_MOST} bytes", no_retry=True)
            if cut is not None and len(found) > cut:
                break
        return bytes(found[:cut])

    def refusal(self, answer: Answer, hint: str | None = None) -> CallFailed:
        """Return the error for an unsuccessful answer, with the beginning of its body."""
        said = " ".join(self.mask.text(answer.text()).split())[:_SHOWN]
        text = f"{self.who}: status {answer.status}" + (f": {said}" if said else "")
        waits = {name: answer.headers[name] for name in ("retry-after", "date") if name in answer.headers}
        status = answer.status
        final = status in _MOVED_FOR_GOOD or (400 <= status < 500 and status not in _LATER)
        return CallFailed(text, provider=self._name, status=status, headers=waits, no_retry=final, hint=hint)

    def _failed(self, what: str, *, no_retry: bool = False) -> CallFailed:
        return CallFailed(f"{self.who}: {what}", provider=self._name, no_retry=no_retry)

    @property
    def _name(self) -> str | None:
        return None if self.provider is None else self.provider.name


def checked_url(url: str, *, allow_http: bool) -> str:
    """Return the URL without its fragment. ValueError if it is not valid, without the URL: it may contain a secret."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ValueError("a URL is ASCII without spaces; write an international name in its xn-- form")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("it cannot be parsed") from None
    if parts.scheme not in ("https", "http") or not host:
        raise ValueError("it must be a URL like https://example.com/path")
    if parts.username is not None or parts.password is not None:
        raise ValueError("store user and password as the provider's setting user and secret password")
    labels = host.removesuffix(".").split(".")
    if ":" not in host and not (_HOST.fullmatch(host) and all(0 < len(one) < 64 for one in labels)):
        raise ValueError("its host is not a valid name")
    if parts.scheme == "http" and not allow_http:
        raise ValueError("a provider with secrets needs https, unless its setting allow_http is true")
    return urlunsplit(parts._replace(fragment=""))


def _joined(who: str, url: str, path: str | None, pairs: list[tuple[str, str]]) -> str:
    """Append a path and a query to the URL. They cannot lead to another host or above its path."""
    parts = urlsplit(url)
    if path is not None:
        plain = path.lower().replace("%2e", ".").replace("%2f", "/").replace("%5c", "/").replace("\\", "/")
        if not path.startswith("/") or not path.isprintable() or "?" in path or "#" in path or ".." in plain.split("/"):
            hint = 'It begins with / and has no ".."; pass a query as query'
            raise CallFailed(f"{who}: the path is not valid", no_retry=True, hint=hint)
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


def _checked_headers(who: str, headers: Mapping[str, Any], *, taken: set[str] | None = None) -> dict[str, str]:
    """Return the headers if none is reserved and none could smuggle in another. Raises a final CallFailed otherwise."""
    for name, value in headers.items():
        low = name.lower()
        if not HEADER_NAME.fullmatch(name) or not is_header_value(value):
            raise CallFailed(f"{who}: header {name!r}: its name or value is not valid", no_retry=True)
        if low in _OURS or low.startswith("webhook-") or low in (taken or ()):
            raise CallFailed(f"{who}: header {name!r} cannot be set", no_retry=True)
        if low in _SECRET:
            hint = "Store it in the provider, as its secret token or password"
            raise CallFailed(f"{who}: header {name!r} is for secrets", no_retry=True, hint=hint)
    return dict(headers)
