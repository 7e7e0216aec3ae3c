"""The database of a command, and the nodes of --nodes.

Lists are read from all nodes concurrently and merged; changes are made on one node after the other.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import click

from tallybook._app import App
from tallybook._cli.errors import Problem, problem, short
from tallybook._cli.output import clean
from tallybook._db import driver, migrate
from tallybook._db.declared import Call
from tallybook._db.driver import Connection, Error, OperationalError
from tallybook._db.link import CONNECT, dsn_for_people
from tallybook._db.nodes import Answer, Node, asked, nodes, numbered, of_job
from tallybook._db.policy import backoff, is_final
from tallybook._db.pooler import LAG, Standby
from tallybook._db.source import Source
from tallybook._db.texts import READER, loads
from tallybook._db.verb import Verb, run_sync
from tallybook._model import merged
from tallybook.errors import (
    QueueUnavailable,
    TallybookError,
    UnknownJob,
    UnknownProvider,
    UnknownQueue,
    UnknownSchedule,
)

T = TypeVar("T")
APP = App("cli")  # for its verbs, which all run on the connection of a command
Found = list[tuple[str, Any]]  # rows, each with the name of its node before it
Merge = Callable[[Found, Mapping[str, Any]], Found]
"""A function that merges the lists of all nodes, in the order of the nodes; it also receives the options."""
_NAMES = {  # the known names for the error about an unknown one
    UnknownProvider: "select p.name from tallybook.providers p",
    UnknownQueue: "select q.name from tallybook.queues q",
    UnknownSchedule: "select s.name from tallybook.schedules s",
}


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
    node: str | None = None  # the name of its node with --nodes
    _at: dict[str, Db] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.read_dsn is not None and self.which is not None:
            raise click.UsageError("--read-dsn is a standby of one database, --nodes are several: pass one of the two")

    @property
    def conninfo(self) -> str:
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
        return self._at.setdefault(node.name, Db(node.dsn, self.stack, self.schema, node=node.name))

    @cached_property
    def conn(self) -> Connection:
        dsn = self.read_dsn
        if dsn is None:
            dsn = nodes(self.conninfo, "home")[0].dsn if self.home else self.dsn
        conn = self.stack.enter_context(connect(dsn, schema=self.schema))
        if self.read_dsn is not None:
            click.echo(standby_of(conn), err=True)
        return conn

    def run(self, verb: Verb[T] | Call[T], name: str | None = None) -> T:
        """Run a verb and return its result. If there is nothing with this name, the error has the known names."""
        made = verb._take() if isinstance(verb, Verb) else verb  # before a connection that may fail: it would warn
        try:
            return run_sync(self.conn, made)
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
        self, sql: str, verb: Callable[..., Verb[Any]], most: str, after: str | None, limit: int
    ) -> tuple[list[Any], Any]:
        """Return the rows of a list of at most 1000 per call, and the last row of all if the list may continue.

        That row has no id; the cursor is in the second column. `sql` has more columns than the verb, and its parameters
        with the limit `most`.
        """
        rows: list[Any] = []
        last = None
        while len(rows) < limit:
            room = min(limit - len(rows), 1000)
            call = verb(after=after, **{most: room})._take()
            assert isinstance(call, Call)
            found = self.conn.execute(sql.encode(), call.params).fetchall()
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
    target, conn, failures = conninfo(dsn), None, 0
    until = time.monotonic() + (wait.total_seconds() if wait else 0.0)
    while conn is None:
        try:
            conn = driver.connect(target, **CONNECT, context=READER)
        except OperationalError as error:
            if is_final(error) or time.monotonic() >= until:
                raise QueueUnavailable(dsn_for_people(target), str(error)) from error
            if not failures:
                click.echo(f"waiting for {dsn_for_people(target)}: {clean(short(str(error)))}", err=True)
            failures += 1
            time.sleep(min(backoff(failures), 1.0))
    with conn:
        # A view cannot set this: compiling a look-up by id takes 100 ms, running it 1 ms. A pooler's session is shared.
        own = f"where pg_backend_pid() = {conn.info.backend_pid:d}"
        styles = "set timezone = 'UTC'; set datestyle = 'ISO'; select set_config('intervalstyle', 'postgres', false)"
        level = "set_config('default_transaction_isolation', 'read committed', false)"  # several verbs need it
        conn.execute(f"{styles}, {level}, set_config('jit', 'off', false) {own}".encode())
        if schema:
            migrate.check(conn)
        yield conn


def check_schema(dsn: str | None) -> None:
    """Report a wrong DSN, or a database without a schema that this release supports."""
    with connect(dsn):
        pass


nodes_option = click.option(
    "--nodes", "nodes_", metavar="NAMES", help="Use these nodes: all, or names like north,south. [one database]"
)

Said = tuple[T | None, TallybookError | None]  # the answer of a node, or the error that it returned


def answers(db: Db, fn: Callable[[Db], T], *, seconds: float = 10.0) -> list[Answer[Said[T]]]:
    """Call `fn` for each node concurrently, and return the answers."""

    def ask(node: Node) -> Answer[Said[T]]:  # one call per node: each has its own database
        def question(conn: Connection) -> Said[T]:
            one = Db(node.dsn, db.stack, db.schema, node=node.name)
            one.__dict__["conn"] = conn
            if db.schema:
                migrate.check(conn)
            try:
                return fn(one), None
            except TallybookError as error:
                return None, error

        return asked((node,), question, seconds=seconds)[0]

    with ThreadPoolExecutor(len(db.nodes)) as threads:
        return list(threads.map(ask, db.nodes))


def gathered(db: Db, fn: Callable[[Db], T]) -> list[tuple[str, T]]:
    """Return the result of `fn` for each node that answers; print a line on stderr for each other node.

    Raises Problem if no node has answered, or the error of Tallybook if every answer is an error.
    """
    found, refusal = [], None
    for answer in answers(db, fn):
        if answer.value is None:
            click.echo(f"node {answer.node.name} did not answer: {clean(answer.error)}", err=True)
            continue
        value, refused = answer.value
        refusal = refusal or refused
        if refused is None:
            found.append((answer.node.name, value))
    if not found:
        raise refusal or Problem("no node has answered", hint="See `tallybook node check`")
    return found  # type: ignore[return-value]  # it is None where fn returns None


def newest(time: str, number: str) -> Merge:
    """Merge by this time, then by this id, newest first, up to --limit."""

    def merge(found: Found, given: Mapping[str, Any]) -> Found:
        found.sort(key=lambda pair: (getattr(pair[1], time), getattr(pair[1], number)), reverse=True)
        return found[: given["limit"]]

    return merge


def summed(found: Found, _: Mapping[str, Any]) -> Found:
    """Merge to one row per name, with the sums, and list the nodes."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for node, text in found:
        row = loads(text)
        on, sums = rows.get(row["name"], ("", None))
        rows[row["name"]] = (node, row) if sums is None else (f"{on}, {node}", merged.summed(sums, row))
    return [pair for _, pair in sorted(rows.items())]


def each(db: Db, fn: Callable[[Db], str | None], *, as_json: bool = False) -> str | None:
    """Run a command on this database, or on each of the nodes in turn, and report per node.

    After a failure of a node it continues with the others; exit code 1 if any failed. `as_json` prints one document.
    """
    if not db.nodes:
        return fn(db)
    failed, documents = False, []
    for node in db.nodes:
        written, error, line = io.StringIO(), None, None
        try:
            with redirect_stdout(written):
                line = fn(db.at(node))
        except (TallybookError, Error, Problem) as raised:
            failed, error = True, problem(raised)
        except SystemExit as ended:
            failed |= bool(ended.code)
        text = "\n".join(part for part in (written.getvalue().rstrip("\n"), line) if part)
        if as_json:
            document = f', "answer": {text}' if text else ""
            told = f', "error": {json.dumps(error.message)}' if error else ""
            documents.append(f'{{"node": {json.dumps(node.name)}{document}{told}}}')
            continue
        for shown in text.splitlines():
            click.echo(f"{node.name}: {shown}")
        if error:
            click.echo(f"{node.name}: error: {clean(error.message)}", err=True)
    if as_json:
        click.echo("[" + ",\n ".join(documents) + "]")
    if failed:
        raise SystemExit(1)
    return None
