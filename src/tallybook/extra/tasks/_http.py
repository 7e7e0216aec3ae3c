"""The tasks of one HTTP call: `tallybook.http`, whose result is the answer, `tallybook.sms` and `tallybook.webhook`.

Webhooks are sent until they are accepted, signed as Standard Webhooks 1.0.0 requires, https://www.standardwebhooks.com.
"""

import base64
import hmac
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from tallybook._model.backoff import Exponential
from tallybook._model.provider import Provider, Secret
from tallybook._worker.run.context import Context
from tallybook.errors import CallFailed, ConfigError, UnknownProvider
from tallybook.extra.tasks._email import PATIENT
from tallybook.extra.tasks._outbound import Answer, Call, body_of, checked_url
from tallybook.extra.tasks._provider import Registry, option, quiet, ready_made

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_KEPT = ("content-type", "date", "etag", "last-modified", "link", "location", "retry-after", "x-request-id")
_NUMBER = re.compile(r"\+?[0-9]{3,15}")
_MOST_TEXT = 1600
_NAMES = {"to": "to", "text": "text", "sender": "from"}


@ready_made("tallybook.http")
async def http(
    ctx: Context,
    provider: str | None = None,
    *,
    method: str = "GET",
    url: str | None = None,
    path: str | None = None,
    query: dict[str, Any] | None = None,
    body: Any = None,
    text: str | None = None,
    content_type: str | None = None,
    headers: dict[str, str] | None = None,
    expect: list[int] | None = None,
    idempotency_key: str | None = None,
) -> dict[str, Any]:
    """Call a provider at `path` below its URL, with its secrets, or any public `url` without secrets.

    Sends `body` as JSON or `text` as it is. POST and PATCH carry an Idempotency-Key, the same at every attempt: it is
    `idempotency_key`, or derived from the job's id. Success is a status of 2xx or one of `expect`. The result, of at
    most 256,000 bytes, is {"status", "headers", and "json", "text" or "base64"}. Redirects are not followed.

        job = await http.enqueue(conn, "rates", path="/latest", query={"base": "EUR"})
        rates = (await app.result(job))["json"]
    """
    who = "http call" if provider is None else f"http call of provider {provider!r}"
    method = method.upper()
    if method not in _METHODS:
        raise CallFailed(f"{who}: the method must be one of {', '.join(_METHODS)}", no_retry=True)
    if (provider is None) == (url is None):
        hint = "With a provider, pass a path: its secrets are sent only to its own URL"
        raise CallFailed(f"{who}: pass either a provider or a url", no_retry=True, hint=hint)
    content = body_of(who, body, text, needed=False)
    if url is not None:
        if path is not None:
            raise CallFailed(f"{who}: pass the path as part of the url", no_retry=True)
        call = Call.to_url(who, url, query=query)
    else:
        assert provider is not None
        call = Call.to_provider(who, await ctx.app.providers.get(provider), path=path, query=query)
    ours = {}
    if content is not None:
        ours["Content-Type"] = content_type or ("application/json" if text is None else "text/plain; charset=utf-8")
    if method in ("POST", "PATCH"):
        ours["Idempotency-Key"] = idempotency_key or f"job_{ctx.job_id}"
    answer = await call.make(ctx, method, content, ours, more=headers)
    if not (200 <= answer.status < 300 or answer.status in (expect or ())):
        raise call.refusal(answer)
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise CallFailed(f"{who}: the answer is compressed, which was not requested", provider=provider, no_retry=True)
    kept = {name: call.mask.text(answer.headers[name]) for name in _KEPT if name in answer.headers}
    return {"status": answer.status, "headers": kept, **_content_of(call, answer)}


@ready_made("tallybook.sms", retry=PATIENT, max_attempts=8, summary="SMS by {provider} to {to}")
async def sms(
    ctx: Context, provider: str, to: str, text: str, *, sender: str | None = None, idempotency_key: str | None = None
) -> dict[str, Any]:
    """Send one text message to one number, like +4930123, with a POST to the provider's URL.

    The provider's setting `fields` sets the body's names for `to`, `text` and `sender` (default `from`), and may add
    fields; with the setting `form` the body is a form instead of JSON. `sender` defaults to the setting `from`. The
    Idempotency-Key is the same at every attempt. Success is a status of 2xx. The result is {"status", and "json" or
    "text"}.

        await sms.enqueue(conn, "sms", "+4930123", "Your form has come in.")
    """
    who = f"SMS by provider {provider!r}"
    if not _NUMBER.fullmatch(to):
        raise CallFailed(f"{who}: to: pass a number like +4930123", no_retry=True)
    if not 1 <= len(text) <= _MOST_TEXT:
        raise CallFailed(f"{who}: the text has {len(text)} characters; 1 to {_MOST_TEXT} are allowed", no_retry=True)
    found = await ctx.app.providers.get(provider)
    call = Call.to_provider(who, found)
    fields = found.settings.get("fields", {})
    if not isinstance(fields, Mapping):
        raise ConfigError(option(found, "fields"), fields, "not an object of names and texts")
    said = {"to": to, "text": text, "sender": sender if sender is not None else found.settings.get("from")}
    body = {name: value for name, value in fields.items() if name not in _NAMES}
    body |= {fields.get(name, _NAMES[name]): value for name, value in said.items() if value is not None}
    if found.settings.get("form") is True:
        kind, content = "application/x-www-form-urlencoded", urlencode(body).encode()
    else:
        kind, content = "application/json", body_of(who, body, None, needed=True) or b""
    ours = {"Content-Type": kind, "Idempotency-Key": idempotency_key or f"job_{ctx.job_id}"}
    answer = await call.make(ctx, "POST", content, ours, cut=_MOST_SHOWN)
    if not 200 <= answer.status < 300:
        raise call.refusal(answer)
    return {"status": answer.status, **_content_of(call, answer)}


def _content_of(call: Call, answer: Answer) -> dict[str, Any]:
    """Return the body as JSON if its content type is JSON, as text if it is UTF-8, or else in base64."""
    if not answer.body:
        return {}
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        try:
            value = call.mask.value(json.loads(answer.body))
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            if "\\u0000" not in written and written.encode():  # the database stores no NUL and no lone surrogate
                return {"json": value}
        except (ValueError, RecursionError):
            pass  # the content type is wrong: treat it as text
    try:
        text = answer.body.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # the database cannot store this text
        masked = call.mask.text(answer.body.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        return {"base64": base64.b64encode(masked).decode()}
    return {"text": call.mask.text(text)}


_MOST_SHOWN = 16_384
_MOST_KEPT = 2_000
_PREFIX = "whsec_"
_HINT = "tallybook.extra.tasks.new_signing_secret() makes one"
# The signature covers id.timestamp.body, so with a dot in the id two different messages could have one signed text.
_ID = re.compile(r"[A-Za-z0-9_:/+=@~-]{1,200}")
_PATIENT = Exponential(timedelta(seconds=5), factor=4, cap=timedelta(hours=12), jitter=True)


@ready_made("tallybook.webhook", retry=_PATIENT, max_attempts=15, summary="Webhook to {provider}")
async def webhook(
    ctx: Context,
    provider: str,
    body: Any = None,
    *,
    text: str | None = None,
    content_type: str = "application/json",
    idempotency_key: str | None = None,
    headers: dict[str, str] | None = None,
    url: str | None = None,
    signed_by: str | None = None,
) -> dict[str, Any]:
    """Send `body` as JSON, or `text` as it is, in a POST to the provider's URL, signed as in Standard Webhooks.

    The provider has the setting `url` and the secret `signing_secret`; its other settings are in
    https://github.com/tallybook/tallybook/blob/main/docs/webhooks.md. The header webhook-id is the same at every
    attempt: it is `idempotency_key` (letters, digits and _:/+=@~-, at most 200), or derived from the job's id.

    Success is a status of 2xx; the result is {"status", "webhook_id", "answer"}. 410 sets the provider inactive, unless
    `url` was passed. A redirect is a failure, and so is an address that is not public, unless the provider allows it.

    `url` and `signed_by` are for a provider with many endpoints, for example one per form. The call goes to this URL,
    signed with the provider's secret of this name; none of its other secrets is sent.

        await webhook.enqueue(conn, "acme", {"type": "invoice.paid", "data": {"id": 42}})
    """
    who = f"webhook to provider {provider!r}"
    message_id = idempotency_key if idempotency_key is not None else f"job_{ctx.job_id}"
    if not _ID.fullmatch(message_id):
        raise CallFailed(f"{who}: idempotency_key has 1 to 200 letters, digits and _:/+=@~-", no_retry=True)
    content = body_of(who, body, text, needed=True)
    assert content is not None
    found = await ctx.app.providers.get(provider)
    if url is not None or signed_by is not None:
        found = _at(who, found, url, signed_by)
    call = Call.to_provider(who, found)
    if (secret := found.secrets.get("signing_secret")) is None:
        raise ConfigError(option(found, "signing_secret"), None, "this secret is missing", hint=_HINT)
    at = str(int(time.time()))
    ours = {"Content-Type": content_type, "webhook-id": message_id, "webhook-timestamp": at}
    ours["webhook-signature"] = _signatures(secret, (message_id, at), content, option(found, "signing_secret"))
    answer = await call.make(ctx, "POST", content, ours, more=headers, cut=_MOST_SHOWN)
    if 200 <= answer.status < 300:
        said = call.mask.text(answer.text()).replace("\0", "\ufffd")[:_MOST_KEPT]  # the database cannot store a NUL
        return {"status": answer.status, "webhook_id": message_id, "answer": said}
    if answer.status == 410 and url is None:
        if await _has_moved(ctx.app.providers, found):
            raise CallFailed(f"{who}: status 410 from the provider's former url", provider=provider)
        await ctx.app.providers.set(provider, active=False)  # first: after a crash the next attempt finds it inactive
        ctx.log.warning("provider %r was set inactive: its endpoint answered 410", provider)
        raise call.refusal(answer, hint="The provider was set inactive: its endpoint is gone")
    raise call.refusal(answer)


def _at(who: str, provider: Provider, url: str | None, signed_by: str | None) -> Provider:
    """Return the provider with a URL of the args and one of its secrets; that URL must not get the others."""
    if url is None or signed_by is None:
        raise CallFailed(f"{who}: pass url and signed_by together", no_retry=True)
    try:
        checked_url(url, allow_http=provider.settings.get("allow_http") is True)
    except ValueError as error:
        raise CallFailed(f"{who}: url: {error}", no_retry=True) from None
    secret = provider.secrets.get(signed_by)
    if secret is None:  # the name is not shown: by mistake it may be the secret itself
        hint = "tallybook provider set-secret sets it"
        raise ConfigError(option(provider, "signed_by"), None, "no secret has this name", hint=hint)
    return replace(provider, settings={**provider.settings, "url": url}, secrets={"signing_secret": secret})


async def _has_moved(registry: Registry, called: Provider) -> bool:
    """Return whether the provider's URL has changed since it was read: then only the former URL is gone."""
    registry.forget()
    try:
        now = await registry.get(called.name)
    except UnknownProvider:  # inactive, perhaps after another 410
        return False
    pairs: Any = ((now.settings, called.settings), (now.secrets, called.secrets))
    return any(after.get("url") != before.get("url") for after, before in pairs)


def new_signing_secret() -> str:
    """Return a new secret for a webhook's provider and its receiver: `whsec_` and 32 random bytes in base64.

    text = new_signing_secret()
    """
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


@quiet
def _signatures(secret: Secret, of: tuple[str, str], body: bytes, option: str) -> str:
    """Return the header webhook-signature for an id and a time, by the secret and, while replaced, the previous one."""
    signed = b".".join((*(part.encode("ascii") for part in of), body))
    keys = [_key(one, option) for one in (secret, secret.previous) if one is not None]
    made = (base64.b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys)
    return " ".join(dict.fromkeys(f"v1,{one}" for one in made))


def _key(secret: Secret, option: str) -> bytes:
    text = secret.reveal().removeprefix(_PREFIX)
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise ConfigError(option, secret, "not whsec_ and base64", hint=_HINT) from None
    if not 24 <= len(key) <= 64:
        raise ConfigError(option, secret, f"has {len(key)} bytes, 24 to 64 are allowed", hint=_HINT)
    return key
