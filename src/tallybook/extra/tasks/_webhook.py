"""The task `tallybook.webhook`: tell an endpoint until it has heard it, signed as https://www.standardwebhooks.com says (1.0.0)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tallybook._model.backoff import Exponential
from tallybook._model.provider import Provider
from tallybook._model.secret import Secret
from tallybook._worker.run.context import Context
from tallybook.errors import CallFailed, ConfigError, UnknownProvider
from tallybook.extra.tasks._outbound import Call, body_of, checked_url
from tallybook.extra.tasks._provider import Registry, option, provider_of, quiet, registry_of
from tallybook.extra.tasks._shelf import ready_made

_MOST = 16_384
_KEPT = 2_000
_PREFIX = "whsec_"
_HINT = "tallybook.extra.tasks.new_signing_secret() makes one"
# The signature is over id.timestamp.body, so that a dot in the id would make two messages look alike.
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
    """Send `body` as JSON, or `text` as it is, by POST to the provider's URL, signed as Standard Webhooks says.

    The provider has the setting `url` and the secret `signing_secret`; its other settings are in
    https://github.com/tallybook/tallybook/blob/main/docs/webhooks.md. The header webhook-id, the same at each
    attempt, is `idempotency_key` (letters, digits and _:/+=@~-, at most 200), or made of the job's id. Success is a
    status of 2xx; the result is {"status", "webhook_id", "answer"}. 410 sets the provider inactive. Redirects are
    failures; so is an address that is not public, unless the provider allows it.

    `url` and `signed_by` are for one provider with many endpoints, such as one a form: the call goes to this URL, signed by
    the provider's secret of this name, and no other of its secrets goes along.

        await webhook.enqueue(conn, "acme", {"type": "invoice.paid", "data": {"id": 42}})
    """
    who = f"webhook to provider {provider!r}"
    message_id = idempotency_key if idempotency_key is not None else f"job_{ctx.job_id}"
    if not _ID.fullmatch(message_id):
        raise CallFailed(f"{who}: idempotency_key is letters, digits and _:/+=@~-, at most 200", no_retry=True)
    content = body_of(who, body, text, needed=True)
    assert content is not None
    found = await provider_of(ctx, provider)
    if url is not None or signed_by is not None:
        found = _at(who, found, url, signed_by)
    call = Call.to_provider(who, found)
    if (secret := found.secrets.get("signing_secret")) is None:
        raise ConfigError(option(found, "signing_secret"), None, "this secret is not there", hint=_HINT)
    timestamp = int(time.time())
    where = option(found, "signing_secret")
    signed = {
        "Content-Type": content_type,
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": _signatures(
            secret, message_id=message_id, timestamp=timestamp, body=content, option=where
        ),
    }
    answer = await call.make(ctx, "POST", content, signed, more=headers, most=_MOST, cut=True)
    if 200 <= answer.status < 300:
        said = call.mask.text(answer.text()).replace("\0", "\ufffd")[:_KEPT]  # a database keeps no NUL
        return {"status": answer.status, "webhook_id": message_id, "answer": said}
    if answer.status == 410 and url is None:
        registry = registry_of(ctx)
        if await _has_moved(registry, found):
            raise CallFailed(f"{who}: status 410, at a url that the provider has no more", provider=provider)
        await registry.set(provider, active=False)  # first: who crashes now finds it so the next time
        ctx.log.warning("provider %r is not active any more: its endpoint answered 410", provider)
        raise call.refusal(answer, hint="The provider is not active any more: its endpoint is gone")
    raise call.refusal(answer)


def _at(who: str, provider: Provider, url: str | None, signed_by: str | None) -> Provider:
    """The provider at a URL of the args, with one secret of its own: the others are not for whoever is there."""
    if url is None or signed_by is None:
        raise CallFailed(f"{who}: url and signed_by are given together", no_retry=True)
    try:
        checked_url(url, allow_http=provider.settings.get("allow_http") is True)
    except ValueError as error:
        raise CallFailed(f"{who}: url: {error}", no_retry=True) from None
    secret = provider.secrets.get(signed_by)
    if secret is None:  # its name is not shown: it may be the secret itself, by mistake
        hint = "tallybook provider set-secret sets it"
        raise ConfigError(option(provider, "signed_by"), None, "no secret has this name", hint=hint)
    return replace(provider, settings={**provider.settings, "url": url}, secrets={"signing_secret": secret})


async def _has_moved(registry: Registry, called: Provider) -> bool:
    """Whether it was given another URL since it was read: what is gone is the former one."""
    registry.forget()
    try:
        now = await registry.get(called.name)
    except UnknownProvider:  # not active any more, which another 410 may have done
        return False
    return now.settings.get("url") != called.settings.get("url")


def new_signing_secret() -> str:
    """A new secret for a webhook's provider and its receiver: `whsec_` and 32 random bytes in base64.

    text = new_signing_secret()
    """
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


@quiet
def _signatures(secret: Secret, *, message_id: str, timestamp: int, body: bytes, option: str) -> str:
    """The header webhook-signature: by the secret, and by the previous one while that is being replaced.

    ConfigError, which does not show it, for a secret that is none.
    """
    signed = b".".join((message_id.encode("ascii"), str(timestamp).encode("ascii"), body))
    made = []
    for one in (secret, secret.previous):
        if one is not None:
            digest = hmac.new(_key(one, option), signed, hashlib.sha256).digest()
            made.append(f"v1,{base64.b64encode(digest).decode()}")
    return " ".join(dict.fromkeys(made))


def _key(secret: Secret, option: str) -> bytes:
    text = secret.reveal().removeprefix(_PREFIX)
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(option, secret, "not whsec_ and base64", hint=_HINT) from None
    if not 24 <= len(key) <= 64:
        raise ConfigError(option, secret, f"has {len(key)} bytes, 24 to 64 are allowed", hint=_HINT)
    return key
