"""The body of a request: limited before it is read, hashed before it is parsed, and plain JSON only."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any

from starlette.requests import Request

from tallybook.extra.operator.problems import Problem

MAX_BYTES = 1_000_000
MAX_DEPTH = 64

# An unterminated string extends to the end of the body. Nothing backtracks, so any body is scanned once.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


async def read_body(request: Request) -> bytes:
    """Return the whole body. A Problem if it is compressed or exceeds 1 MB; reading stops there."""
    for raw, value in request.headers.raw:
        name = raw.lower()
        if name == b"content-length" and (not value.isdigit() or int(value[:20]) > MAX_BYTES):
            raise _too_large()
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise Problem("media_type", "compressed bodies are not supported")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise _too_large()
    return bytes(body)


def _too_large() -> Problem:
    return Problem("too_large", f"a body has at most {MAX_BYTES} bytes", headers={"Connection": "close"})


def parsed(body: bytes, content_types: list[bytes]) -> dict[str, Any]:
    """Return the JSON object in the body; an empty body is an empty object. A Problem for anything else."""
    if not body:
        return {}
    if len(content_types) != 1 or not _is_json(content_types[0]):
        raise Problem("media_type", "a body needs the header Content-Type: application/json")
    if _is_too_deep(body):
        raise Problem("malformed", f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        found = json.loads(body.decode(), parse_constant=_no_number, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError):
        reason = "the body is not JSON in UTF-8, or has a duplicate name or an invalid number"
        raise Problem("malformed", reason) from None
    if not isinstance(found, dict):
        raise Problem("invalid", "the body must be one JSON object")
    return found


def _is_json(value: bytes) -> bool:
    kind, _, more = (part.strip() for part in value.decode("latin-1").lower().partition(";"))
    return kind == "application/json" and more in ("", "charset=utf-8", 'charset="utf-8"')


def _is_too_deep(body: bytes) -> bool:
    steps = (1 if bracket[0] in b"[{" else -1 for bracket in _BRACKET.finditer(_STRING.sub(b"", body)))
    return any(depth > MAX_DEPTH for depth in accumulate(steps))


def _no_number(word: str) -> float:
    raise ValueError(word)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("duplicate name")
    return found
