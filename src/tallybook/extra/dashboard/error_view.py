"""Errors of jobs for pages. Any program may have written them, so nothing is taken for what it should be."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tallybook.extra.dashboard.render import instant

_SAID = ("type", "message", "at", "started_at", "attempt", "worker", "traceback")
_LONGEST = 20_000


@dataclass(frozen=True, slots=True)
class ErrorView:
    """One error: what it was, when, and what else is on record of it."""

    type: str
    message: str
    at: datetime | None
    attempt: int | None
    traceback: str
    more: dict[str, Any] | None
    """Details, a ref_id, and what others put there."""


def error_view(error: object) -> ErrorView:
    found = error if isinstance(error, dict) else {"message": error}
    attempt = found.get("attempt")
    more = {key: value for key, value in found.items() if key not in _SAID and value is not None}
    return ErrorView(
        type=_text(found.get("type")),
        message=_text(found.get("message")),
        at=instant(found.get("at")),
        attempt=attempt if type(attempt) is int else None,
        traceback=_text(found.get("traceback")),
        more=more or None,
    )


def error_views(errors: object) -> list[ErrorView]:
    """An error history, newest first."""
    return [error_view(error) for error in reversed(errors)] if isinstance(errors, list) else []


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … {len(text) - _LONGEST:,} more characters"
