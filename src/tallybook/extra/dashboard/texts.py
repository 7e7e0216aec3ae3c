"""Values as people see and write them: templates and their filters, which escape everything, and fields of forms.

A field that cannot be read raises InvalidArgument with the reason.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from tallybook._db.texts import instant as of_json
from tallybook._model.durations import format_duration, parse_duration
from tallybook._model.options import text_problem
from tallybook._model.schedule import rule_text
from tallybook._model.subject import instant
from tallybook.errors import ConfigError, InvalidArgument, UnknownNode
from tallybook.extra.dashboard.redact import error_view, shown


@cache
def environment() -> Environment:
    """Return the environment of the dashboard's templates. A missing value is an error."""
    loader = PackageLoader("tallybook.extra.dashboard", "templates")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters = (when, duration, number, compact, shown, rate, plain_duration, moment, instant, size, error_view)
    env.filters |= {one.__name__: one for one in filters}
    env.globals["rule_text"] = rule_text
    return env


def moment(text: str | datetime | None) -> datetime | None:
    return of_json(text) if isinstance(text, str) else text


def when(at: datetime | None, empty: str = "–") -> Markup:
    """Return a time element: the exact time on hover and for machines, and a text that the page keeps up to date."""
    if at is None:
        return escape(empty)
    utc = at.astimezone(UTC)
    return Markup('<time datetime="{}" title="{} UTC">{} UTC</time>').format(
        utc.isoformat(), utc.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3], utc.strftime("%Y-%m-%d %H:%M:%S")
    )


def duration(value: timedelta | float | int | None) -> str:
    """Return a readable duration: 350 ms, 2.5 s, 4 min 10 s, 3 h 20 min, 5 d 2 h. A number is in seconds."""
    if value is None:
        return "–"
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        return f"{sign}{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{sign}{seconds:.3g} s"
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    size, name, smaller, small = next(unit for unit in units if whole >= unit[0])
    rest = whole % size // smaller
    return f"{sign}{whole // size:,} {name}" + (f" {rest} {small}" if rest else "")


def number(value: float | int | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def compact(value: float | int | None) -> str:
    """Return a short form of a number: 950, 12.3 k, 4.5 M."""
    if value is None:
        return "–"
    for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1000 if name == 'k' else size):.3g} {name}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def size(value: int | None) -> str:
    """Return a readable number of bytes: 90 MiB."""
    if value is None:
        return "–"
    return f"{value / 2**20:,.0f} MiB" if value < 2**30 else f"{value / 2**30:,.1f} GiB"


def rate(value: float | None) -> str:
    """Return a rate per second, or per minute if it is below one per second."""
    if value is None:
        return "–"
    if value == 0:
        return "0/s"
    return f"{compact(value)}/s" if value >= 1 else f"{value * 60:.3g}/min"


def address(root: str, path: str, /, **asked: Any) -> str:
    """Return the address of a page below the path where the dashboard is mounted; None and empty values are omitted."""
    said = urlencode({key: value for key, value in asked.items() if value not in (None, "", [], ())}, doseq=True)
    return f"{root}{path}" + (f"?{said}" if said else "")


def plain_duration(value: timedelta | None) -> str:
    """Return a duration as a form accepts it, in PostgreSQL's notation."""
    return "" if value is None else format_duration(value)


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
    problem = f"{name} {value[:60]!r} is not a time: write how long ago, like 2 hours"
    return _time(value, value.removesuffix("ago"), -1, problem) if value else None


def time_to_come(value: str) -> datetime:
    """Parse a time from now on: empty for now, a duration, or an instant."""
    problem = f"{value[:60]!r} is not a time: write a duration, like 2 hours"
    return _time(value, value.removeprefix("in "), 1, problem) if value else datetime.now(UTC)


def _time(value: str, duration: str, sign: int, problem: str) -> datetime:
    """Parse an instant, or a duration from now on, or before now if the sign is negative."""
    try:
        if not value[:4].isdecimal() or value[4:5] != "-":
            return datetime.now(UTC) + sign * parse_duration(duration, option="time")
        at = datetime.fromisoformat(value)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidArgument(f"{problem}, or 2026-01-31T09:00Z") from None


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


def id_of(value: str) -> int | None:
    """Parse an id in an address or a form, like that of a job; None if it is not valid."""
    found = int(value) if value.isascii() and value.isdecimal() and len(value) <= 19 else 0
    return found if 0 < found < 1 << 63 else None
