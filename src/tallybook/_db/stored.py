"""Stored values for people and pages: no value that SQL can write prevents reading.

PostgreSQL can store more than Python: whole numbers of any length, JSON thousands of levels deep, infinite times and
times before Christ. A worker refuses such a job (see runner.py). A reader shows the rest of the row, and what it can of
the value.
"""

import json
import math
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap
from psycopg.types.datetime import IntervalLoader, TimestamptzLoader
from psycopg.types.json import set_json_loads

_DEEPEST = 200
"""The deepest level of JSON that is parsed; deeper values are read as text. Our own have at most 64."""
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


class Reader:
    """How a page's or a command's connection reads columns: psycopg's `context`."""

    connection: psycopg.Connection[Any] | None = None

    def __init__(self) -> None:
        self.adapters = AdaptersMap(psycopg.adapters)
        self.adapters.register_loader("timestamptz", _Instant)
        self.adapters.register_loader("interval", _Interval)
        set_json_loads(loads, self)


READER = Reader()
