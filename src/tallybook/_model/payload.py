"""The conversion of args and results to JSON; decoder.py has the way back.

The conversion is lossless: `decode(annotation, json.loads(encode(value, ...)))` equals `value` for everything `encode`
accepts. Everything else raises PayloadError before anything is sent. Accepted are JSON's own types and aware datetime,
date, time without a zone, timedelta, UUID, Decimal, Enum, dataclasses (the fields of their constructor), msgspec
structs, pydantic models, and tuples, which become lists.

Refused, with the path: NUL and lone surrogates (jsonb cannot store them), NaN and Infinity, keys that are not text
(json.dumps would silently convert them), naive datetimes, more than `max_depth` levels, more than `max_bytes`.

jsonb stores numbers by value: a float from 1e16 on, such as 1e+16, loses its point, so it is read as an int unless an
annotation requires a float.
"""

import json
import sys
from collections import Counter
from typing import Any, NoReturn

from tallybook._model.failure import safe_text
from tallybook._model.plain import SCALARS, TEXT, Unfit, Walk
from tallybook.errors import PayloadError

_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode
_LONGEST_NUMBER = 131_072  # a text of this length can hold an integer that jsonb cannot store


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
        # By default Python writes no integer of more than 4,300 digits; a process may have raised that limit.
        storable = size < _LONGEST_NUMBER or 0 < sys.get_int_max_str_digits() <= _LONGEST_NUMBER
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
