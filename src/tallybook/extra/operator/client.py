"""Sign requests to the operator API, for any HTTP library, and send them. Needs no extra, only the standard library.

See https://github.com/tallybook/tallybook/blob/main/docs/operator-api.md.

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

import hashlib
import hmac
import json
import re
import secrets
import time
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from tallybook.errors import ConfigError, OperatorRefused

_UNSIGNABLE = re.compile(rb"[\x00-\x20\x7f]")


def canonical(*, key: str, method: str, path: bytes, query: bytes, timestamp: str, nonce: str, body: bytes) -> bytes:
    """Return the text to sign. Raises ValueError for a path or a query with invalid characters."""
    if _UNSIGNABLE.search(path) or _UNSIGNABLE.search(query):
        raise ValueError("the path or the query has a space or a control character")
    lines = (
        b"tallybook-v1",
        key.encode(),
        method.encode("latin-1"),
        path,
        b"&".join(sorted(query.split(b"&"))),
        timestamp.encode(),
        nonce.encode(),
        hashlib.sha256(body).hexdigest().encode(),
    )
    return b"\n".join(lines)


def sign(secret: bytes, text: bytes) -> str:
    """Return the value of the header Tallybook-Signature."""
    return "v1=" + hmac.new(secret, text, hashlib.sha256).hexdigest()


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
    path, query = parts.path.encode() or b"/", parts.query.encode()
    said = {"key": key, "timestamp": str(int(time.time() if at is None else at)), "nonce": secrets.token_hex(16)}
    text = canonical(method=method.upper(), path=path, query=query, body=body, **said)
    return {f"Tallybook-{name.title()}": value for name, value in (said | {"signature": sign(shared, text)}).items()}


class _NoRedirects(HTTPRedirectHandler):
    """A handler that never redirects: a signed request is sent only to the address that it was made for."""

    def redirect_request(self, *_: Any) -> None:
        return None


class OperatorClient:
    """A client of the operator API that signs each request with a key of `tallybook web key`.

    `url` is the address of the API with its prefix. A request without an answer in `timeout` seconds fails. ConfigError
    if `url` is not an HTTP address.

        api = OperatorClient("https://ops.example.com/api/v1", "deploy", os.environ["API_SECRET"])
        api.call("POST", "/queues/mail/pause")
    """

    def __init__(self, url: str, key: str, secret: str, *, timeout: float = 35) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError("url", url, "does not begin with http:// or https://")
        self.url = url.rstrip("/")
        self._key, self._secret, self._timeout = key, secret, timeout
        self._opener = build_opener(_NoRedirects)

    def call(self, method: str, target: str, document: object = None) -> Any:
        """Sign and send a request; return the JSON document of the answer.

        `target` is the path below the URL, with its query. Raises OperatorRefused if the API refuses the request,
        OSError or http.client.HTTPException if no answer comes. If it is unknown whether a request was served, the
        client sends the same request once more. Nothing is done twice: `replayed` then means that the first one was
        answered.

            api.call("POST", "/dead-letters/retry", {"queue": "mail", "reason": "failed"})["retried"]
        """
        method, url = method.upper(), self.url + target
        body = b"" if document is None else json.dumps(document).encode()
        headers = signed_headers(self._key, self._secret, method, url, body) | {"Content-Type": "application/json"}
        request = Request(url, body or None, headers, method=method)
        try:
            return self._send(request)
        except OperatorRefused as refused:
            if refused.code != "in_doubt":
                raise
        except (OSError, HTTPException):
            pass
        return self._send(request)

    def _send(self, request: Request) -> Any:
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return json.load(answer)
        except HTTPError as error:
            with error:
                try:
                    said = json.load(error)
                    refused = OperatorRefused(error.code, said["code"], said["detail"], hint=said.get("hint"))
                except (ValueError, LookupError, TypeError, AttributeError):  # of a proxy
                    hint = "Is this the address of the operator API, with its prefix?"
                    refused = OperatorRefused(error.code, None, error.reason, hint=hint)
                raise refused from None
