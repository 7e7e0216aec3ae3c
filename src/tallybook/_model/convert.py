"""Converters of single JSON values to Python values, for annotations without others inside. See decoder.py."""

import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any
from uuid import UUID

from tallybook._model.durations import parse_iso_duration
from tallybook._model.failure import safe_text
from tallybook._model.payload import SCALARS, Convert, Unfit, Walk, kind_name


def json_kind(value: object) -> str:
    """Return the kind of a JSON value, in words for messages: "text", "an integer", "null", ..."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "text", list: "an array", dict: "an object"}
    return names.get(type(value)) or kind_name(type(value))


def _short(value: object) -> str:
    # As JSON, the stored form; ASCII only, so that every output can show the message.
    text = json.dumps(value[:60] if isinstance(value, str) else value, default=json_kind)
    return text if len(text) <= 62 else text[:59] + "..."


def to_float(value: Any) -> Any:
    """Return a float for an integer, because jsonb drops the point of 1e16; other values unchanged."""
    if type(value) is not int:
        return value
    try:
        return float(value)
    except OverflowError:
        raise Unfit("an integer that is too large for a float") from None


def guard(cls: type, make: Convert) -> Convert:
    """Wrap `make` so that any exception of the user's class becomes Unfit."""

    def convert(value: Any) -> Any:
        try:
            return make(value)
        except Exception as error:
            reason = " ".join(safe_text(error, 400).split())
            raise Unfit(f"{kind_name(cls)} refused it: {type(error).__name__}: {reason}") from None

    return convert


def instance(cls: type) -> Convert:
    """Return a converter for an unknown class: it accepts only instances, as 5 is one of numbers.Number."""

    def convert(value: Any) -> Any:
        try:
            fits = isinstance(value, cls)
        except TypeError:  # a protocol that cannot be checked at run time
            return value
        if not fits:
            raise Unfit(f"{json_kind(value)} cannot become {kind_name(cls)}")
        return value

    return convert


def enumeration(cls: type[Enum]) -> Convert:
    """Return a converter for an Enum: by the JSON form of its values, then by the class, for flags and `_missing_`."""
    scalars: dict[tuple[type, Any], Enum] = {}
    others: list[tuple[object, Enum]] = []
    for shown, member in _shown(list(cls.__members__.values())):
        if type(shown) in SCALARS:
            scalars.setdefault((type(shown), shown), member)
        else:
            others.append((shown, member))
    by_class = guard(cls, cls)

    def convert(value: Any) -> Any:
        if type(value) in SCALARS and (member := scalars.get((type(value), value))) is not None:
            return member
        for shown, member in others:
            if shown == value:
                return member
        if type(value) is bool:  # True == 1 would find the member of 1
            raise Unfit(f"{_short(value)} is not a {kind_name(cls)}")
        return by_class(value)

    return convert


def literal(allowed: tuple[Any, ...]) -> Convert:
    """Return a converter for a Literal that compares value and type: 1 is not True."""
    pairs = _shown(list(allowed))

    def convert(value: Any) -> Any:
        for shown, member in pairs:
            if type(shown) is type(value) and shown == value:
                return member
        names = ", ".join(_short(shown) for shown, _ in pairs)
        raise Unfit(f"{_short(value)} is none of {names}")

    return convert


def _shown(values: list[Any]) -> list[tuple[object, Any]]:
    pairs = []
    for value in values:
        try:
            # `careful`, because that walk also converts tuples of scalars to lists, as JSON does.
            pairs.append((Walk(max_depth=64, max_members=10_000, careful=True).plain(value), value))
        except Unfit:
            continue  # a member that cannot be stored never occurs
    return pairs


def _text(read: Callable[[str], Any], what: str, fits: Callable[[Any], bool] | None = None, why: str = "") -> Convert:
    def convert(value: Any) -> object:
        if type(value) is not str:
            raise Unfit(f"expected {what} as text, not {json_kind(value)}")
        try:
            found = read(value)
        except (ValueError, InvalidOperation):
            raise Unfit(f"{_short(value)} is not {what}") from None
        if fits is not None and not fits(found):
            raise Unfit(f"{_short(value)} is not {what}{why}")
        return found

    return convert


def _decimal(value: Any) -> object:
    if type(value) is int:
        return Decimal(value)
    if type(value) is float:
        raise Unfit("expected a decimal as text, not a number, which may have lost digits")
    return _decimal_text(value)


_decimal_text = _text(Decimal, "a decimal", Decimal.is_finite)
_aware = _text(
    datetime.fromisoformat, "an aware datetime", lambda at: at.utcoffset() is not None, ": it has no offset from UTC"
)

TEXTS: dict[Any, Convert] = {
    datetime: _aware,
    date: _text(date.fromisoformat, "a date"),
    time: _text(time.fromisoformat, "a time without a zone", lambda at: at.tzinfo is None),
    timedelta: _text(parse_iso_duration, "a duration like PT1H30M"),
    UUID: _text(UUID, "a UUID"),
    Decimal: _decimal,
}
