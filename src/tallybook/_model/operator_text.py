"""What is signed of a request to the operator API, for who signs it and who proves it.

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

_UNSIGNABLE = re.compile(rb"[\x00-\x20\x7f]")


def canonical(*, key: str, method: str, path: bytes, query: bytes, timestamp: str, nonce: str, body: bytes) -> bytes:
    """The text that is signed. ValueError for a path or a query with what none can have."""
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
    """The value of the header Tallybook-Signature."""
    return "v1=" + hmac.new(secret, text, hashlib.sha256).hexdigest()
