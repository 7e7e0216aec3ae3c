"""The database of a command, and the nodes of --nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import click

from tallybook._cli.errors import short
from tallybook._cli.text import clean
from tallybook._db import driver, migrate, sync
from tallybook._db.declared import Call
from tallybook._db.driver import Connection, OperationalError
from tallybook._db.link import CONNECT, dsn_for_people
from tallybook._db.nodes import Node, nodes, numbered, of_job
from tallybook._db.policy import backoff, is_final
from tallybook._db.pooler import LAG, Standby
from tallybook._db.source import Source
from tallybook._db.texts import READER
from tallybook.errors import QueueUnavailable, UnknownJob, UnknownProvider, UnknownQueue, UnknownSchedule

T = TypeVar("T")
_NAMES = {
    UnknownProvider: "select p.name from tallybook.providers p",
    UnknownQueue: "select q.name from tallybook.queues q",
    UnknownSchedule: "select s.name from tallybook.schedules s",
}
"""The known names for the error about an unknown one."""


def standby_of(conn: Connection) -> str:
    return str(Standby(*(conn.execute(f"select {LAG}".encode()).fetchone() or ())))


@dataclass(eq=False, repr=False)
class Db:
    """The database of a command. It connects on first use, so that wrong options are reported without a connection."""

    dsn: str | None
    stack: ExitStack
    schema: bool
    which: str | None = None
    home: bool = False
    read_dsn: str | None = None
    node: str | None = None
    """The name of its node with --nodes."""
    _at: dict[str, Db] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.read_dsn is not None and self.which is not None:
            raise click.UsageError("--read-dsn is a standby of one database, --nodes are several: pass one of the two")

    @property
    def conninfo(self) -> str:
        """The effective connection string."""
        return conninfo(self.dsn)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of --nodes; empty without it."""
        return () if self.which is None else nodes(self.conninfo, self.which)

    def of(self, job_id: int) -> Db:
        """Return a job's node among those of --nodes, or this database without it. Raises UnknownNode, UnknownJob."""
        if not 0 < job_id < 1 << 63:
            raise UnknownJob(job_id)
        return self.at(of_job(self._numbered, job_id)) if self.nodes else self

    @cached_property
    def _numbered(self) -> tuple[Node, ...]:
        return numbered(self.nodes)

    def at(self, node: Node) -> Db:
        if node.name not in self._at:
            self._at[node.name] = Db(node.dsn, self.stack, self.schema, node=node.name)
        return self._at[node.name]

    def over(self, conn: Connection, node: Node) -> Db:
        """Return the database of a node, on an open connection."""
        found = Db(node.dsn, self.stack, self.schema, node=node.name)
        if self.schema:
            migrate.check(conn)
        found.__dict__["conn"] = conn
        return found

    @cached_property
    def conn(self) -> Connection:
        dsn = self.read_dsn
        if dsn is None:
            dsn = nodes(self.conninfo, "home")[0].dsn if self.home else self.dsn
        conn = self.stack.enter_context(connect(dsn, schema=self.schema))
        if self.read_dsn is not None:
            click.echo(standby_of(conn), err=True)
        return conn

    def run(self, call: Call[T], name: str | None = None) -> T:
        """Run a verb and return its result. If there is nothing with this name, the error has the known names."""
        try:
            return sync.run(self.conn, call)
        except (UnknownProvider, UnknownQueue, UnknownSchedule) as error:
            if name is None:
                raise
            raise type(error)(name, self.texts(_NAMES[type(error)])) from None

    def known_queue(self, name: str) -> None:
        if name not in (known := self.texts(_NAMES[UnknownQueue])):
            raise UnknownQueue(name, known)

    def texts(self, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> list[str]:
        """Return the first column of a query: rows as JSON, or names."""
        return [row[0] for row in self.conn.execute(sql.encode(), params).fetchall()]

    def paged(
        self,
        sql: str,
        params: Callable[[str | None, int], Mapping[str, object]],
        after: str | None,
        limit: int,
        most: int,
    ) -> tuple[list[Any], Any]:
        """Return the rows of a list that has at most `most` per call, and the last row of all if the list may continue.

        That row has no id; the cursor is in the second column.
        """
        rows: list[Any] = []
        last = None
        while len(rows) < limit:
            room = min(limit - len(rows), most)
            found = self.conn.execute(sql.encode(), params(after, room)).fetchall()
            last = found.pop() if found and found[-1][0] is None else None
            rows += found
            if last is None or len(found) < room:
                break
            after = last[1]
        return rows, last

    def named(self, question: str) -> str:
        return question if self.node is None else f"node {self.node}: {question}"


def conninfo(dsn: str | None) -> str:
    """Return the effective connection string. Raises ConfigError for an invalid one."""
    return Source("cli", None).conninfo(dsn)


@contextmanager
def connect(dsn: str | None, *, schema: bool = True, wait: timedelta | None = None) -> Iterator[Connection]:
    """Open a connection in autocommit, in UTC. With `schema`, raise a SchemaError unless this release supports it.

    Waits up to `wait` for a server that cannot be reached, unless waiting would not help.
    """
    with _connected(conninfo(dsn), wait or timedelta(0)) as conn:
        # A view cannot set this: compiling a look-up by id takes 100 ms, running it 1 ms.
        conn.execute("set timezone = 'UTC'; set jit = off")
        if schema:
            migrate.check(conn)
        yield conn


def _connected(target: str, wait: timedelta) -> Connection:
    until, failures = time.monotonic() + wait.total_seconds(), 0
    while True:
        try:
            return driver.connect(target, **CONNECT, context=READER)
        except OperationalError as error:
            if is_final(error) or time.monotonic() >= until:
                raise QueueUnavailable(dsn_for_people(target), str(error)) from error
            if not failures:
                click.echo(f"waiting for {dsn_for_people(target)}: {clean(short(str(error)))}", err=True)
            failures += 1
            time.sleep(min(backoff(failures), 1.0))
