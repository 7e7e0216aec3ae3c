"""What an endpoint is: one value that the server goes by and that the OpenAPI document is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tallybook._app import App
from tallybook._db import aio, audit
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.operator.fields import Field
from tallybook.extra.operator.keys import Key
from tallybook.extra.operator.problems import Problem


@dataclass(frozen=True, slots=True)
class Ask:
    """A request whose signature and scope are good: who asks, and with which values."""

    app: App
    key: Key
    values: Mapping[str, Any]

    @property
    def admin(self) -> bool:
        """Whether args, results and errors may be shown."""
        return "admin" in self.key.scopes

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def reach(self, queue: str) -> None:
        """A Problem (403) unless the key may touch this queue."""
        if not self.key.reaches(queue):
            raise Problem("queue", "this key is limited to other queues")

    def queue(self) -> str | None:
        """The queue of a filter: a key that is limited to one has it by default, one with several has to say which."""
        queue: str | None = self.get("queue")
        if queue is None and self.key.queues is not None:
            if len(self.key.queues) > 1:
                raise Problem("queue", "this key is limited to some queues", hint="Say which queue is meant")
            queue = self.key.queues[0]
        if queue is not None:
            self.reach(queue)
        return queue


@dataclass(frozen=True, slots=True)
class Changed:
    """What an operation that may change something has come to. Without an `action` nothing was changed: no audit row."""

    answer: dict[str, Any]
    action: str | None = None
    target: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    status: int = 200


Reads = Callable[[Ask, Conn], Awaitable[dict[str, Any]]]
Changes = Callable[[Ask, Conn], Awaitable[Changed]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One endpoint. Either `reads` or `changes` serves it."""

    name: str
    method: str
    path: str
    """Below the prefix of the API, {name} for a field of `in_path`."""
    scope: str
    about: str
    answer: Mapping[str, Any]
    """The JSON Schema of a good answer."""
    example: Mapping[str, Any]
    """One."""
    in_path: tuple[Field, ...] = ()
    in_query: tuple[Field, ...] = ()
    in_body: tuple[Field, ...] = ()
    codes: tuple[str, ...] = ()
    """Which problems it can end with, beside those that every endpoint has."""
    whole: bool = False
    """Whether it is refused to keys that are limited to some queues."""
    newest: tuple[str, str] | None = None
    """Of a list: by which member its rows are ordered, newest first, and which value limits them."""
    created: bool = False
    """Whether it can answer 201, too."""
    reads: Reads | None = None
    changes: Changes | None = None

    async def change(self, ask: Ask, conn: Conn, via: str) -> Changed:
        """Change it and add the audit row, both in the caller's transaction."""
        assert self.changes is not None
        done = await self.changes(ask, conn)
        if done.action is not None:
            await aio.run(conn, audit.add(ask.key.id, via, done.action, done.target, done.done))
        return done


def record(**properties: Mapping[str, Any] | str) -> dict[str, Any]:
    """The schema of an object with all of these; a text is a type, with "?" one that may be null."""
    found = {name: _typed(kind) if isinstance(kind, str) else dict(kind) for name, kind in properties.items()}
    return {"type": "object", "properties": found, "required": list(found)}


def _typed(kind: str) -> dict[str, Any]:
    bare = kind.removesuffix("?")
    schema: dict[str, Any] = {"type": "string", "format": "date-time"} if bare == "instant" else {"type": bare}
    if kind.endswith("?"):
        schema["type"] = [schema["type"], "null"]
    return schema


def listed(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    return record(**{name: {"type": "array", "items": dict(item)}})


def merged(
    operation: Operation, ask: Ask, found: Mapping[str, Mapping[str, Any]], away: Sequence[str]
) -> dict[str, Any]:
    """One answer of those of several nodes: each row says its node, and `away` has the nodes that did not answer."""
    ((name, _),) = next(iter(found.values())).items()
    rows = [{**row, "node": node} for node, answer in found.items() for row in answer[name]]
    if operation.newest is not None:
        by, most = operation.newest
        rows.sort(key=lambda row: row[by], reverse=True)  # texts of one form, in UTC
        rows = rows[: ask.get(most, 50)]
    return {name: rows, "away": list(away)}


def plain(value: Any) -> Any:
    """A value as JSON has it: instants in UTC, durations in seconds."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    return value
