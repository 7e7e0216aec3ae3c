"""What travels in the headers of jobs: read, and added to what is put in."""

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
# jsonb writes a number out that JSON gives an exponent; no float of Python's needs more digits than this.
_DIGITS = 330


def read_headers(headers: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Headers as a mapping; an empty one where they cannot be read."""
    if not isinstance(headers, str):
        return headers or {}
    try:
        found = json.loads(headers)
    except (ValueError, RecursionError):  # SQL may have put in what Python cannot read
        return {}
    return found if isinstance(found, dict) else {}


def with_added(headers: str | None, carried: Mapping[str, str]) -> str | None:
    """Headers, as JSON text, with what is not in them yet, as far as it fits: the longest is left out first."""
    own = read_headers(headers)
    added = {name: value for name, value in carried.items() if name not in own}
    numbers = json.dumps(own, ensure_ascii=False)  # what is added is text, in which an e may stand before a hyphen
    most = _MOST_BYTES - _DIGITS * (numbers.count("e+") + numbers.count("e-"))
    while added:
        text = json.dumps({**own, **added}, ensure_ascii=False)  # with spaces after : and , as jsonb writes it
        if len(text.encode()) <= most:
            return text
        added.pop(max(added, key=lambda name: (len(added[name]), name)))
    return headers


def carrying(what: What, headers: Callable[[str | None], str | None]) -> What:
    """The same with other headers, as JSON text. Calls that shared options share them still."""
    if isinstance(what, JobCall):
        return replace(what, options=replace(what.options, headers=headers(what.options.headers)))
    if isinstance(what, SubjectCall):
        return _subjects([what], headers)[0]
    if what and isinstance(what[0], SubjectCall):
        return _subjects(what, headers)
    return with_headers(what, headers)  # type: ignore[arg-type, return-value]  # a list is of one kind


def _subjects(calls: list[SubjectCall], headers: Callable[[str | None], str | None]) -> list[SubjectCall]:
    options = {
        id(call.options): replace(call.options, headers=headers(call.options.headers))
        for call in {id(call.options): call for call in calls}.values()
    }
    return [replace(call, options=options[id(call.options)]) for call in calls]
