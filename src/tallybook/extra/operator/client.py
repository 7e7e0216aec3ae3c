"""A client of the operator API that uses the standard library only, so it needs no extra."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from tallybook.errors import ConfigError, OperatorRefused
from tallybook.extra.operator.request import signed_headers


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
                raise _refused(error) from None


def _refused(error: HTTPError) -> OperatorRefused:
    """Return a refusal, also one by a proxy, as an error."""
    try:
        said = json.load(error)
        return OperatorRefused(error.code, said["code"], said["detail"], hint=said.get("hint"))
    except (ValueError, LookupError, TypeError, AttributeError):
        hint = "Is this the address of the operator API, with its prefix?"
        return OperatorRefused(error.code, None, error.reason, hint=hint)
