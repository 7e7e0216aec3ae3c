"""The endpoint as one value: the server runs it, and the OpenAPI document is built from it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from tallybook._app import App
from tallybook._app.history import audit_add
from tallybook._db.verb import run
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.operator.fields import INSTANT, Field
from tallybook.extra.operator.keys import Key
from tallybook.extra.operator.problems import Problem


@dataclass(frozen=True, slots=True)
class Ask:
    """A request with a valid signature and scope: its key and its values."""

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
        """Raise a Problem (403) unless the key may use this queue."""
        if not self.key.reaches(queue):
            raise Problem("queue", "this key is limited to other queues")

    def queue(self) -> str | None:
        """Return the queue of a filter. It defaults to the key's only queue; a key with several has to name one."""
        queue: str | None = self.get("queue")
        if queue is None and self.key.queues is not None:
            if len(self.key.queues) > 1:
                raise Problem("queue", "this key is limited to some queues", hint="Pass one of them as queue")
            queue = self.key.queues[0]
        if queue is not None:
            self.reach(queue)
        return queue


@dataclass(frozen=True, slots=True)
class Changed:
    """The result of an operation that can change something. No `action` means no change and no audit row."""

    answer: dict[str, Any]
    action: str | None = None
    target: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    letters: list[dict[str, Any]] = field(default_factory=list)  # that it was applied to, oldest first


class Shape(NamedTuple):
    """What a successful answer looks like."""

    schema: dict[str, Any]  # its JSON Schema
    example: dict[str, Any]


_NONE = Shape({}, {})


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint. Either `reads` or `changes` serves it."""

    name: str
    path: str  # below the prefix of the API, {name} for a field of `in_path`
    scope: str
    about: str
    _: KW_ONLY
    answer: Shape = _NONE
    in_path: tuple[Field, ...] = ()
    in_query: tuple[Field, ...] = ()
    in_body: tuple[Field, ...] = ()
    codes: tuple[str, ...] = ()  # of problems that it can return, besides those of every endpoint
    whole: bool = False  # whether keys that are limited to some queues are refused
    newest: tuple[str, str] | None = None  # of a list: the member that orders its rows, and the value that limits them
    created: bool = False  # whether it can also return 201
    reads: Callable[[Ask, Conn], Awaitable[dict[str, Any]]] | None = None
    changes: Callable[[Ask, Conn], Awaitable[Changed]] | None = None

    @property
    def method(self) -> str:
        return "GET" if self.changes is None else "POST"

    async def change(self, ask: Ask, conn: Conn, via: str) -> Changed:
        """Make the change and add the audit row, both in the caller's transaction."""
        assert self.changes is not None
        done = await self.changes(ask, conn)
        if done.action is not None:
            await run(conn, audit_add(ask.key.id, via, done.action, done.target, done.done))
        return done


def record(details: str | None = None, /, **properties: Any) -> Shape:
    """Return the shape of an object with all these properties, each an example, whose type is that of the property.

    A pair has the type before the example: a name, with "?" if null is allowed, or a schema. With a text about its
    `details`, the object may also have these.
    """
    pairs = {name: one if isinstance(one, tuple) else (_type_of(one), one) for name, one in properties.items()}
    found = {name: _typed(kind) if isinstance(kind, str) else kind for name, (kind, _) in pairs.items()}
    more = {} if details is None else {"details": {"type": "object", "description": details}}
    schema = {"type": "object", "properties": found | more, "required": list(found)}
    return Shape(schema, {name: example for name, (_, example) in pairs.items()})


def _type_of(example: object) -> str:
    if isinstance(example, str):
        return "instant" if INSTANT.fullmatch(example) else "string"
    return {bool: "boolean", int: "integer", dict: "object"}[type(example)]


def _typed(kind: str) -> dict[str, Any]:
    bare = kind.removesuffix("?")
    schema: dict[str, Any] = {"type": "string", "format": "date-time"} if bare == "instant" else {"type": bare}
    if kind.endswith("?"):
        schema["type"] = [schema["type"], "null"]
    return schema


def listed(name: str, item: Shape) -> Shape:
    return record(**{name: ({"type": "array", "items": item.schema}, [item.example])})


def merged(operation: Operation, ask: Ask, found: dict[str, dict[str, Any]], away: list[str]) -> dict[str, Any]:
    """Merge the answers of several nodes: each row has its `node`, and `away` lists the nodes that did not answer."""
    ((name, _),) = next(iter(found.values())).items()
    rows = [{**row, "node": node} for node, answer in found.items() for row in answer[name]]
    if operation.newest is not None:
        by, most = operation.newest
        # Not as texts: a whole second has no fraction. Ids put jobs of one instant in the order of the pages.
        rows.sort(key=lambda row: (datetime.fromisoformat(row[by]), row.get("job")), reverse=True)
        rows = rows[: ask.get(most, 50)]
    return {name: rows, "away": away}


def plain(value: Any) -> Any:
    """Return a value for JSON: instants in UTC, durations in seconds."""
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
