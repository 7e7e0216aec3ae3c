"""The task `tallybook.http`: one call, and what it answered is the job's result."""

from __future__ import annotations

import base64
import json
from typing import Any

from tallybook._worker.run.context import Context
from tallybook.errors import CallFailed
from tallybook.extra.tasks._outbound import Answer, Call, body_of
from tallybook.extra.tasks._provider import provider_of
from tallybook.extra.tasks._shelf import ready_made

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_MOST = 256_000
_KEPT = ("content-type", "date", "etag", "last-modified", "link", "location", "retry-after", "x-request-id")


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
    """Call a provider at `path` below its URL, with its secrets, or any public `url` without one.

    Sends `body` as JSON or `text` as it is. POST and PATCH carry an Idempotency-Key, the same at each attempt:
    `idempotency_key`, or made of the job's id. Success is a status of 2xx or one of `expect`; the result is {"status",
    "headers", and "json", "text" or "base64"}, of at most 256,000 bytes. Redirects are not followed.

        job = await http.enqueue(conn, "rates", path="/latest", query={"base": "EUR"})
        rates = (await app.result(job))["json"]
    """
    who = "http call" if provider is None else f"http call of provider {provider!r}"
    method = method.upper()
    if method not in _METHODS:
        raise CallFailed(f"{who}: the method is one of {', '.join(_METHODS)}", no_retry=True)
    if (provider is None) == (url is None):
        hint = "With a provider give a path: its secrets go nowhere else"
        raise CallFailed(f"{who}: give a provider or a url, one of them", no_retry=True, hint=hint)
    content = body_of(who, body, text, needed=False)
    if url is not None:
        if path is not None:
            raise CallFailed(f"{who}: a url has its path already", no_retry=True)
        call = Call.to_url(who, url, query=query)
    else:
        assert provider is not None
        call = Call.to_provider(who, await provider_of(ctx, provider), path=path, query=query)
    ours = {}
    if content is not None:
        ours["Content-Type"] = content_type or ("application/json" if text is None else "text/plain; charset=utf-8")
    if method in ("POST", "PATCH"):
        ours["Idempotency-Key"] = idempotency_key or f"job_{ctx.job_id}"
    answer = await call.make(ctx, method, content, ours, more=headers, most=_MOST, cut=False)
    if not (200 <= answer.status < 300 or answer.status in (expect or ())):
        raise call.refusal(answer)
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise CallFailed(
            f"{who}: the answer is compressed although none was asked for", provider=provider, no_retry=True
        )
    return {"status": answer.status, "headers": _headers(call, answer), **content_of(call, answer)}


def _headers(call: Call, answer: Answer) -> dict[str, str]:
    return {name: call.mask.text(answer.headers[name]) for name in _KEPT if name in answer.headers}


def content_of(call: Call, answer: Answer) -> dict[str, Any]:
    """The body as JSON where it says that it is, as text where it is one, and else in base64."""
    if not answer.body:
        return {}
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        try:
            value = call.mask.value(json.loads(answer.body))
            if _can_be_kept(value):
                return {"json": value}
        except (ValueError, RecursionError):
            pass  # it is not what it says; then it is text
    try:
        text = answer.body.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # no text that a database could keep
        return {"base64": base64.b64encode(call.mask.data(answer.body)).decode()}
    return {"text": call.mask.text(text)}


def _can_be_kept(value: Any) -> bool:
    """Whether a database could keep it as JSON: no NUL, no half of a character, no number that is none. ValueError, too."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return "\\u0000" not in written and bool(written.encode())
