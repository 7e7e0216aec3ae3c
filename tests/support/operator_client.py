"""A client of the operator API written from the docs page: it shares no code, and so no errors, with the server."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

SECRET = "8f1c" * 8 + "0a52d9e3" * 4
OTHER = "77aa01b2" * 8


def headers(
    method: str,
    target: str,
    body: bytes = b"",
    *,
    key: str = "ops",
    secret: str = SECRET,
    timestamp: int | str | None = None,
    nonce: str | None = None,
) -> dict[str, str]:
    """Return the four headers of a signed request; `target` is path and query."""
    parts = urlsplit(target)
    at = str(int(time.time()) if timestamp is None else timestamp)
    once = secrets.token_hex(16) if nonce is None else nonce
    query = "&".join(sorted(parts.query.split("&")))
    lines = ["tallybook-v1", key, method, parts.path, query, at, once, hashlib.sha256(body).hexdigest()]
    signature = hmac.new(bytes.fromhex(secret), "\n".join(lines).encode(), hashlib.sha256).hexdigest()
    return {
        "Tallybook-Key": key,
        "Tallybook-Timestamp": at,
        "Tallybook-Nonce": once,
        "Tallybook-Signature": f"v1={signature}",
    }


class Client:
    """Signed calls of one ASGI app."""

    def __init__(self, http: httpx2.AsyncClient, **signer: Any) -> None:
        self.http = http
        self.signer = signer

    def by(self, key: str, secret: str) -> Client:
        """Return a client of the same app with another key."""
        return Client(self.http, key=key, secret=secret)

    async def __call__(self, method: str, target: str, document: Any = None, **more: Any) -> httpx2.Response:
        """Sign and send one request; `headers` replaces headers, and None removes one."""
        body = more.pop("body", b"" if document is None else json.dumps(document).encode())
        changed = more.pop("headers", {})
        sent = {**headers(method, target, body, **{**self.signer, **more})}
        if body:
            sent["Content-Type"] = "application/json"
        sent = {name: value for name, value in {**sent, **changed}.items() if value is not None}
        return await self.http.request(method, target, content=body, headers=sent)


@asynccontextmanager
async def client(api: Any) -> AsyncIterator[Client]:
    """Yield a Client of an operator API in this process, or of an app that mounts one; close its connections."""
    transport = httpx2.ASGITransport(app=api)
    try:
        async with httpx2.AsyncClient(transport=transport, base_url="http://api.test") as http:
            yield Client(http)
    finally:
        if hasattr(api, "close"):
            await api.close()


def codes(response: httpx2.Response) -> tuple[int, str]:
    """Check that an answer is a problem, and return its status and code."""
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == response.status_code
    return response.status_code, problem["code"]


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    """Write a file of keys."""
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path
