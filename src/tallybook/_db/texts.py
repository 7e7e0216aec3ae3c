"""Conversion of values to and from the server's texts (see declared.py), and of stored values for people and pages.

PostgreSQL can store more than Python: whole numbers of any length, JSON thousands of levels deep, infinite times and
times before Christ. A worker refuses such a job (see runner.py). A reader shows the rest of the row, and what it can of
the value: no value that SQL can write prevents reading.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar, get_type_hints

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap
from psycopg.types.datetime import IntervalLoader, TimestamptzLoader
from psycopg.types.json import set_json_loads

from tallybook._model.durations import format_duration, parse_duration
from tallybook._model.options import check_instant, text_problem
from tallybook.errors import ConfigError, TallybookError

T = TypeVar("T")
_DEEPEST = 200  # the deepest level of JSON that is parsed; deeper values are read as text (our own: 64 at most)
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def loads(text: str | bytes | bytearray) -> Any:
    """Parse JSON of the server. Numbers too large for Python become text with the digits, too deep values JSON text."""
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text, parse_float=_float)
        if text.count("[") + text.count("{") <= _DEEPEST or not _is_too_deep(value):
            return value
    except (ValueError, RecursionError):
        pass
    return json.loads(_shallow(text), parse_float=_float, parse_int=_whole)


def _is_too_deep(value: Any) -> bool:
    """Whether a value is too deep; newer Pythons parse values that their own functions cannot traverse."""
    level = [value]
    for _ in range(_DEEPEST):
        inner = (one.values() if type(one) is dict else one for one in level)
        level = [found for within in inner for found in within if type(found) in (dict, list)]
        if not level:
            return False
    return True


def _float(digits: str) -> float | str:
    value = float(digits)
    return value if math.isfinite(value) else digits


def _whole(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # more digits than sys.get_int_max_str_digits
        return digits


def _shallow(text: str) -> str:
    """Return the same JSON with each value below the deepest level written as a text."""
    parts, depth, begun, done = [], 0, 0, 0
    for token in _TOKENS.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth == _DEEPEST + 1:
                begun = token.start()
        elif token[0] in "]}":
            depth -= 1
            if depth == _DEEPEST:
                parts += [text[done:begun], json.dumps(text[begun : token.end()])]
                done = token.end()
    return "".join([*parts, text[done:]])


def edge(text: str) -> datetime:
    """Return Python's first or last instant, for one out of its range."""
    early = text.startswith("-") or text.endswith("BC")
    return (datetime.min if early else datetime.max).replace(tzinfo=UTC)


class _Instant(TimestamptzLoader):
    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:  # infinity, or a year out of Python's range
            return edge(bytes(data).decode())


class _Interval(IntervalLoader):
    def load(self, data: Buffer) -> timedelta:
        try:
            return super().load(data)
        except (psycopg.DataError, OverflowError):
            return timedelta.min if bytes(data).startswith(b"-") else timedelta.max


READER: Any = SimpleNamespace(connection=None, adapters=AdaptersMap(psycopg.adapters))
"""How a page's or a command's connection reads columns: psycopg's `context`."""
READER.adapters.register_loader("timestamptz", _Instant)
READER.adapters.register_loader("interval", _Interval)
set_json_loads(loads, READER)


def instant(text: str | None) -> datetime | None:
    """Return an instant of the server's JSON, in UTC; one out of Python's range becomes the nearest possible one."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):  # infinity, or a year out of Python's range
        return edge(text)


def at(text: str) -> datetime:
    """Return an instant that is not null."""
    found = instant(text)
    assert found is not None
    return found


@cache
def _readers(made: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """Return the columns that a dataclass has, with the conversion by its annotation."""
    by_type: dict[object, Callable[[Any], Any]] = {
        datetime: instant,
        timedelta: lambda seconds: None if seconds is None else timedelta(seconds=seconds),
    }
    by_type |= {kind | None: read for kind, read in by_type.items()}  # type: ignore[operator]  # a class has it
    hints = get_type_hints(made)
    return {one.name: by_type.get(hints[one.name], lambda value: value) for one in fields(made)}


def record(made: type[T], row: dict[str, Any], **names: str) -> T:
    """Return a row of JSON, with lengths in seconds, as a dataclass. `names` renames columns; others are ignored."""
    columns = _readers(made)  # type: ignore[arg-type]  # a class has a hash
    return made(**{to: columns[to](value) for name, value in row.items() if (to := names.get(name, name)) in columns})


def records(made: type[T], **names: str) -> Callable[[str], list[T]]:
    """Return a function that reads a list of such rows."""
    return lambda text: [record(made, row, **names) for row in loads(text)]


def known(unknown: Callable[[], TallybookError], read: Callable[[str], T]) -> Callable[[str | None], T]:
    """Return a function that reads one row; for none it raises the error."""

    def reads(text: str | None) -> T:
        if text is None:
            raise unknown()
        return read(text)

    return reads


def some_of(option: str, given: str | Sequence[str] | None, all_: Sequence[str]) -> list[str] | None:
    """Return some of a few words, given as a sequence or one word. Raises ConfigError for any other."""
    words = [given] if isinstance(given, str) else None if given is None else list(given)
    if words is not None and (not words or not set(words) <= set(all_)):
        raise ConfigError(option, words, f"must be some of {', '.join(all_)}")
    return words


def checked(option: str, value: str | None) -> str | None:
    """Return a text that PostgreSQL can store. Raises ConfigError for any other value."""
    if value is not None and (not isinstance(value, str) or (problem := text_problem(value))):
        raise ConfigError(option, value, "not a text" if not isinstance(value, str) else problem)
    return value


def utc(at: datetime | None) -> str | None:
    """Return an instant in a form that every server reads alike, for any DateStyle and time zone."""
    return None if at is None else at.astimezone(UTC).isoformat()


def moment(option: str, value: datetime | None) -> str | None:
    """Return an instant for the server. Raises ConfigError for a time without its zone."""
    if value is None:
        return None
    check_instant(option, value, "Write datetime.now(UTC) - ...")
    return utc(value)


def duration(option: str, value: timedelta | str | None) -> str | None:
    """Return a duration for the server. Raises ConfigError for a text that is none."""
    return None if value is None else format_duration(parse_duration(value, option=option))


def text_array(items: Sequence[str | None]) -> str:
    """Return PostgreSQL's array literal of these texts."""
    if None in items:
        return "{" + ",".join("NULL" if item is None else quoted(item) for item in items) + "}"
    # One pass in C over the whole text; items that contain the separator (no JSON does) take the slow way.
    joined = _SEPARATOR.join(items)  # type: ignore[arg-type]
    if joined.count(_SEPARATOR) != len(items) - 1:
        return "{" + ",".join(map(quoted, items)) + "}"  # type: ignore[arg-type]
    escaped = joined.replace("\\", "\\\\").replace('"', '\\"').replace(_SEPARATOR, '","')
    return '{"' + escaped + '"}'


_SEPARATOR = "\x1f"


def quoted(item: str) -> str:
    """Return an item of an array literal."""
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
