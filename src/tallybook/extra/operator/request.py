"""Sign requests to the operator API, for any HTTP library. Needs no extra.

See https://github.com/tallybook/tallybook/blob/main/docs/operator-api.md.
"""

from __future__ import annotations

import secrets
import time
from urllib.parse import urlsplit

from tallybook._model.operator_text import canonical, sign


def signed_headers(
    key: str, secret: str, method: str, url: str, body: bytes = b"", *, at: float | None = None
) -> dict[str, str]:
    """Return the four headers that sign a request with this key. It is served once, and within 300 s.

    `key` and `secret` come from `tallybook web key`. `url` is the address as it is sent, whole or from its path on,
    with prefix and query; `body` is the body as it is sent. `at` is the time in seconds since 1970, by default now. A
    repeated request is served only if the first one was not. ValueError if the secret is not hexadecimal, or if the URL
    has characters that must be encoded.

        body = json.dumps({"queue": "mail", "reason": "failed"}).encode()
        url = "https://ops.example.com/api/v1/dead-letters/retry"
        headers = signed_headers(key, secret, "POST", url, body) | {"Content-Type": "application/json"}
        answer = urlopen(Request(url, body, headers), timeout=35)
    """
    try:
        shared = bytes.fromhex(secret)
    except ValueError:
        raise ValueError("the secret is not hexadecimal") from None  # the text does not show the secret
    if not (url.isascii() and url.isprintable()) or " " in url:  # urlsplit would silently drop a line feed
        raise ValueError(f"{url[:100]!r} has characters that must be encoded (%20 for a space)")
    parts = urlsplit(url)
    timestamp, nonce = str(int(time.time() if at is None else at)), secrets.token_hex(16)
    text = canonical(
        key=key,
        method=method.upper(),
        path=parts.path.encode() or b"/",
        query=parts.query.encode(),
        timestamp=timestamp,
        nonce=nonce,
        body=body,
    )
    return {
        "Tallybook-Key": key,
        "Tallybook-Timestamp": timestamp,
        "Tallybook-Nonce": nonce,
        "Tallybook-Signature": sign(shared, text),
    }
