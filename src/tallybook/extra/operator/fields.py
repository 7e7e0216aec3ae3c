"""The fields of a request: each is read and described by one thing, so the document says what is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl

from tallybook._model.durations import parse_duration
from tallybook._model.options import check_name, text_problem
from tallybook._model.why import checked_links
from tallybook.errors import ConfigError
from tallybook.extra.operator.problems import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One value by its name. A null is no value of any."""

    name: str
    about: str
    required: bool = False
    example: Any = None
    admin: bool = False
    """Whether its use needs the scope admin."""
    schema: Mapping[str, Any]
    """Its JSON Schema."""
    read: Callable[[Any], Any]
    """The value of a JSON document. ValueError with the reason, or ConfigError, for another one."""
    of_text: Callable[[str], Any] | None = None
    """The value of a query or a path, where `read` does not take the text as it is."""


def text(*, most: int = 200, least: int = 1, **field: Any) -> Field:
    """A text of at most so many bytes."""

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("is a text")
        if problem := text_problem(value):
            raise ValueError(problem)
        if not least <= len(value.encode()) <= most:
            raise ValueError(f"has {least} to {most} bytes")
        return value

    schema = {"type": "string", "minLength": least, "maxLength": most, "format": "tallybook-text"}
    return Field(schema=schema, read=read, **field)


def name(*, most: int = 200, **field: Any) -> Field:
    """A name as queues, tasks and schedules have it."""

    def read(value: Any) -> Any:
        check_name(field["name"], value, most)
        return value

    schema = {"type": "string", "minLength": 1, "maxLength": most, "format": "tallybook-name"}
    return Field(schema=schema, read=read, **field)


def choice(*, words: Sequence[str], **field: Any) -> Field:
    """One of a few words."""

    def read(value: Any) -> Any:
        if value not in words:
            raise ValueError(f"is one of {', '.join(words)}")
        return value

    return Field(schema={"type": "string", "enum": list(words)}, read=read, **field)


def whole(*, least: int = 0, most: int = 2**63 - 1, default: int | None = None, **field: Any) -> Field:
    """A whole number."""
    refusal = f"is a whole number from {least} to {most}"

    def read(value: Any) -> int:
        value = _integer(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(refusal)
        return value

    def of_text(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,20}", text, re.ASCII):
            raise ValueError(refusal)
        return read(int(text))

    schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": most}
    schema |= {"format": "int64"} if most > 2**31 else {}
    schema |= {} if default is None else {"default": default}
    return Field(schema=schema, read=read, of_text=of_text, **field)


def flag(**field: Any) -> Field:
    """true or false."""

    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError("is true or false")
        return value

    of_text = {"true": True, "false": False}.get
    return Field(
        schema={"type": "boolean", "default": False}, read=read, of_text=lambda text: read(of_text(text)), **field
    )


_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def instant(**field: Any) -> Field:
    """An instant with its zone, as RFC 3339 has it."""

    def read(value: Any) -> datetime:
        if not isinstance(value, str) or not _INSTANT.fullmatch(value):
            raise ValueError("is an instant like 2026-01-31T09:00:00Z")
        return datetime.fromisoformat(value.upper())

    return Field(schema={"type": "string", "format": "date-time"}, read=read, **field)


def duration(**field: Any) -> Field:
    """A duration in PostgreSQL's words."""

    def read(value: Any) -> Any:
        if not isinstance(value, str) or len(value) > 100:
            raise ValueError('is a duration like "5 min"')
        return parse_duration(value, option=field["name"])

    schema = {"type": "string", "minLength": 1, "maxLength": 100, "format": "tallybook-duration"}
    return Field(schema=schema, read=read, **field)


def mapping(**field: Any) -> Field:
    """A JSON object."""
    return Field(schema={"type": "object", "additionalProperties": True}, read=_object, **field)


def links(**field: Any) -> Field:
    """Which rows a job belongs to: up to 10 kinds with a key each."""

    def read(value: Any) -> dict[str, str]:
        found = {kind: _integer(key) for kind, key in _object(value).items()}
        if any(isinstance(key, int) and not -(2**63) <= key < 2**63 for key in found.values()):
            raise ValueError("has a number that is too long")
        return checked_links(found)

    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z0-9_]{1,50}$"},
        "additionalProperties": {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 200, "format": "tallybook-text"},
                {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            ]
        },
        "minProperties": 1,
        "maxProperties": 10,
    }
    return Field(schema=schema, read=read, **field)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("is a JSON object")
    return value


def _integer(value: object) -> object:
    """5.0 is an integer of JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_query(fields: Sequence[Field], query: bytes) -> dict[str, Any]:
    """The values of a query. A name that is there twice is refused: the order of the pieces is not signed."""
    try:
        pieces = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(query),
            errors="strict",
            max_num_fields=50,
        )
    except ValueError:
        raise Problem("invalid", "the query is not of the form name=value&name=value, encoded as UTF-8") from None
    given = dict(pieces)
    if len(given) < len(pieces):
        raise Problem("invalid", "the query has a name twice")
    return read(fields, given, text=True)


def read(fields: Sequence[Field], given: Mapping[str, Any], *, text: bool = False) -> dict[str, Any]:
    """The values of a body, or, as texts, of a path. A Problem (422) that names the field."""
    by_name = {field.name: field for field in fields}
    for name in given:
        if name not in by_name:
            known = ", ".join(by_name) or "none at all"
            raise Problem("invalid", f"there is no {name[:100]!r} here", hint=f"There is {known}")
    found: dict[str, Any] = {}
    for field in fields:
        if field.name not in given:
            if field.required:
                raise Problem("invalid", f"{field.name} is missing")
            continue
        value = given[field.name]
        try:
            found[field.name] = (field.of_text if text and field.of_text else field.read)(value)
        except ConfigError as error:
            raise Problem("invalid", str(error).removesuffix(".")) from None
        except (ValueError, OverflowError) as error:
            raise Problem("invalid", f"{field.name} {error}") from None
    return found
