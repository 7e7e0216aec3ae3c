"""Parse the values of filters as people write them: times, links, numbers. Raises InvalidArgument with the reason."""

from collections.abc import Iterable
from datetime import UTC, datetime

from tallybook._model.durations import parse_duration
from tallybook._model.options import text_problem
from tallybook.errors import ConfigError, InvalidArgument, UnknownNode

WRONG = (ConfigError, InvalidArgument, UnknownNode)
"""The errors of a filter that the viewer has set; a list shows them in its page, with status 400."""

_LONGEST = 500


def text_of(name: str, value: str) -> str | None:
    """Return a text that PostgreSQL can store, or None if it is empty."""
    if problem := text_problem(value):
        raise InvalidArgument(f"{name} {problem}")
    if len(value) > _LONGEST:
        raise InvalidArgument(f"{name} has at most {_LONGEST} characters, this one has {len(value):,}")
    return value or None


def when_of(name: str, value: str) -> datetime | None:
    """Parse a time in the past or an instant: `2 hours`, `2026-01-31T09:00Z`. An instant without a zone is in UTC."""
    if not value:
        return None
    try:
        return _instant(value) or datetime.now(UTC) - parse_duration(value.removesuffix("ago"), option=name)
    except (ValueError, OverflowError, ConfigError):
        said = f"{name} {value[:60]!r} is not a time: write how long ago, like 2 hours, or 2026-01-31T09:00Z"
        raise InvalidArgument(said) from None


def time_to_come(value: str) -> datetime:
    """Parse a time from now on: empty for now, a duration, or an instant."""
    if not value:
        return datetime.now(UTC)
    try:
        return _instant(value) or datetime.now(UTC) + parse_duration(value.removeprefix("in "), option="run_at")
    except (ValueError, OverflowError):
        said = f"{value[:60]!r} is not a time: write a duration, like 2 hours, or 2026-01-31T09:00Z"
        raise InvalidArgument(said) from None


def _instant(value: str) -> datetime | None:
    """Parse an instant; None if the text does not begin like one. Raises ValueError and OverflowError."""
    if not value[:4].isdecimal() or value[4:5] != "-":
        return None
    at = datetime.fromisoformat(value)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)


def links_of(values: Iterable[str]) -> dict[str, str] | None:
    """Parse links of the form KIND=KEY; None if there are none."""
    found = {}
    for value in values:
        kind, sign, key = value.partition("=")
        if not sign or not kind.strip() or not key.strip():
            raise InvalidArgument(f"the link {value[:60]!r} is not KIND=KEY, like customer=42")
        found[kind.strip()] = key.strip()
    return found or None


def number_of(name: str, value: str, least: int, most: int, default: int) -> int:
    """Parse a whole number within bounds; return the default for an empty text."""
    if value and not (value.isascii() and value.isdecimal() and len(value) < 10 and least <= int(value) <= most):
        raise InvalidArgument(f"{name} {value[:60]!r} is not a whole number from {least} to {most:,}")
    return int(value) if value else default


def job_of(value: str) -> int | None:
    """Parse the id of a job in an address or a form; None if it is not valid."""
    found = int(value) if value.isascii() and value.isdecimal() and len(value) <= 19 else 0
    return found if 0 < found < 1 << 63 else None
