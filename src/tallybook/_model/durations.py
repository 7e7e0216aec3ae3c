"""Durations in human form: `timedelta` in Python, PostgreSQL's words in options, settings and SQL.

`parse_duration` and PostgreSQL's `interval` read all output of `format_duration` alike. A month or a year is refused,
because it has no fixed length. A bare number is refused, too: `300` may mean seconds, milliseconds or minutes.
A day is 24 hours here, but a calendar day in an `interval`; across changes of a zone's offset, pass the seconds.
"""

import re
from datetime import timedelta
from decimal import Decimal

from tallybook.errors import ConfigError

_UNITS = {  # microseconds each: exactly the spellings that PostgreSQL accepts
    1: "us usec usecs usecond useconds microsecond microseconds",
    1_000: "ms msec msecs msecond mseconds millisecond milliseconds",
    1_000_000: "s sec secs second seconds",
    60_000_000: "m min mins minute minutes",
    3_600_000_000: "h hr hrs hour hours",
    86_400_000_000: "d day days",
    604_800_000_000: "w week weeks",
}
_MICROSECONDS = {word: size for size, words in _UNITS.items() for word in words.split()}
_PART = re.compile(r"\s*(?:([0-9]+):([0-9]{2})(?::([0-9]{2}(?:\.[0-9]+)?))?|([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]+))")
_ISO = re.compile(
    r"(-?)P(?:(-?[0-9]+)W)?(?:(-?[0-9]+)D)?"
    r"(?:T(?:(-?[0-9]+)H)?(?:(-?[0-9]+)M)?(?:(-?[0-9]+(?:\.[0-9]+)?)S)?)?"
)
_ISO_SIZES = (604_800_000_000, 86_400_000_000, 3_600_000_000, 60_000_000, 1_000_000)
_WORDS = (
    (86_400_000_000, "day", "days"), (3_600_000_000, "hour", "hours"), (60_000_000, "min", "min"),
    (1_000_000, "s", "s"), (1_000, "ms", "ms"), (1, "us", "us"),
)  # fmt: skip
_EXAMPLES = "Write '30 s', '5 min', '1 hour 30 min', '2 days', or pass a timedelta"


def parse_duration(value: str | timedelta, *, option: str = "duration") -> timedelta:
    """Return the duration of `value`; a timedelta is returned unchanged.

    Reads PostgreSQL's words (`500 ms`, `90 s`, `5 min`, `1h30m`, `1 day 02:00:00`, `PT5M`) in any case, also fractions.
    Raises ConfigError, which names `option`, for anything else, for a negative duration, and for one that is too long
    for a timedelta.
    """
    if isinstance(value, timedelta):
        result = value
    elif not isinstance(value, str):
        raise ConfigError(option, value, "not a duration", hint=_EXAMPLES)
    else:
        try:
            result = timedelta(microseconds=_microseconds(value.strip()))
        except OverflowError:
            raise ConfigError(option, value, "longer than a timedelta can be") from None
        except ValueError as error:
            raise ConfigError(option, value, str(error), hint=_EXAMPLES) from None
    if result < timedelta(0):
        raise ConfigError(option, value, "a duration cannot be negative")
    return result


def _microseconds(text: str) -> int:
    if not text or len(text) > 100:
        raise ValueError("not a duration")
    if text[0] in "Pp":
        return _iso_microseconds(text.upper())
    total, at, lowered = Decimal(0), 0, text.lower()
    while at < len(lowered):
        part = _PART.match(lowered, at)
        if part is None:
            raise ValueError("not a duration" if re.search("[a-z:]", lowered) else "a duration needs a unit")
        at = part.end()
        hours, minutes, seconds, number, unit = part.groups()
        if unit is None:
            total += int(hours) * 3_600_000_000 + int(minutes) * 60_000_000 + Decimal(seconds or 0) * 1_000_000
        elif unit in _MICROSECONDS:
            total += Decimal(number) * _MICROSECONDS[unit]
        elif re.fullmatch("mons?|months?|y|yrs?|years?", unit):
            raise ValueError(f"{unit!r} has no fixed length")
        else:
            raise ValueError(f"unknown unit {unit!r}")
    return round(total)


def format_duration(duration: timedelta) -> str:
    """Format `duration` in PostgreSQL's words, largest unit first, no empty parts: "5 min", "2 days 1 hour", "0 s".

    Exact to the microsecond. In a negative duration every part has a minus, as `interval` requires.
    """
    rest = abs(duration // timedelta(microseconds=1))
    sign = "-" if duration < timedelta(0) else ""
    parts = []
    for size, one, many in _WORDS:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{sign}{count} {one if count == 1 else many}")
    return " ".join(parts) or "0 s"


def seconds_text(duration: timedelta) -> str:
    """Return `duration` as an exact interval: in seconds, so that no day is a calendar day."""
    return f"{duration.days * 86_400 + duration.seconds}.{duration.microseconds:06d} s"


def iso_duration(duration: timedelta) -> str:
    """Return `duration` as ISO 8601 text for JSON, in hours and below: "PT1H30M", "PT0S", "PT-1M-0.5S".

    Days are written as hours because PostgreSQL reads `P1D` as a calendar day, which has 23 or 25 hours twice a year.
    """
    total = duration // timedelta(microseconds=1)
    sign, total = ("-" if total < 0 else ""), abs(total)
    hours, rest = divmod(total, 3_600_000_000)
    minutes, rest = divmod(rest, 60_000_000)
    seconds, micros = divmod(rest, 1_000_000)
    text = "PT" + (f"{sign}{hours}H" if hours else "") + (f"{sign}{minutes}M" if minutes else "")
    if micros:
        return f"{text}{sign}{seconds}.{micros:06d}".rstrip("0") + "S"
    return f"{text}{sign}{seconds}S" if seconds or text == "PT" else text


def parse_iso_duration(text: str) -> timedelta:
    """Return the duration of ISO 8601 text: weeks, days, hours, minutes, seconds. Raises ValueError for other text."""
    try:
        return timedelta(microseconds=_iso_microseconds(text))
    except OverflowError:
        raise ValueError("longer than a timedelta can be") from None


def _iso_microseconds(text: str) -> int:
    match = _ISO.fullmatch(text) if len(text) <= 100 else None
    if match is None or not any(match.groups()[1:]) or text.endswith("T"):
        raise ValueError("not a duration like PT1H30M")
    total = sum(Decimal(part) * size for part, size in zip(match.groups()[1:], _ISO_SIZES, strict=True) if part)
    return round(-total if match[1] else total)
