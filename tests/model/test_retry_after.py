"""The time of the next attempt that an exception carries (retry_after.py)."""

import email.message
import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.hostile import hostile
from tallybook._model.retry_after import LONGEST, retry_after

NOW = datetime(2030, 5, 1, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


class TooMany(Exception):
    def __init__(self, retry_after=None):
        self.retry_after = retry_after


class ClientResponseError(Exception):
    """Like aiohttp's: the error has the headers."""

    def __init__(self, headers):
        self.headers = headers


def wait(error):
    return retry_after(error, NOW)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (60, MINUTE),
        (0.25, timedelta(seconds=0.25)),
        (Decimal("1.5"), timedelta(seconds=1.5)),
        (0, timedelta(0)),
        (MINUTE, MINUTE),
        (NOW + MINUTE, MINUTE),
        ((NOW + MINUTE).astimezone(tz=None), MINUTE),
        ("60", MINUTE),
        (b"60", MINUTE),
        (" 1.5 ", timedelta(seconds=1.5)),
        ("Wed, 01 May 2030 12:01:00 GMT", MINUTE),
        ("Wednesday, 01-May-30 12:01:00 GMT", MINUTE),
        ("Wed May  1 12:01:00 2030", MINUTE),
    ],
)
def test_what_an_exception_says(said, found):
    """Seconds, a timedelta, an aware datetime and the header's text are read, with all three date formats."""
    assert wait(TooMany(said)) == found


@pytest.mark.parametrize(
    "said",
    [
        *(
            None,
            True,
            -1,
            -0.5,
            math.nan,
            math.inf,
            -math.inf,
            Decimal("NaN"),
            Decimal("sNaN"),
            "",
            "soon",
            "-5",
            "1e5",
        ),
        *("5 min", "١٢", "9" * 21, "1" * 10_000, b"\xff", timedelta(seconds=-1), NOW - MINUTE, [60], {"seconds": 60}),
        *(NOW.replace(tzinfo=None) + MINUTE, object(), lambda: 60, "Wed, 99 May 2030 12:01:00 GMT", "Wed, 01 May"),
    ],
    ids=lambda said: type(said).__name__,
)
def test_nonsense_is_ignored(said):
    """A value that is negative, past, naive, or neither a number nor a date is ignored."""
    assert wait(TooMany(said)) is None


@pytest.mark.parametrize(
    "said",
    [10**400, 1e300, Decimal("1e999"), timedelta.max, datetime.max.replace(tzinfo=UTC), "9" * 20],
    ids=lambda said: type(said).__name__,
)
def test_at_most_a_day(said):
    """No value delays a job for more than 24 hours."""
    assert wait(TooMany(said)) == LONGEST == timedelta(days=1)


def test_headers_of_the_common_libraries():
    """Headers come from the response (httpx, requests) or the error (aiohttp, urllib), as a plain dict in any case."""

    class HTTPError(Exception):
        """Like those of httpx and requests: the error has a response, whose headers ignore case."""

        def __init__(self, **headers):
            message = email.message.Message()
            for name, value in headers.items():
                message[name.replace("_", "-")] = value
            self.response = SimpleNamespace(headers=message)

    assert wait(HTTPError(retry_after="60")) == MINUTE
    assert wait(ClientResponseError({"Retry-After": "60"})) == MINUTE
    assert wait(ClientResponseError({"RETRY-AFTER": "60"})) == MINUTE
    assert wait(ClientResponseError(MappingProxyType({"retry-after": b"60"}))) == MINUTE
    assert wait(ClientResponseError({"Content-Type": "text/plain"})) is None
    assert wait(ClientResponseError(None)) is None


def test_a_date_counts_from_the_date_of_its_response():
    """A date counts from the Date of the same response, because the server's clock may differ."""
    ahead = {"Date": "Wed, 01 May 2030 14:00:00 GMT", "Retry-After": "Wed, 01 May 2030 14:01:00 GMT"}
    assert wait(ClientResponseError(ahead)) == MINUTE
    assert wait(ClientResponseError({**ahead, "Date": "whenever"})) == 121 * MINUTE
    assert wait(ClientResponseError({**ahead, "Date": "Wed, 01 May 2030 15:00:00 GMT"})) is None
    assert wait(ClientResponseError({**ahead, "Retry-After": "60"})) == MINUTE


def test_causes_and_groups_are_looked_through_once():
    """An error's own value comes first, then its cause's; a group gives its longest; deeper levels are not read."""
    outer, middle = ValueError("outer"), ValueError("middle")
    outer.__cause__ = TooMany(60)
    assert wait(outer) == MINUTE
    middle.__cause__ = outer
    assert wait(middle) is None
    own = TooMany(5)
    own.__cause__ = TooMany(60)
    assert wait(own) == timedelta(seconds=5)
    group = ExceptionGroup("calls", [TooMany(5), ValueError(), TooMany(60), TooMany("soon")])
    assert wait(group) == MINUTE
    assert wait(ExceptionGroup("outer", [group])) is None
    assert wait(ExceptionGroup("none", [ValueError()])) is None


Hostile = hostile(Exception, __getattribute__=SystemExit)


class Endless(dict):
    def get(self, name):
        return None

    def items(self):
        while True:
            yield "x", "y"


@pytest.mark.parametrize(
    "make",
    [
        Hostile,
        lambda: hostile(ExceptionGroup, exceptions=KeyboardInterrupt, __cause__=RuntimeError)("x", [ValueError()]),
        lambda: TooMany(hostile(float, __ge__=RuntimeError)(60)),
        lambda: ClientResponseError(Endless()),
        lambda: ClientResponseError(SimpleNamespace(get=lambda: 1)),
        lambda: SystemExit(1),
        lambda: ExceptionGroup("x", [Hostile()]),
    ],
)
def test_no_exception_can_stop_it(make):
    """F29: whatever an exception does when it is read, the result is None."""
    assert wait(make()) is None


@given(st.one_of(st.text(), st.binary(), st.floats(), st.integers(), st.datetimes(), st.timedeltas(), st.decimals()))
def test_any_value_has_an_answer(said):
    """Any value, in an attribute or in a header, gives None or a delay from 0 to 24 hours."""
    for error in (TooMany(said), ClientResponseError({"Retry-After": said, "Date": said})):
        found = wait(error)
        assert found is None or timedelta(0) <= found <= LONGEST
