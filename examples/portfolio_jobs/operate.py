"""A small client of the operator API: every request is signed with a key, and good for once (docs/operator-api.md)."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from tallybook.extra.operator import signed_headers


class Operator:
    """Who looks after the jobs from outside, by a key of their own."""

    def __init__(self, url: str, key: str, secret: str) -> None:
        self.key, self._secret = key, secret
        self.http = httpx2.Client(base_url=url, timeout=35)

    def signed(self, method: str, target: str, document: Any = None, *, at: float | None = None) -> httpx2.Request:
        """A request with its four headers. It is served once, and within 300 s."""
        body = b"" if document is None else json.dumps(document).encode()
        request = self.http.build_request(method, target, content=body, headers={"Content-Type": "application/json"})
        request.headers.update(signed_headers(self.key, self._secret, method, str(request.url), body, at=at))
        return request

    def send(self, request: httpx2.Request) -> tuple[int, Any]:
        """The status and the document of the answer, a refusal's, too: its `code` says why."""
        answer = self.http.send(request)
        return answer.status_code, answer.json()

    def __call__(self, method: str, target: str, document: Any = None) -> Any:
        """Sign, send, and return what the API answers; a refusal is an error."""
        status, said = self.send(self.signed(method, target, document))
        if status >= 400:
            raise RuntimeError(f"{method} {target}: {said['code']}: {said['detail']}")
        return said
