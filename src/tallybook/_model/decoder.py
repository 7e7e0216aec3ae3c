"""Conversion of JSON values by a task's annotations: one converter per annotation, built once.

Strict for annotations that need a conversion; others cost nothing:

- `str`, `int`, `bool`, `None`, `Any` and no annotation: the value unchanged and unchecked, as Python itself treats
  them. There is no converter, so plain tasks have no overhead. Nothing is coerced: "5" does not become 5. For checked
  fields, annotate a msgspec struct or a pydantic model.
- `float`: an int becomes a float, because jsonb drops the point of 1e16; other values are unchanged.
- datetime (aware), date, time, timedelta, UUID, Decimal: from text as `encode` writes it, or similar. Decimal also from
  a JSON integer, but not from a float, which may have lost digits.
- Enum by value, Literal by equality and type, dataclasses by field (unknown and missing fields are errors), TypedDict
  by key, list, tuple, NamedTuple, dict with text keys, `Sequence`, `Mapping` and similar.
- a union: unchanged if all its members are plain. Otherwise the first member that fits: None, then converted members in
  their order, then plain ones. So `UUID | str` gives a UUID wherever the text is one. The order as written decides
  nothing between these groups, since typing's cache may swap it.
- any other class: only an instance of it is accepted, and JSON has none.
"""

import dataclasses
import json
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any

from tallybook._model import convert as leaf
from tallybook._model.convert import json_kind
from tallybook._model.payload import Convert, Unfit, kind_name
from tallybook.errors import PayloadError, SignatureError

_PLAIN = (str, int, bool, None, type(None))
_ANYTHING = (Any, object, Ellipsis)
_ARRAYS = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)
_OBJECTS = (dict, abc.Mapping, abc.MutableMapping)
_NOT_JSON = (set, frozenset, abc.Set, abc.MutableSet, bytes, bytearray, memoryview)
_WRAPPERS = (typing.Annotated, typing.Required, typing.NotRequired, typing.Final)


def decode(annotation: object, value: object, *, task: str, what: str = "args") -> Any:
    """Convert the JSON value by `annotation`, with a new converter. Raises PayloadError, with the path."""
    convert = compile_decoder(annotation, task=task)
    if convert is None:
        return value
    try:
        return convert(value)
    except Unfit as unfit:
        raise PayloadError(unfit.path, unfit.reason, task=task, what=what, verb="read") from None


def compile_decoder(annotation: object, *, task: str = "?") -> Convert | None:
    """Return the converter for an annotation, or None if every JSON value is used unchanged.

    The converter raises Unfit, which has `path` and `reason`. Raises SignatureError for an annotation that is still
    text (resolve it with typing.get_type_hints first), or that no JSON can fit, such as dict[int, str].
    """
    try:
        return _compile(annotation)
    except TypeError as error:
        raise SignatureError(task, str(error)) from None


def _compile(annotation: Any) -> Convert | None:  # noqa: PLR0911, PLR0912 - one return per form of annotation
    if annotation in _PLAIN or annotation in _ANYTHING or isinstance(annotation, typing.TypeVar):
        return None
    if annotation is float:
        return leaf.to_float
    if isinstance(annotation, str | typing.ForwardRef):
        raise TypeError(f"the annotation {annotation!r} is not resolved")
    if isinstance(annotation, typing.NewType):
        return _compile(annotation.__supertype__)
    if type(annotation).__name__ == "TypeAliasType":
        return _alias(annotation)
    origin, params = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _WRAPPERS:
        return _compile(params[0])
    if origin is typing.Union or origin is types.UnionType:
        return _union(params)
    if origin is typing.Literal:
        return leaf.literal(params)
    cls = origin or annotation
    if cls in _NOT_JSON:
        raise TypeError(f"{cls.__name__}: no JSON value becomes one; use list or str")
    if cls in _ARRAYS:
        return _array(_compile(params[0]) if params else None)
    if cls in _OBJECTS:
        return _object(*(params or (str, Any)))
    if cls is tuple and (not params or params[-1] is Ellipsis):
        items = _array(_compile(params[0]) if params else None)
        return lambda value: tuple(items(value))
    if cls is tuple:
        return _tuple(tuple, params)
    return _class(annotation, cls) if isinstance(cls, type) else None  # None: a form newer than this code


def _class(annotation: Any, cls: Any) -> Convert:  # noqa: PLR0911 - one return per kind of class
    if cls in leaf.TEXTS:
        return leaf.TEXTS[cls]
    if issubclass(cls, Enum):
        return leaf.enumeration(cls)
    if hasattr(cls, "__struct_fields__"):
        msgspec = sys.modules["msgspec"]  # imported by the struct's module
        return leaf.guard(cls, lambda value: msgspec.convert(value, annotation, str_keys=True))
    if callable(getattr(cls, "model_validate_json", None)):
        # It reads JSON text, because strict models take no date from a str.
        return leaf.guard(cls, lambda value: annotation.model_validate_json(json.dumps(value)))
    if typing.is_typeddict(cls):
        return _typed_dict(cls)
    if hasattr(cls, "__dataclass_fields__"):
        return _dataclass(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        hints = typing.get_type_hints(cls)
        return _tuple(lambda items: cls(*items), tuple(hints.get(name, Any) for name in cls._fields))
    return leaf.instance(cls)


def _array(item: Convert | None) -> Convert:
    def convert(value: Any) -> list[Any]:
        if type(value) is not list:
            raise Unfit(f"expected an array, not {json_kind(value)}")
        return value if item is None else _converted(repeat(item), value)

    return convert


def _converted(items: Iterable[Convert | None], values: list[Any]) -> list[Any]:
    result: list[Any] = []
    try:
        for item, value in zip(items, values, strict=False):
            result.append(item(value) if item else value)
    except Unfit as unfit:
        unfit.at(len(result))
        raise
    return result


def _tuple(make: Callable[[list[Any]], Any], params: tuple[Any, ...]) -> Convert:
    items = [_compile(param) for param in params]

    def convert(value: Any) -> Any:
        if type(value) is not list or len(value) != len(items):
            found = f"one of {len(value)}" if type(value) is list else json_kind(value)
            raise Unfit(f"expected an array of {len(items)}, not {found}")
        return make(_converted(items, value))

    return convert


def _object(key: Any, member: Any) -> Convert:
    if key in (int, float, bool):
        raise TypeError(f"dict[{key.__name__}, ...]: the keys of a JSON object are text")
    name, item = _compile(key), _compile(member)

    def convert(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise Unfit(f"expected an object, not {json_kind(value)}")
        if name is None and item is None:
            return value
        result: dict[Any, Any] = {}
        for each, found in value.items():
            try:
                result[name(each) if name else each] = item(found) if item else found
            except Unfit as unfit:
                unfit.at(each)
                raise
        return result

    return convert


def _union(params: tuple[Any, ...]) -> Convert | None:
    members = [_bare(param) for param in params]
    compiled = [(member, _compile(member)) for member in members if member is not float]
    tried = [convert for _, convert in compiled if convert is not None]
    to_float = float in members and int not in members
    if not tried:
        return leaf.to_float if to_float else None
    kinds = tuple(member for member in members if member in (str, int, bool, float))
    anything = any(convert is None and member not in _PLAIN for member, convert in compiled)
    nullable = None in members or type(None) in members

    def convert(value: Any) -> Any:
        if value is None and nullable:
            return None
        last = None
        for each in tried:
            try:
                return each(value)
            except Unfit as unfit:
                last = unfit
        if anything or type(value) in kinds:
            return value
        if to_float and type(value) is int:
            return leaf.to_float(value)
        if last is not None and len(tried) == 1 and not kinds:
            raise last
        raise Unfit(f"{json_kind(value)} that fits none of {' | '.join(map(_name, params))}")

    return convert


def _bare(annotation: Any) -> Any:
    if isinstance(annotation, typing.NewType):
        return _bare(annotation.__supertype__)
    return _bare(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is typing.Annotated else annotation


def _name(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "None"
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")


class _Fields:
    """The members of a dataclass or a TypedDict; `closed`: it can have no others.

    Their annotations are read at the first use, so that a class can refer to itself.
    """

    def __init__(self, cls: Any, names: list[str], required: frozenset[str], *, closed: bool) -> None:
        self._cls, self._names, self._required, self._closed = cls, names, required, closed

    @cached_property
    def _converters(self) -> dict[str, Convert | None]:
        try:
            hints = typing.get_type_hints(self._cls)
            return {name: _compile(hints.get(name, Any)) for name in self._names}
        except Exception as error:
            raise Unfit(f"the annotations of {kind_name(self._cls)} cannot be used: {error}") from None

    def __call__(self, value: Any) -> dict[str, Any]:
        converters = self._converters
        if type(value) is not dict:
            raise Unfit(f"expected an object, not {json_kind(value)}")
        if missing := self._required - value.keys():
            raise Unfit(f"{', '.join(sorted(missing))} is missing")
        if self._closed and (unknown := value.keys() - converters.keys()):
            raise Unfit(f"there is no field {', '.join(sorted(unknown))}")
        result = dict(value)
        for name, convert in converters.items():
            if convert is not None and name in value:
                try:
                    result[name] = convert(value[name])
                except Unfit as unfit:
                    unfit.at(name)
                    raise
        return result


@lru_cache(maxsize=1024)
def _dataclass(cls: Any) -> Convert:
    own, none = [field for field in dataclasses.fields(cls) if field.init], dataclasses.MISSING
    required = frozenset(field.name for field in own if field.default is none and field.default_factory is none)
    read = _Fields(cls, [field.name for field in own], required, closed=True)
    make = leaf.guard(cls, lambda members: cls(**members))
    return lambda value: make(read(value))


@lru_cache(maxsize=1024)
def _typed_dict(cls: Any) -> Convert:
    return _Fields(cls, list(cls.__annotations__), cls.__required_keys__, closed=False)


@lru_cache(maxsize=1024)
def _alias(alias: Any) -> Convert:
    @lru_cache(maxsize=1)
    def target() -> Convert | None:
        try:
            return _compile(alias.__value__)
        except (TypeError, NameError) as error:
            raise Unfit(f"the type alias {alias} cannot be used: {error}") from None

    def convert(value: Any) -> Any:
        inner = target()
        return inner(value) if inner else value

    return convert
