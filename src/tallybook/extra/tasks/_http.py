"""The tasks `tallybook.http`, one call whose answer is the result, and `tallybook.sms`, a call that sends a text."""

import base64
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from tallybook._worker.run.context import Context
from tallybook.errors import CallFailed, ConfigError
from tallybook.extra.tasks._email import PATIENT
from tallybook.extra.tasks._outbound import Answer, Call, body_of
from tallybook.extra.tasks._provider import option, ready_made

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_MOST = 256_000
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
    answer = await call.make(ctx, method, content, ours, more=headers, most=_MOST, cut=False)
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
    answer = await call.make(ctx, "POST", content, ours, most=16_384, cut=True)
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
        return {"base64": base64.b64encode(call.mask.data(answer.body)).decode()}
    return {"text": call.mask.text(text)}
