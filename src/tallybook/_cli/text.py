"""Text out of the database on a terminal: nothing in it can move the cursor, colour the screen or fake a line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

_SPACES = re.compile(r"[\t\n\r\v\f\x85\u2028\u2029]+")
_SEQUENCES = re.compile("(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]")
# C0 and C1 controls, and the marks that turn the direction of what follows.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_C1 = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(value: object) -> str:
    """One line of `value` without control characters; None is empty."""
    return "" if value is None else _CONTROLS.sub("", _SPACES.sub(" ", _SEQUENCES.sub("", str(value))))


def json_safe(text: str) -> str:
    """JSON with what a terminal could act on written as escapes; it means the same."""
    return _C1.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def local(text: str | datetime | None) -> str:
    """An instant, or one as JSON has it, in the zone of who looks, to the second."""
    if not text:
        return ""
    try:
        at = text if isinstance(text, datetime) else datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # infinity, or a year that Python does not know
        return clean(text)


def short(text: str, most: int = 100) -> str:
    """As much of a text as fits on a line."""
    text = clean(text)
    return text if len(text) <= most else text[: most - 3] + "..."


def columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a plain table: columns two spaces apart, numbers to the right, the last one as long as it is."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    numeric = [bool(rows) and all(row[at].lstrip("-").isdigit() for row in rows) for at in range(len(titles))]
    lines = []
    for row in (titles, *rows):
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
