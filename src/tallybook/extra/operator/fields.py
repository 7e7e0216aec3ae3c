"""The fields of a request: one value reads and describes each, so the OpenAPI document matches what is accepted."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl

from tallybook._model.durations import parse_duration
from tallybook._model.options import check_name, checked_links, text_problem
from tallybook.errors import ConfigError
from tallybook.extra.operator.problems import Problem


@dataclass(frozen=True, slots=True)
class Field:
    """One named value. Null is not valid for any field."""

    name: str
    about: str
    _: KW_ONLY
    required: bool = False
    example: Any = None
    admin: bool = False  # whether its use needs the scope admin
    of_node: bool = False  # whether its value belongs to one node: over several nodes it needs `node`
    schema: Mapping[str, Any]  # its JSON Schema
    read: Callable[[Any], Any]
    """Converts a value of a JSON document. Raises ValueError with the reason, or ConfigError, if it is not valid."""


def text(name: str, about: str, *, most: int = 200, **field: Any) -> Field:
    """A text of 1 to `most` bytes."""

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("must be a text")
        if problem := text_problem(value):
            raise ValueError(problem)
        if not 1 <= len(value.encode()) <= most:
            raise ValueError(f"must have 1 to {most} bytes")
        return value

    return Field(name, about, schema=_text_schema(most), read=read, **field)


def _text_schema(most: int, format: str = "text") -> dict[str, Any]:  # noqa: A002 - JSON Schema's name
    return {"type": "string", "minLength": 1, "maxLength": most, "format": f"tallybook-{format}"}


def name(name: str, about: str, *, most: int = 200, **field: Any) -> Field:
    """A name of a queue, task or schedule."""

    def read(value: Any) -> Any:
        check_name(name, value, most)
        return value

    return Field(name, about, schema=_text_schema(most, "name"), read=read, **field)


def choice(name: str, about: str, *, words: Sequence[str], **field: Any) -> Field:
    def read(value: Any) -> Any:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return Field(name, about, schema={"type": "string", "enum": list(words)}, read=read, **field)


def whole(
    name: str, about: str, *, least: int = 0, most: int = 2**63 - 1, default: int | None = None, **field: Any
) -> Field:
    def read(value: Any) -> int:
        value = _integer(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return value

    schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": most}
    schema |= {"format": "int64"} if most > 2**31 else {}
    schema |= {} if default is None else {"default": default}
    return Field(name, about, schema=schema, read=read, **field)


def flag(name: str, about: str, **field: Any) -> Field:
    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value

    return Field(name, about, schema={"type": "boolean", "default": False}, read=read, **field)


INSTANT = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def instant(name: str, about: str, **field: Any) -> Field:
    """An instant with its zone, in the format of RFC 3339."""

    def read(value: Any) -> datetime:
        if not isinstance(value, str) or not INSTANT.fullmatch(value):
            raise ValueError("must be an instant like 2026-01-31T09:00:00Z")
        return datetime.fromisoformat(value.upper())

    return Field(name, about, schema={"type": "string", "format": "date-time"}, read=read, **field)


def duration(name: str, about: str, **field: Any) -> Field:
    """A duration in PostgreSQL's notation."""

    def read(value: Any) -> Any:
        if not isinstance(value, str) or len(value) > 100:
            raise ValueError('must be a duration like "5 min"')
        return parse_duration(value, option=name)

    return Field(name, about, schema=_text_schema(100, "duration"), read=read, **field)


def mapping(name: str, about: str, **field: Any) -> Field:
    return Field(name, about, schema={"type": "object", "additionalProperties": True}, read=_object, **field)


def links(name: str, about: str, **field: Any) -> Field:
    """The rows that a job belongs to: up to 10 kinds with one key each."""

    def read(value: Any) -> dict[str, str]:
        found = {kind: _integer(key) for kind, key in _object(value).items()}
        if any(isinstance(key, int) and not -(2**63) <= key < 2**63 for key in found.values()):
            raise ValueError("has a number outside 64 bits")
        return checked_links(found)

    key = {"anyOf": [_text_schema(200), {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}]}
    schema = {"type": "object", "propertyNames": {"pattern": "^[a-z0-9_]{1,50}$"}, "additionalProperties": key}
    return Field(name, about, schema=schema | {"minProperties": 1, "maxProperties": 10}, read=read, **field)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _integer(value: object) -> object:
    """Return an integral float as int: JSON Schema counts 5.0 as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _of_text(text: str, kind: str) -> object:
    """Return the number or flag that a text of a query or a path is, or else the text, which its field checks."""
    if kind == "integer" and re.fullmatch("-?[0-9]{1,20}", text, re.ASCII):
        return int(text)
    return text == "true" if kind == "boolean" and text in ("true", "false") else text


def read_query(fields: Sequence[Field], query: bytes) -> dict[str, Any]:
    """Return the values of a query. A duplicate name is refused, because the order of the pieces is not signed."""
    try:
        text, strict = query.decode("ascii"), bool(query)
        pieces = parse_qsl(text, keep_blank_values=True, strict_parsing=strict, errors="strict", max_num_fields=50)
    except ValueError:
        raise Problem("invalid", "the query does not have the form name=value&name=value in UTF-8") from None
    given = dict(pieces)
    if len(given) < len(pieces):
        raise Problem("invalid", "the query has a duplicate name")
    return read(fields, given, text=True)


def read(fields: Sequence[Field], given: Mapping[str, Any], *, text: bool = False) -> dict[str, Any]:
    """Return the values of a body, or with `text` of a path or query. Raises a Problem (422) that names the field."""
    by_name = {field.name: field for field in fields}
    for name in given:
        if name not in by_name:
            known = ", ".join(by_name) or "none"
            raise Problem("invalid", f"unknown field {name[:100]!r}", hint=f"The fields are: {known}")
    found: dict[str, Any] = {}
    for field in fields:
        if field.name not in given:
            if field.required:
                raise Problem("invalid", f"{field.name} is missing")
            continue
        try:
            value = given[field.name]
            found[field.name] = field.read(_of_text(value, field.schema["type"]) if text else value)
        except ConfigError as error:
            raise Problem("invalid", str(error).removesuffix(".")) from None
        except (ValueError, OverflowError) as error:
            raise Problem("invalid", f"{field.name} {error}") from None
    return found
