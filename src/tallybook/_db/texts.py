"""Values as the texts that go to the server and come from it: see declared.py."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from tallybook._db.stored import edge

__all__ = ["instant", "quoted", "text_array"]


def instant(text: str | None) -> datetime | None:
    """An instant of the server's JSON, in UTC; one that Python does not know becomes the nearest that it knows."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):  # infinity, or a year that Python does not know
        return edge(text)


def text_array(items: Sequence[str | None]) -> str:
    """PostgreSQL's array literal for these texts."""
    if None in items:
        return "{" + ",".join("NULL" if item is None else quoted(item) for item in items) + "}"
    # One pass of C over the whole text; items with the separator in them (no JSON has it) go the slow way.
    joined = _SEPARATOR.join(items)  # type: ignore[arg-type]
    if joined.count(_SEPARATOR) != len(items) - 1:
        return "{" + ",".join(map(quoted, items)) + "}"  # type: ignore[arg-type]
    escaped = joined.replace("\\", "\\\\").replace('"', '\\"').replace(_SEPARATOR, '","')
    return '{"' + escaped + '"}'


_SEPARATOR = "\x1f"


def quoted(item: str) -> str:
    """An item of an array literal."""
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
