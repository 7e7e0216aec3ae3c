"""Standard Webhooks 1.0.0: what a receiver verifies. https://www.standardwebhooks.com"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

from tallybook._model.secret import Secret
from tallybook.errors import ConfigError
from tallybook.extra.tasks._provider import quiet

__all__ = ["new_signing_secret", "signatures"]

_PREFIX = "whsec_"


def new_signing_secret() -> str:
    """A new secret for a webhook's provider and its receiver: `whsec_` and 32 random bytes in base64.

    text = new_signing_secret()
    """
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


@quiet
def signatures(secret: Secret, *, message_id: str, timestamp: int, body: bytes, option: str) -> str:
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
    hint = "tallybook.extra.tasks.new_signing_secret() makes one"
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(option, secret, "not whsec_ and base64", hint=hint) from None
    if not 24 <= len(key) <= 64:
        raise ConfigError(option, secret, f"has {len(key)} bytes, 24 to 64 are allowed", hint=hint)
    return key
