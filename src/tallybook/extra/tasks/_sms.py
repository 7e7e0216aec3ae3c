"""The task `tallybook.sms`: send one text message through a provider's HTTP interface."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from tallybook._model.provider import Provider
from tallybook._worker.run.context import Context
from tallybook.errors import CallFailed, ConfigError
from tallybook.extra.tasks._email import PATIENT
from tallybook.extra.tasks._http import content_of
from tallybook.extra.tasks._outbound import Call, body_of
from tallybook.extra.tasks._provider import option, ready_made

_NUMBER = re.compile(r"\+?[0-9]{3,15}")
_MOST_TEXT = 1600
_MOST = 16_384
_NAMES = {"to": "to", "text": "text", "sender": "from"}


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
    body = _body(found, to=to, text=text, sender=sender if sender is not None else found.settings.get("from"))
    if found.settings.get("form") is True:
        kind, content = "application/x-www-form-urlencoded", urlencode(body).encode()
    else:
        kind, content = "application/json", body_of(who, body, None, needed=True) or b""
    ours = {"Content-Type": kind, "Idempotency-Key": idempotency_key or f"job_{ctx.job_id}"}
    answer = await call.make(ctx, "POST", content, ours, most=_MOST, cut=True)
    if not 200 <= answer.status < 300:
        raise call.refusal(answer)
    return {"status": answer.status, **content_of(call, answer)}


def _body(provider: Provider, **said: Any) -> dict[str, Any]:
    """Return the message under the provider's names, with its additional fields."""
    fields = provider.settings.get("fields", {})
    if not isinstance(fields, Mapping):
        raise ConfigError(option(provider, "fields"), fields, "not an object of names and texts")
    more = {name: value for name, value in fields.items() if name not in _NAMES}
    return {**more, **{fields.get(name, _NAMES[name]): value for name, value in said.items() if value is not None}}
