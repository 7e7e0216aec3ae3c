"""The task `tallybook.webhook`: send a webhook until it is accepted, signed as Standard Webhooks 1.0.0 requires.

See https://www.standardwebhooks.com.
"""

import base64
import hmac
import re
import secrets
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tallybook._model.backoff import Exponential
from tallybook._model.provider import Provider, Secret
from tallybook._worker.run.context import Context
from tallybook.errors import CallFailed, ConfigError, UnknownProvider
from tallybook.extra.tasks._outbound import Call, body_of, checked_url
from tallybook.extra.tasks._provider import Registry, option, quiet, ready_made

_MOST = 16_384
_KEPT = 2_000
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
    answer = await call.make(ctx, "POST", content, ours, more=headers, most=_MOST, cut=True)
    if 200 <= answer.status < 300:
        said = call.mask.text(answer.text()).replace("\0", "\ufffd")[:_KEPT]  # the database cannot store a NUL
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
