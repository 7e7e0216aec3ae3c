"""Database text for a terminal: it cannot move the cursor, colour the screen or fake a line."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Columns = Mapping[str, str | Callable[[Any], object]]
"""Columns of a table: a title, and an attribute or a function that makes the cell of a row."""

_SPACES = re.compile(r"[\t\n\r\v\f\x85\u2028\u2029]+")
_SEQUENCES = re.compile("(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]")
# C0 and C1 controls, and the marks that change the direction of text.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_C1 = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(value: object) -> str:
    """Return `value` as one line without control characters; None is empty."""
    return "" if value is None else _CONTROLS.sub("", _SPACES.sub(" ", _SEQUENCES.sub("", str(value))))


def json_safe(text: str) -> str:
    """Return equal JSON with control characters as escapes."""
    return _C1.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def local(text: str | datetime | None) -> str:
    """Format a time (or its JSON) in the local zone, to the second."""
    if not text:
        return ""
    try:
        at = text if isinstance(text, datetime) else datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # infinity, or a year that Python does not know
        return clean(text)


def yes_no(value: object) -> object:
    """Return a truth value as a word, and any other value as it is."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def short(text: str, most: int = 100) -> str:
    text = clean(text)
    return text if len(text) <= most else text[: most - 3] + "..."


def columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a plain table: columns two spaces apart, numbers right-aligned, no padding at the end."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    numeric = [bool(rows) and all(row[at].lstrip("-").isdigit() for row in rows) for at in range(len(titles))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, numeric, strict=True)
        return "  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in cells).rstrip()

    return [line(row) for row in (titles, *rows)]
