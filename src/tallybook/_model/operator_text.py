"""The text that signers and verifiers of a request to the operator API compute.

The signed text has eight lines, joined by a line feed. No line can contain one, so no two requests have the same text:

    tallybook-v1
    the id of the key
    the method
    the path, byte for byte as sent, including percent signs and prefix
    the query, its pieces between & sorted by their bytes
    the timestamp: seconds since 1970
    the nonce
    the SHA-256 of the body, in hexadecimal digits

Only the order of a query's pieces is free: a name may occur once, so the order has no meaning. A different encoding of
the same characters (%2D for -) is a different text.
"""

from __future__ import annotations

import hashlib
import hmac
import re

_UNSIGNABLE = re.compile(rb"[\x00-\x20\x7f]")


def canonical(*, key: str, method: str, path: bytes, query: bytes, timestamp: str, nonce: str, body: bytes) -> bytes:
    """Return the text to sign. Raises ValueError for a path or a query with invalid characters."""
    if _UNSIGNABLE.search(path) or _UNSIGNABLE.search(query):
        raise ValueError("the path or the query has a space or a control character")
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
    """Return the value of the header Tallybook-Signature."""
    return "v1=" + hmac.new(secret, text, hashlib.sha256).hexdigest()
