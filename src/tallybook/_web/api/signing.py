"""What is signed, and whether a signature is good.

The signed text is eight lines, joined by a line feed; none of them can hold one, so no two requests have one text:

    tallybook-v1
    the id of the key
    the method
    the path, byte for byte as it was sent, percent signs and prefix included
    the query, its pieces between & sorted by their bytes
    the timestamp: seconds since 1970
    the nonce
    the SHA-256 of the body, in hexadecimal digits

The order of a query's pieces alone is free: no name may be in it twice, so it means the same in any order. What was sent
encoded in another way (%2D for -) is another text.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, unquote

from starlette.types import Scope

from tallybook._web.api.keys import ID, Key, KeyRing
from tallybook._web.api.problems import Problem

__all__ = ["HEADERS", "Signed", "canonical", "proved", "sent_path", "served_path", "sign", "signed_by"]

HEADERS = ("tallybook-key", "tallybook-timestamp", "tallybook-nonce", "tallybook-signature")
_TIMESTAMP = re.compile("[0-9]{1,11}")
_NONCE = re.compile("[A-Za-z0-9._~+/=-]{16,128}")
_SIGNATURE = re.compile("v1=[0-9a-f]{64}")
_UNSIGNABLE = re.compile(rb"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True)
class Signed:
    """What the headers of a request say about who signed it; nothing of it is proved yet."""

    key: str
    timestamp: str
    nonce: str
    signature: str

    @property
    def at(self) -> datetime:
        """When it says that it was signed."""
        return datetime.fromtimestamp(int(self.timestamp), UTC)


def signed_by(headers: Iterable[tuple[bytes, bytes]]) -> Signed:
    """The four headers, each once and well-formed. A Problem (401) otherwise."""
    found: dict[str, str] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        if name in HEADERS:
            if name in found:
                raise Problem(401, "unsigned", f"the header {name} is there twice")
            found[name] = value.decode("latin-1")
    for name, form in zip(HEADERS, (ID, _TIMESTAMP, _NONCE, _SIGNATURE), strict=True):
        if name not in found:
            raise Problem(401, "unsigned", f"there is no header {name}")
        if not form.fullmatch(found[name]):
            raise Problem(401, "unsigned", f"the header {name} is not of the form {form.pattern}")
    return Signed(*(found[name] for name in HEADERS))


def served_path(scope: Scope) -> str:
    """The path below the prefix under which the API is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :]
    return path


def sent_path(scope: Scope) -> bytes:
    """The path as the client has sent it, with the prefix under which the API is mounted.

    What is served goes by the decoded path of the scope. A raw path that does not say the same is not what is signed: some
    host in between has rewritten one of them.
    """
    path, root = scope["path"], scope.get("root_path", "")
    raw = (scope.get("raw_path") or b"").split(b"?", 1)[0]
    if raw and unquote(raw.decode("latin-1"), "utf-8") in (path, root + path):
        return raw
    if root and not path.startswith(root):
        path = root + path
    return quote(path, safe="/-._~!$&'()*+,;=:@").encode()


def canonical(*, key: str, method: str, path: bytes, query: bytes, timestamp: str, nonce: str, body: bytes) -> bytes:
    """The text that is signed. A Problem (401) for a path or a query with what none can have."""
    if _UNSIGNABLE.search(path) or _UNSIGNABLE.search(query):
        raise Problem(401, "unsigned", "the path or the query has a space or a control character")
    ordered = b"&".join(sorted(query.split(b"&")))
    lines = (
        b"tallybook-v1",
        key.encode(),
        method.encode("latin-1"),
        path,
        ordered,
        timestamp.encode(),
        nonce.encode(),
        hashlib.sha256(body).hexdigest().encode(),
    )
    return b"\n".join(lines)


def sign(secret: bytes, text: bytes) -> str:
    """The value of the header tallybook-signature."""
    return "v1=" + hmac.new(secret, text, hashlib.sha256).hexdigest()


def proved(signed: Signed, ring: KeyRing, scope: Scope, body: bytes) -> Key:
    """The key that has signed this request. A Problem (401) that does not tell an unknown key from a wrong signature."""
    key, secret = ring.get(signed.key)
    text = canonical(
        key=signed.key,
        method=scope["method"],
        path=sent_path(scope),
        query=scope.get("query_string", b""),
        timestamp=signed.timestamp,
        nonce=signed.nonce,
        body=body,
    )
    right = hmac.compare_digest(sign(secret, text).encode(), signed.signature.encode())
    if key is None or not right:
        hint = "Compare what you sign with docs/operator-api.md: key, method, path, query, timestamp, nonce, body"
        raise Problem(401, "signature", "the key is not known, or the signature is not that of this request", hint=hint)
    return key
