"""Args as jsonb: what is stored, what is refused, and round trips (payload.py)."""

import dataclasses
import enum
import json
import math
import sys
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.hostile import hostile
from tallybook._model.decoder import decode
from tallybook._model.payload import encode
from tallybook.errors import PayloadError


def stored(value: object, **options: Any) -> Any:
    return json.loads(encode(value, task="mail.send", **options))


def refused(value: object, **options: Any) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        encode(value, task="mail.send", **options)
    return caught.value


@dataclasses.dataclass
class Address:
    street: str
    since: date
    tags: list[str] = dataclasses.field(default_factory=list)


class Color(enum.Enum):
    RED = "red"
    DEEP = ("a", 1)


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    at: datetime


text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**400) | floats | text
zones = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(
    st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=20
    )
)
def test_every_json_value_round_trips(value):
    """I13: decode(encode(x)) == x for every JSON value, with big integers, unicode, empty and nested ones."""
    assert decode(Any, stored(value), task="t") == value


@given(
    st.one_of(
        st.tuples(st.just(datetime), st.datetimes(timezones=zones)),
        st.tuples(st.just(date), st.dates()),
        st.tuples(st.just(time), st.times()),
        st.tuples(st.just(timedelta), st.timedeltas()),
        st.tuples(st.just(UUID), st.uuids()),
        st.tuples(st.just(Decimal), st.decimals(allow_nan=False, allow_infinity=False)),
        st.tuples(st.just(Color), st.sampled_from(Color)),
        st.tuples(st.just(Level), st.sampled_from(Level)),
        st.tuples(st.just(float), floats),
        st.tuples(st.just(Address), st.builds(Address, text, st.dates(), st.lists(text, max_size=3))),
        st.tuples(st.just(Point), st.builds(Point, st.integers(), st.datetimes(timezones=zones))),
    )
)
def test_every_typed_value_round_trips(pair):
    """I13: each supported type comes back equal and of its type: alone, in a list, dict or tuple, and as optional."""
    annotation, value = pair
    for shape, whole in (
        (annotation, value),
        (list[annotation], [value, value]),
        (dict[str, annotation], {"a": value}),
        (tuple[annotation, int], (value, 3)),
        (annotation | None, value),
    ):
        back = decode(shape, stored(whole), task="t")
        assert back == whole
        assert type(back) is type(whole)


@given(
    st.recursive(
        st.sampled_from([math.nan, math.inf, "a\0b", "\ud800", b"x", {1}, object(), datetime(2026, 1, 1)])
        | scalars
        | st.binary()
        | st.complex_numbers()
        | st.text(st.characters(), max_size=5),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none(), inner) | st.tuples(inner)
        ),
        max_leaves=10,
    )
)
def test_whatever_is_not_stored_raises_payload_error_only(value):
    """I13: a value is stored as strict JSON or raises PayloadError with a path, and no other exception."""
    try:
        text = encode(value, task="t")
    except PayloadError as error:
        assert error.path.startswith("$")
    else:
        json.loads(text, parse_constant=pytest.fail)
        text.encode()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("a\0", "NUL character (U+0000)"),
        ("\udc00", "lone surrogate (U+DC00)"),
        (math.nan, "nan is not a number in JSON"),
        (-math.inf, "-inf is not a number in JSON"),
        (10**5000, "integer of more than 4300 digits"),
        (b"x", "bytes cannot be stored as JSON; pass base64"),
        ({1, 2}, "set cannot be stored as JSON; pass a sorted list"),
        (object(), "object cannot be stored as JSON"),
        (datetime(2026, 1, 1), "naive datetime"),
        (time(1, tzinfo=UTC), "time with a zone"),
        (Decimal("NaN"), "NaN is not a number"),
        ({1: "a"}, "key 1 is int, not a string"),
        ({None: "a"}, "key None is NoneType, not a string"),
        ({True: "a"}, "key True is bool, not a string"),
        ({"a\0": 1}, "key with NUL character"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() and value.isprintable() else "bad",
)
def test_refusal_names_the_place_and_the_reason(bad, reason):
    """F34, F35: a value that jsonb cannot hold is refused in Python, with its path."""
    error = refused({"items": [1, "ok", {"name": bad}]})
    assert error.path.startswith("$.items[2].name")
    assert reason in error.reason
    assert str(error).startswith("args of task 'mail.send' cannot be stored: $.items[2].name")


def test_flat_args_are_checked_too():
    """F34: the fast path for flat args refuses NUL, surrogates, NaN and keys that are not text."""
    assert refused({"a": "x\0"}).path == "$.a"
    assert refused({"a": "\ud800"}).path == "$.a"
    assert refused({"a": math.nan}).path == "$.a"
    assert refused({1: "a"}).path == "$"


def test_escaped_backslash_is_no_nul():
    """F34: the six characters backslash u0000 are harmless text and are stored."""
    assert stored({"a": "\\u0000"}) == {"a": "\\u0000"}


def test_strange_keys_are_quoted_in_the_path():
    """A key that is not an identifier is in brackets, escaped so that the message itself is harmless."""
    assert refused({"a b\0": {"c": math.nan}}).path == '$["a b\\u0000"]'


def test_depth_is_limited():
    """F35: 64 levels are stored, one more is refused, and 100,000 levels or a cycle raise no RecursionError."""

    def nested(levels: int) -> list[Any]:
        value: list[Any] = []
        for _ in range(levels - 1):
            value = [value]
        return value

    endless: dict[str, Any] = {}
    endless["me"] = endless
    assert stored(nested(64)) == nested(64)
    for value in (nested(65), nested(100_000), endless):
        assert "nested deeper than 64 levels" in refused(value).reason
    assert "nested too deep" in refused(nested(100_000), max_depth=10**6).reason


def test_shared_lists_end_soon():
    """F35: nested lists with shared members, two to the power of 60 in all, are refused without visiting them all."""
    value: object = "x"
    for _ in range(60):
        value = [value, value]
    assert "members in total" in refused(value).reason


def test_size_is_limited_in_bytes():
    """F35: the limit counts bytes of UTF-8, and the message has the size, the limit and the largest member."""
    assert stored({"a": "x" * 92}, max_bytes=100)
    assert stored({"a": "é" * 46}, max_bytes=100)
    error = refused({"b": 1, "body": "é" * 100}, max_bytes=100)
    assert error.path == "$"
    assert "217 bytes of JSON, the limit is 100" in error.reason
    assert "largest member is 'body'" in error.reason


def test_integers_beyond_jsonb_are_refused():
    """F35: if a process has lifted Python's limit, the limit of jsonb's numeric applies: 131,072 digits."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert encode([10**131_071], task="t")
        assert "integer of 131073 digits" in refused([10**131_072]).reason
    finally:
        sys.set_int_max_str_digits(before)


Hostile = hostile(object, __getattribute__=SystemError, __repr__=SystemError)


@dataclasses.dataclass
class Broken:
    a: int = 1

    def __getattribute__(self, name):
        raise LookupError("gone\0\ud800")


class Model:
    def model_dump(self, **options):
        raise RuntimeError("half built")

    def model_validate(self):
        raise NotImplementedError


@pytest.mark.parametrize("make", [Hostile, Broken, Model, lambda: {Hostile(): 1}, lambda: [Hostile]])
def test_objects_that_fight_back_raise_payload_error(make):
    """F35: a value whose own code raises when it is read raises PayloadError."""
    str(refused({"a": make()})).encode()


def test_classes_of_the_user_are_stored_as_json():
    """Dataclasses are stored by field, enums by value, tuples as arrays, subclasses of JSON's types as those types."""

    class Tag(str):
        def __str__(self):
            return "something else"

    class Kind(enum.StrEnum):
        A = "a"

    value = {"d": Address("x", date(2026, 1, 2)), "e": Color.DEEP, "t": (1, Tag("y")), Kind.A: Level.LOW}
    assert stored(value) == {
        "d": {"street": "x", "since": "2026-01-02", "tags": []},
        "e": ["a", 1],
        "t": [1, "y"],
        "a": 1,
    }


def test_days_are_stored_as_hours():
    """F39: a timedelta of one day is stored as 24 hours, because P1D would be 25 hours on one day of the year."""
    assert stored([timedelta(days=1), timedelta(seconds=-90.5)]) == ["PT24H", "PT-1M-30.5S"]


def test_the_message_can_speak_of_a_result():
    """The same rules apply to a handler's result, and the message says so."""
    assert str(refused({1}, what="result")).startswith("result of task 'mail.send' cannot be stored: $: set cannot")


@settings(max_examples=20)
@given(st.dictionaries(text, text | st.integers()))
def test_text_is_compact_and_not_escaped(value):
    """The JSON text is compact: no spaces between members, and unicode unescaped."""
    assert encode(value, task="t") == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
