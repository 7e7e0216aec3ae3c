"""The fields of a request: each is read and described by one thing, so the document says what is accepted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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

    @property
    def schema(self) -> dict[str, Any]:
        raise NotImplementedError

    def read(self, value: Any) -> Any:
        """The value of a JSON document. ValueError with the reason, or ConfigError, for another one."""
        raise NotImplementedError

    def of_text(self, text: str) -> Any:
        """The value of a query or a path."""
        return self.read(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Field):
    most: int = 200
    least: int = 1

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": self.least, "maxLength": self.most, "format": "tallybook-text"}

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("is a text")
        if problem := text_problem(value):
            raise ValueError(problem)
        if not self.least <= len(value.encode()) <= self.most:
            raise ValueError(f"has {self.least} to {self.most} bytes")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Name(Text):
    """A name as queues, tasks and schedules have it."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1, "maxLength": self.most, "format": "tallybook-name"}

    def read(self, value: Any) -> str:
        check_name(self.name, value, self.most)
        found: str = value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Field):
    words: Sequence[str]

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.words)}

    def read(self, value: Any) -> str:
        if value not in self.words:
            raise ValueError(f"is one of {', '.join(self.words)}")
        found: str = value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Field):
    least: int = 0
    most: int = 2**63 - 1
    default: int | None = None

    @property
    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "integer", "minimum": self.least, "maximum": self.most}
        if self.most > 2**31:
            found["format"] = "int64"
        return found if self.default is None else {**found, "default": self.default}

    def read(self, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():  # 5.0 is an integer of JSON Schema
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            raise ValueError(f"is a whole number from {self.least} to {self.most}")
        return value

    def of_text(self, text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,20}", text, re.ASCII):
            raise ValueError(f"is a whole number from {self.least} to {self.most}")
        return self.read(int(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Field):
    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "boolean", "default": False}

    def read(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError("is true or false")
        return value

    def of_text(self, text: str) -> bool:
        return self.read({"true": True, "false": False}.get(text))


_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant(Field):
    """An instant with its zone, as RFC 3339 has it."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "format": "date-time"}

    def read(self, value: Any) -> datetime:
        if not isinstance(value, str) or not _INSTANT.fullmatch(value):
            raise ValueError("is an instant like 2026-01-31T09:00:00Z")
        return datetime.fromisoformat(value.upper())


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration(Field):
    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1, "maxLength": 100, "format": "tallybook-duration"}

    def read(self, value: Any) -> Any:
        if not isinstance(value, str) or len(value) > 100:
            raise ValueError('is a duration like "5 min"')
        return parse_duration(value, option=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Object(Field):
    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": True}

    def read(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("is a JSON object")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Links(Field):
    """Which rows a job belongs to: up to 10 kinds with a key each."""

    @property
    def schema(self) -> dict[str, Any]:
        return {
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

    def read(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise ValueError("is a JSON object")
        return checked_links({kind: _whole(key) for kind, key in value.items()})


def _whole(key: object) -> object:
    if isinstance(key, float) and key.is_integer():  # 5.0 is an integer of JSON Schema
        key = int(key)
    if isinstance(key, int) and not -(2**63) <= key < 2**63:
        raise ValueError("has a number that is too long")
    return key


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
        raise Problem(422, "invalid", "the query is not of the form name=value&name=value, encoded as UTF-8") from None
    given = dict(pieces)
    if len(given) < len(pieces):
        raise Problem(422, "invalid", "the query has a name twice")
    return read(fields, given, text=True)


def read(fields: Sequence[Field], given: Mapping[str, Any], *, text: bool = False) -> dict[str, Any]:
    """The values of a body, or, as texts, of a path. A Problem (422) that names the field."""
    by_name = {field.name: field for field in fields}
    for name in given:
        if name not in by_name:
            known = ", ".join(by_name) or "none at all"
            raise Problem(422, "invalid", f"there is no {name[:100]!r} here", hint=f"There is {known}")
    found: dict[str, Any] = {}
    for field in fields:
        if field.name not in given:
            if field.required:
                raise Problem(422, "invalid", f"{field.name} is missing")
            continue
        value = given[field.name]
        try:
            found[field.name] = field.of_text(value) if text else field.read(value)
        except ConfigError as error:
            raise Problem(422, "invalid", str(error).removesuffix(".")) from None
        except (ValueError, OverflowError) as error:
            raise Problem(422, "invalid", f"{field.name} {error}") from None
    return found
