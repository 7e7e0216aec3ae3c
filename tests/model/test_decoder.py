"""Converting stored JSON to the annotated types (decoder.py)."""

import contextlib
import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallybook._model.decoder import compile_decoder, decode
from tallybook._model.payload import encode
from tallybook.errors import PayloadError, SignatureError

UserId = NewType("UserId", int)
SOME = "12345678-1234-5678-1234-567812345678"


@dataclass
class Node:
    name: str
    due: date | None = None
    children: "list[Node]" = field(default_factory=list)


@dataclass
class Positive:
    number: int

    def __post_init__(self):
        if self.number < 0:
            raise ValueError(f"{self.number} is negative")


class Row(TypedDict):
    at: datetime
    note: NotRequired[str]


class Color(enum.Enum):
    RED = "red"
    DAY = date(2026, 1, 1)


class Access(enum.Flag):
    READ = 1
    WRITE = 2


def unread(annotation: Any, value: object) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        decode(annotation, value, task="mail.send")
    return caught.value


@pytest.mark.parametrize(
    "annotation",
    [str, int, bool, None, Any, object, str | None, int | str | None, UserId, Annotated[int, "x"], int | float],
)
def test_plain_annotations_cost_nothing(annotation):
    """Str, int, bool, None and Any have no converter: values are neither checked nor coerced."""
    assert compile_decoder(annotation) is None
    assert decode(annotation, "5", task="t") == "5"


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (datetime, "2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (datetime, "2026-01-02 03:04:05+00", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (timedelta, "P1DT1H", timedelta(hours=25)),
        (Decimal, "1.50", Decimal("1.50")),
        (Decimal, 7, Decimal(7)),
        (float, 10**23, 1e23),
        (float | None, None, None),
        (float | str, 1, 1.0),
        (Sequence[date], ["2026-01-02"], [date(2026, 1, 2)]),
        (Mapping[str, UUID], {"a": SOME}, {"a": UUID(SOME)}),
        (dict[Color, int], {"red": 1}, {Color.RED: 1}),
        (tuple[date, ...], ["2026-01-02"], (date(2026, 1, 2),)),
        (tuple[()], [], ()),
        (Literal["a", 1], 1, 1),
        (UUID | str, "plain", "plain"),
        (str | UUID, SOME, UUID(SOME)),
        (date | datetime, "2026-01-02T00:00:00Z", datetime(2026, 1, 2, tzinfo=UTC)),
        (date | datetime, "2026-01-02", date(2026, 1, 2)),
        (int | date, 5, 5),
        (date | float, 5, 5.0),
        (Color, "2026-01-01", Color.DAY),
        (Access, 3, Access.READ | Access.WRITE),
        (Row, {"at": "2026-01-02T00:00:00Z", "more": 1}, {"at": datetime(2026, 1, 2, tzinfo=UTC), "more": 1}),
        (Node, {"name": "a", "children": [{"name": "b"}]}, Node("a", None, [Node("b")])),
        (type("Later", (), {}) | int, 5, 5),
    ],
)
def test_values_become_what_the_annotation_says(annotation, value, expected):
    """Each annotation gives its own type, from JSON that `encode` writes and from JSON that SQL producers may write."""
    found = decode(annotation, value, task="t")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "path", "reason"),
    [
        (datetime, "2026-01-02T03:04:05", "$", "no offset from UTC"),
        (datetime, 5, "$", "as text, not an integer"),
        (date, "yesterday", "$", '"yesterday" is not a date'),
        (timedelta, "P1M", "$", "not a duration"),
        (Decimal, 1.5, "$", "may have lost digits"),
        (Decimal, "NaN", "$", "not a decimal"),
        (float, 10**400, "$", "too large for a float"),
        (list[date], "2026-01-02", "$", "expected an array, not text"),
        (list[date], ["2026-01-02", None], "$[1]", "not null"),
        (dict[str, list[UUID]], {"a": [SOME, "x"]}, "$.a[1]", "is not a UUID"),
        (dict, [], "$", "expected an object, not an array"),
        (tuple[int, int], [1], "$", "expected an array of 2, not one of 1"),
        (Literal["a", 1], True, "$", 'true is none of "a", 1'),
        (date | None, "x", "$", '"x" is not a date'),
        (int | date, "x", "$", "text that fits none of int | date"),
        (int | date, True, "$", "a boolean that fits none"),
        (Color, "blue", "$", "refused it"),
        (Access, True, "$", "is no"),
        (Row, {}, "$", "at is missing"),
        (Node, {"name": "a", "children": [{"name": "b", "due": "?"}]}, "$.children[0].due", "is not a date"),
        (Node, {"name": "a", "colour": 1}, "$", "there is no field colour"),
        (Node, {}, "$", "name is missing"),
        (Positive, {"number": -1}, "$", "ValueError: -1 is negative"),
        (Path, "/tmp", "$", "text cannot become pathlib"),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(annotation, value, path, reason):
    """F31: a stored value that does not fit today's code raises PayloadError with its path."""
    error = unread(annotation, value)
    assert error.path == path
    assert reason in error.reason
    assert str(error).startswith(f"args of task 'mail.send' cannot be read: {path}: ")


@given(
    st.sampled_from(
        [
            *(datetime, date, timedelta, UUID, Decimal, Color, Access, Node, Row, Positive, float, list[date], Path),
            *(tuple[int, date], dict[str, UUID], dict[Color, Any], Literal["a", 1], date | int, Positive | str),
            Node | list[Node] | None,
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("2026-01-02"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("name"), inner, max_size=3),
        max_leaves=8,
    ),
)
def test_any_json_for_any_annotation_fits_or_raises_payload_error(annotation, value):
    """F31: no stored value makes a converter raise anything but PayloadError."""
    with contextlib.suppress(PayloadError):
        decode(annotation, value, task="t")


@pytest.mark.parametrize("annotation", ["Node", list["Node"], dict[int, str], "list[int]", set[int], list[bytes]])
def test_annotations_that_cannot_be_served_are_refused(annotation):
    """Unresolved text annotations, and types that no JSON value becomes, raise SignatureError."""
    with pytest.raises(SignatureError):
        compile_decoder(annotation, task="t")


def test_type_aliases_are_followed():
    """A type alias is resolved to its target at its first use."""
    extensions = pytest.importorskip("typing_extensions")
    assert decode(extensions.TypeAliasType("Dates", list[date]), ["2026-01-02"], task="t") == [date(2026, 1, 2)]
    assert "cannot be used" in unread(extensions.TypeAliasType("Text", "list[date]"), []).reason


def test_msgspec_structs_round_trip():
    """Msgspec itself stores and checks a struct, including renamed fields and int keys."""
    msgspec = pytest.importorskip("msgspec")
    struct = msgspec.defstruct(
        "Order", [("at", datetime), ("by_id", dict[int, UUID]), ("n", int, 1)], rename="camel", module=__name__
    )
    order = struct(at=datetime(2026, 1, 1, tzinfo=UTC), by_id={1: UUID(SOME)})
    text = encode({"order": [order]}, task="t")
    assert '"byId":{"1":' in text
    back = decode(dict[str, list[struct]], json.loads(text), task="t")
    assert back == {"order": [order]}
    assert "refused it" in unread(struct, {"at": 1}).reason


def test_pydantic_models_round_trip():
    """A pydantic model is stored by alias and read as JSON, so that strict models work as well."""
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model(
        "Order",
        __config__=pydantic.ConfigDict(strict=True),
        at=(datetime, pydantic.Field(alias="when")),
        amount=(Decimal, Decimal("1.50")),
    )
    order = model(when=datetime(2026, 1, 1, tzinfo=UTC))
    value = json.loads(encode({"order": order}, task="t"))
    assert value == {"order": {"when": "2026-01-01T00:00:00Z", "amount": "1.50"}}
    assert decode(model | None, value["order"], task="t") == order
    assert "refused it" in unread(model, {"when": 1, "amount": []}).reason
