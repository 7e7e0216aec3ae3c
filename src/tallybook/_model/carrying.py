"""The headers of jobs: reading them, and adding to those of jobs to enqueue."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tallybook._model.after import with_headers
from tallybook._model.job import JobCall
from tallybook._model.subject import SubjectCall
from tallybook._model.tracing import What

_MOST_BYTES = 8_000
# jsonb writes a number with an exponent in full; no Python float needs more digits than this.
_DIGITS = 330


def read_headers(headers: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return headers as a mapping, empty if they cannot be read."""
    if not isinstance(headers, str):
        return headers or {}
    try:
        found = json.loads(headers)
    except (ValueError, RecursionError):  # SQL may have stored headers that Python cannot read
        return {}
    return found if isinstance(found, dict) else {}


def with_added(headers: str | None, carried: Mapping[str, str]) -> str | None:
    """Return headers, as JSON text, with missing names added as far as they fit: the longest is left out first."""
    own = read_headers(headers)
    added = {name: value for name, value in carried.items() if name not in own}
    numbers = json.dumps(own, ensure_ascii=False)  # without `added`: its text may have an e before a hyphen
    most = _MOST_BYTES - _DIGITS * (numbers.count("e+") + numbers.count("e-"))
    while added:
        text = json.dumps({**own, **added}, ensure_ascii=False)  # with spaces after : and , as jsonb writes it
        if len(text.encode()) <= most:
            return text
        added.pop(max(added, key=lambda name: (len(added[name]), name)))
    return headers


def carrying(what: What, headers: Callable[[str | None], str | None]) -> What:
    """Return the same with other headers, as JSON text. Shared options stay shared."""
    if isinstance(what, JobCall | SubjectCall):
        return replace(what, options=replace(what.options, headers=headers(what.options.headers)))
    return with_headers(what, headers)  # type: ignore[arg-type, return-value]  # a list is of one kind
