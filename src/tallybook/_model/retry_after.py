"""Retry-After: how long an exception asks to wait before another attempt.

Searched on the exception, its `__cause__`, and the members of an exception group, no deeper:

    error.retry_after                        seconds, a timedelta, an aware datetime, or the header's text
    error.response.headers["Retry-After"]    httpx, requests and libraries built on them: seconds, or a date
    error.headers["Retry-After"]             aiohttp, urllib

A date in the header counts from the `Date` of the same response if there is one, so that the two clocks need not agree.
The maximum is 24 hours: more is a mistake, or no reason to keep a job waiting unseen. Invalid values (negative, past,
not a number, a naive datetime, any other text) are ignored.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any

LONGEST = timedelta(hours=24)  # no Retry-After delays a job for longer than this; its retry policy may

_LONGEST_TEXT = 100
_MEMBERS = 100
_SECONDS = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,20})?")


def retry_after(error: BaseException, now: datetime) -> timedelta | None:
    """Return how long from `now` (aware) the exception asks to wait, at most LONGEST, or None.

    Its own value has precedence over its cause's; of several members of a group the longest counts. Never raises,
    whatever the attributes of the exception do.
    """
    if (found := _of_one(error, now)) is not None:
        return found
    others: list[BaseException] = []
    with suppress(BaseException):  # a property of a crafted exception may raise anything, here and below
        if error.__cause__ is not None:
            others.append(error.__cause__)
    with suppress(BaseException):
        if isinstance(error, BaseExceptionGroup):
            others.extend(islice(error.exceptions, _MEMBERS))
    waits = [wait for other in others if (wait := _of_one(other, now)) is not None]
    return max(waits, default=None)


def _of_one(error: BaseException, now: datetime) -> timedelta | None:
    ways: tuple[Callable[[Any], timedelta | None], ...] = (
        lambda error: _wait(error.retry_after, None, now),
        lambda error: _of_headers(error.response.headers, now),
        lambda error: _of_headers(error.headers, now),
    )
    for way in ways:
        with suppress(BaseException):  # most have none of these
            if (found := way(error)) is not None:
                return found
    return None


def _of_headers(headers: object, now: datetime) -> timedelta | None:
    said = _header(headers, "Retry-After")
    return None if said is None else _wait(said, _header(headers, "Date"), now)


def _header(headers: object, name: str) -> object:
    """Return a header by its name in any case; mappings of HTTP libraries ignore case, a plain dict may not."""
    get = getattr(headers, "get", None)
    if not callable(get):
        return None
    if (found := get(name)) is None and isinstance(headers, Mapping):
        items: Iterator[tuple[object, object]] = islice(headers.items(), 1000)
        found = next((value for key, value in items if isinstance(key, str) and key.lower() == name.lower()), None)
    return found


def _wait(said: object, date: object, now: datetime) -> timedelta | None:
    wait: timedelta | None = None
    if isinstance(said, timedelta):
        wait = said
    elif isinstance(said, datetime):
        wait = said - now if said.utcoffset() is not None else None
    elif isinstance(said, int | float | Decimal) and not isinstance(said, bool):
        wait = _seconds(said)
    elif isinstance(said, str | bytes):
        text = _text(said)
        if _SECONDS.fullmatch(text):
            wait = _seconds(Decimal(text))
        elif (at := _http_date(text)) is not None:
            wait = at - (_http_date(_text(date)) or now)
    return min(wait, LONGEST) if wait is not None and wait >= timedelta(0) else None


def _text(said: object) -> str:
    """Return a header's value, or an empty text, which is neither date nor number."""
    if isinstance(said, bytes):
        said = said[: _LONGEST_TEXT + 1].decode("latin-1")
    return said.strip() if isinstance(said, str) and len(said) <= _LONGEST_TEXT else ""


def _seconds(number: float | Decimal) -> timedelta | None:
    if not number >= 0 or number == math.inf:
        return None
    return timedelta(seconds=float(min(number, LONGEST.total_seconds())))


def _http_date(text: str) -> datetime | None:
    """Return a date in one of the three forms of HTTP, aware; None for any other text."""
    try:
        found = parsedate_to_datetime(text)
    except Exception:  # of its parts: ValueError, TypeError, IndexError, OverflowError
        return None
    return found if found.utcoffset() is not None else found.replace(tzinfo=UTC)
