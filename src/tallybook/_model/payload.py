"""The conversion of args and results to JSON; decoder.py has the way back.

The conversion is lossless: `decode(annotation, json.loads(encode(value, ...)))` equals `value` for everything `encode`
accepts. Everything else raises PayloadError before anything is sent. Accepted are JSON's own types and aware datetime,
date, time without a zone, timedelta, UUID, Decimal, Enum, dataclasses (the fields of their constructor), msgspec
structs, pydantic models, and tuples, which become lists.

Refused, with the path: NUL and lone surrogates (jsonb cannot store them), NaN and Infinity, keys that are not text
(json.dumps would silently convert them), naive datetimes, more than `max_depth` levels, more than `max_bytes`.

jsonb stores numbers by value: a float from 1e16 on, such as 1e+16, loses its point, so it is read as an int unless an
annotation requires a float.

One walk converts, checks and names the path of a value that does not fit. It costs little if there is nothing to do: a
dict or a list that holds only scalars is passed through unchanged, after two checks that run in C. It never recurses
deeper than the limit, so a value that contains itself is refused as too deep. It never visits more members than could
fit the size limit, so shared lists nested in shared lists end soon, too.
"""

import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from types import NoneType
from typing import Any, NoReturn
from uuid import UUID

from tallybook._model.durations import iso_duration
from tallybook._model.failure import safe_text
from tallybook.errors import PayloadError

SCALARS = frozenset({str, int, bool, NoneType, float})
TEXT = frozenset({str})
Convert = Callable[[Any], Any]  # returns a JSON value as an annotation requires; raises only Unfit, which has the path
_MAX_DIGITS = 131_072  # before the decimal point: the limit of PostgreSQL's numeric, and so of jsonb
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode


def encode(value: object, *, task: str, max_bytes: int = 1_000_000, max_depth: int = 64, what: str = "args") -> str:
    """Return `value` as strict JSON text for jsonb, at most `max_bytes` of UTF-8.

    Raises only PayloadError, for values that cannot be stored; its message contains `task` and `what` ("args",
    "result", ...). Depth counts containers: `{"a": [1]}` has depth 2.
    """
    problem: Exception | None = None
    try:
        if type(value) is dict and SCALARS.issuperset(map(type, value.values())) and TEXT.issuperset(map(type, value)):
            text = _dumps(value)  # the common case, a flat dict: only the C encoder runs
        else:
            text = _dumps(Walk(max_depth=max_depth, max_members=max_bytes // 2).plain(value))
        size = len(text) if text.isascii() else len(text.encode())  # raises for a lone surrogate
        # A text of that length can hold an integer that jsonb cannot store. By default Python writes none of more than
        # 4,300 digits; a process may have raised that limit.
        storable = size < _MAX_DIGITS or 0 < sys.get_int_max_str_digits() <= _MAX_DIGITS
        if storable and size <= max_bytes and "\\u0000" not in text:
            return text
        if size > max_bytes:
            limit = f"{size} bytes of JSON, the limit is {max_bytes}{_largest(value)}"
            problem = Unfit(f"{limit}; store it elsewhere and pass its key")
    except Exception as error:
        problem = error
    if not isinstance(problem, Unfit):  # the slow second pass finds the path, which the encoder does not know
        try:
            Walk(max_depth=max_depth, max_members=max_bytes // 2, careful=True).plain(value)
        except Exception as error:
            problem = error
    if problem is None:  # what looked like a NUL is a backslash followed by u0000
        return text
    raise _refusal(problem, task, what)


def _refusal(error: Exception, task: str, what: str) -> PayloadError:
    if isinstance(error, Unfit):
        return PayloadError(error.path, error.reason, task=task, what=what)
    reason = f"reading it raised {type(error).__name__}: {safe_text(error, 300)}"
    if isinstance(error, RecursionError):
        reason = "nested too deep for what is left of Python's stack"
    return PayloadError("$", reason, task=task, what=what)


def _largest(value: object) -> str:
    if type(value) is not dict:
        return ""
    try:
        sizes = {name: len(_dumps(member)) for name, member in value.items()}
    except Exception:  # only the walk can convert a member; the hint is not worth another walk
        return ""
    return f" (the largest member is {max(sizes, key=sizes.__getitem__)[:80]!r})"


def parse(text: str) -> Any:
    """Parse JSON that people or programs have written. Raises ValueError also for NaN, Infinity and duplicate keys."""
    return json.loads(text, parse_constant=_no_number, object_pairs_hook=_no_twins)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        twin = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{twin!r} is a duplicate key")
    return found


class Unfit(Exception):
    """A value does not fit: `reason` and `path` describe the error; each level adds its own step on the way up."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._steps: list[str] = []

    def at(self, step: str | int) -> None:
        """Prepend a step to the path: the name of a member, or the index of an item."""
        if isinstance(step, int):
            self._steps.append(f"[{step}]")
        elif step.isascii() and step.isidentifier():
            self._steps.append(f".{step[:80]}")
        else:
            self._steps.append(f"[{json.dumps(step[:80])}]")

    @property
    def path(self) -> str:
        """The path, like `$.items[3].name`; a very long one is shortened in the middle."""
        path = "$" + "".join(reversed(self._steps))
        return path if len(path) <= 400 else f"{path[:200]}...{path[-197:]}"


class Walk:
    """One walk over one value. `careful` also checks every text and number for what JSON text cannot hold."""

    __slots__ = ("_careful", "_left", "_max_depth", "_max_members")

    def __init__(self, *, max_depth: int, max_members: int, careful: bool = False) -> None:
        self._careful = careful
        self._max_depth = max_depth
        self._max_members = self._left = max_members

    def plain(self, value: object, depth: int = 1) -> object:
        """Return `value` in JSON's own types, unchanged if it has them already. Raises Unfit if it cannot be stored."""
        kind = type(value)
        if kind in SCALARS:
            if self._careful:
                _check_scalar(value)
            return value
        if kind is dict:
            return self._object(value, depth)  # type: ignore[arg-type]
        if kind is list or kind is tuple:
            return self._array(value, depth)  # type: ignore[arg-type]
        write = _WRITERS.get(kind)
        if write is not None:
            return write(value)
        return self._other(value, kind, depth)

    def _enter(self, members: int, depth: int) -> None:
        if depth > self._max_depth:
            raise Unfit(f"nested deeper than {self._max_depth} levels, or it contains itself")
        self._left -= members
        if self._left < 0:
            raise Unfit(f"more than {self._max_members} members in total")

    def _object(self, value: dict[object, object], depth: int) -> object:
        self._enter(dict.__len__(value), depth)
        if not self._careful and TEXT.issuperset(map(type, value)) and SCALARS.issuperset(map(type, value.values())):
            return value
        result: dict[str, object] = {}
        for key, member in dict.items(value):
            name = key if type(key) is str else _key(key)
            try:
                if self._careful:
                    _check_text(name, "key with ")
                result[name] = self.plain(member, depth + 1)
            except Unfit as unfit:
                unfit.at(name)
                raise
        return result

    def _array(self, value: list[object] | tuple[object, ...], depth: int) -> object:
        self._enter(len(value), depth)
        if not self._careful and SCALARS.issuperset(map(type, value)):
            return value
        result: list[object] = []
        try:
            for member in value:
                result.append(self.plain(member, depth + 1))
        except Unfit as unfit:
            unfit.at(len(result))
            raise
        return result

    def _other(self, value: Any, kind: Any, depth: int) -> object:
        # Subclasses and the user's own classes. `issubclass` of the type, because `isinstance` runs code of the value.
        if issubclass(kind, Enum):
            return self.plain(value._value_, depth)
        for base, write in _SUBCLASS_WRITERS:
            if issubclass(kind, base):
                return self.plain(write(value), depth)
        try:
            shown = _class_writer(kind)
            if shown is not None:
                return self.plain(shown(value), depth)
        except (Unfit, RecursionError):
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {safe_text(error, 300)}"
            raise Unfit(f"reading the {kind_name(kind)} raised {said}") from None
        raise Unfit(f"{kind_name(kind)} cannot be stored as JSON{_ADVICE.get(kind, '')}")


def kind_name(kind: type) -> str:
    """Return the name of a class for messages, with its module unless it is built-in."""
    name = safe_text(kind.__qualname__, 100)
    return name if kind.__module__ == "builtins" else f"{safe_text(kind.__module__, 100)}.{name}"


_ADVICE: dict[type, str] = {
    **dict.fromkeys((bytes, bytearray), "; pass base64 text, or store it elsewhere and pass its key"),
    **dict.fromkeys((set, frozenset), "; pass a sorted list"),
}


def _key(key: object) -> str:
    if issubclass(type(key), Enum):
        key = key._value_  # type: ignore[attr-defined]
    if issubclass(type(key), str):
        return str.__str__(key)
    # json.dumps would convert 1 to "1" and None to "null", and the handler would not find its key.
    is_short = type(key) in SCALARS and not (type(key) is int and key.bit_length() > 200)
    raise Unfit(f"key {repr(key)[:60] if is_short else '...'} is {kind_name(type(key))}, not a string")


def _check_scalar(value: object) -> None:
    if type(value) is str:
        _check_text(value)
    elif type(value) is float and not math.isfinite(value):
        raise Unfit(f"{value!r} is not a number in JSON")
    elif type(value) is int and value.bit_length() > 14_000:
        try:
            digits = len(int.__repr__(value))
        except ValueError:  # Python neither writes nor reads more, see sys.set_int_max_str_digits
            raise Unfit(f"integer of more than {sys.get_int_max_str_digits()} digits") from None
        if digits > _MAX_DIGITS:
            raise Unfit(f"integer of {digits} digits; jsonb holds {_MAX_DIGITS}")


def _check_text(text: str, prefix: str = "") -> None:
    if "\0" in text:
        raise Unfit(f"{prefix}NUL character (U+0000) at {text.index(chr(0))}; PostgreSQL cannot store it in text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise Unfit(f"{prefix}lone surrogate (U+{code:04X}) at {error.start}; it is half a character") from None


def _datetime(value: datetime) -> str:
    try:
        if value.utcoffset() is not None:
            return value.isoformat()
    except Exception as error:  # `utcoffset` runs code of the user's tzinfo
        raise Unfit(f"the datetime's zone raised {type(error).__name__}: {safe_text(error, 300)}") from None
    raise Unfit("naive datetime; give it a zone, for example datetime.now(UTC)")


def _time(value: time) -> str:
    if value.tzinfo is not None:
        raise Unfit("time with a zone; without a date it names no instant, pass an aware datetime")
    return value.isoformat()


def _decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise Unfit(f"{value} is not a number that can be stored")
    return str(value)


_WRITERS: dict[type, Callable[..., object]] = {
    datetime: _datetime, date: date.isoformat, time: _time, timedelta: iso_duration, UUID: str, Decimal: _decimal,
}  # fmt: skip

_SUBCLASS_WRITERS: tuple[tuple[type, Callable[..., object]], ...] = (
    # The unbound methods return plain copies without running code of the subclass.
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    (dict, dict.copy),
    (list, list.copy),
    (tuple, lambda value: list(tuple.__iter__(value))),
)


@lru_cache(maxsize=1024)
def _class_writer(kind: type) -> Callable[[object], object] | None:
    """Return a function that converts an instance of `kind` to something plainer, or None for an unknown class."""
    for base in kind.__mro__:
        if base in _WRITERS:
            return _WRITERS[base]
    if hasattr(kind, "__struct_fields__") and "msgspec" in sys.modules:
        to_builtins: Callable[..., object] = sys.modules["msgspec"].to_builtins
        return lambda value: to_builtins(value, str_keys=True)
    if callable(getattr(kind, "model_dump", None)) and callable(getattr(kind, "model_validate", None)):
        # By alias, and without computed fields: the form that the model reads.
        return lambda value: value.model_dump(mode="json", by_alias=True, round_trip=True)  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        return lambda value: {name: getattr(value, name) for name in names}
    return None
