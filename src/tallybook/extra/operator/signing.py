"""The key that signed a request, and the check of the signature. For the signed text see client.py."""

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, unquote

from starlette.types import Scope

from tallybook.extra.operator.client import canonical, sign
from tallybook.extra.operator.keys import ID, Key, KeyRing
from tallybook.extra.operator.problems import Problem

HEADERS = ("tallybook-key", "tallybook-timestamp", "tallybook-nonce", "tallybook-signature")
_TIMESTAMP = re.compile("[0-9]{1,11}")
_NONCE = re.compile("[A-Za-z0-9._~+/=-]{16,128}")
_SIGNATURE = re.compile("v1=[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Signed:
    """The signature headers of a request, not yet verified."""

    key: str
    timestamp: str
    nonce: str
    signature: str

    @property
    def at(self) -> datetime:
        return datetime.fromtimestamp(int(self.timestamp), UTC)


def signed_by(headers: Iterable[tuple[bytes, bytes]]) -> Signed:
    """Return the four headers. A Problem (401) if one is missing, repeated or malformed."""
    found: dict[str, str] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        if name in HEADERS:
            if name in found:
                raise Problem("unsigned", f"the header {name} appears twice")
            found[name] = value.decode("latin-1")
    for name, form in zip(HEADERS, (ID, _TIMESTAMP, _NONCE, _SIGNATURE), strict=True):
        if name not in found:
            raise Problem("unsigned", f"the header {name} is missing")
        if not form.fullmatch(found[name]):
            raise Problem("unsigned", f"the header {name} does not match {form.pattern}")
    return Signed(*(found[name] for name in HEADERS))


def served_path(scope: Scope) -> str:
    """Return the path below the prefix under which the API is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path.removeprefix(root) if f"{path}/".startswith(f"{root}/") else path


def sent_path(scope: Scope) -> bytes:
    """Return the path as the client sent it, with the prefix under which the API is mounted."""
    path, root = scope["path"], scope.get("root_path", "")
    raw = (scope.get("raw_path") or b"").split(b"?", 1)[0]
    # The decoded path selects the endpoint. Another raw path was not signed: a proxy has rewritten one of them.
    if raw and unquote(raw.decode("latin-1"), "utf-8") in (path, root + path):
        return raw
    if root and not path.startswith(root):
        path = root + path
    return quote(path, safe="/-._~!$&'()*+,;=:@").encode()


def proved(signed: Signed, ring: KeyRing, scope: Scope, body: bytes) -> Key:
    """Return the key that signed this request. The same Problem (401) for an unknown key and a wrong signature."""
    key, secret = ring.get(signed.key)
    said = {"key": signed.key, "timestamp": signed.timestamp, "nonce": signed.nonce}
    path, query = sent_path(scope), scope.get("query_string", b"")
    try:
        text = canonical(method=scope["method"], path=path, query=query, body=body, **said)
    except ValueError as error:
        raise Problem("unsigned", str(error)) from None
    right = hmac.compare_digest(sign(secret, text).encode(), signed.signature.encode())
    if key is None or not right:
        hint = "Compare what you sign (key, method, path, query, timestamp, nonce, body) with "
        hint += "https://github.com/tallybook/tallybook/blob/main/docs/operator-api.md"
        raise Problem("signature", "the key is unknown, or the signature does not match this request", hint=hint)
    return key
