"""Several databases of one app: numbered nodes, with the table of nodes in the first."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from support.database import Connection
from support.databases import Aside, Database
from support.hands import Hands
from tallybook._db import nodes as _nodes
from tallybook._db import sync
from tallybook._db.migrate import migrate
from tallybook._db.nodes import Node
from tallybook.embedded import Server

NAMES = ("north", "south", "west", "east", "fifth", "sixth", "seventh", "eighth")
Asides = Callable[[int], Aside]
"""The databases of each node number."""
_RENUMBER = """\
alter sequence tallybook.job_id minvalue {start} maxvalue {end} start {start} restart {start};
update tallybook.installation set node = {number}"""


class Fleet:
    """Nodes 1 to `count`, named north, south, west, ...; with `table` the first lists them.

    `asides` give the databases of each number, but for the nodes of `apart`, which are on these servers.
    """

    def __init__(
        self, asides: Asides, count: int = 3, *, table: bool = True, apart: Mapping[int, Server] | None = None
    ) -> None:
        apart = apart or {}
        self._made: list[tuple[Server, str]] = []
        self._taken: dict[int, tuple[Aside, Database]] = {}
        self.dsns = [
            self._database(apart[number], number) if number in apart else self._take(asides(number), number)
            for number in range(1, count + 1)
        ]
        self._sessions = {number: one.session for number, (_, one) in self._taken.items() if one.session}
        if table:
            with self.connect(1) as conn:
                for number, dsn in enumerate(self.dsns, 1):
                    add(conn, NAMES[number - 1], dsn, number)

    def _take(self, aside: Aside, number: int) -> str:
        taken = aside.take()
        self._taken[number] = aside, taken
        return taken.dsn

    def _database(self, server: Server, number: int) -> str:
        name = f"tallybook_node{number}_{secrets.token_hex(6)}"
        dsn = server.create_database(name)
        self._made.append((server, name))
        with psycopg.connect(dsn) as conn:
            migrate(conn, node=number)
        return dsn

    @property
    def dsn(self) -> str:
        """The DSN of the first node, which has the table."""
        return self.dsns[0]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as the package returns them."""
        return _nodes.nodes(self.dsn)

    def add(self, name: str, dsn: str, number: int) -> None:
        """Add a node to the table of the first."""
        with self.connect(1) as conn:
            add(conn, name, dsn, number)

    def connect(self, number: int) -> Connection:
        """Open an autocommit connection to a node; the caller closes it."""
        return psycopg.connect(self.dsns[number - 1], autocommit=True)

    def run(self, number: int, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        """Run one statement on a node and return its rows.

        On databases of `asides` all of them use one session, which knows their plans.
        """
        conn = self._sessions.get(number)
        if conn is None or conn.closed:
            conn = self.connect(number)
        lasts = number in self._taken
        if lasts:
            self._sessions[number] = conn
        with nullcontext() if lasts else conn:  # a server of its own may be stopped
            cursor = conn.execute(statement.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

    def enqueue(self, number: int, queue: str = "default", task: str = "t") -> int:
        """Enqueue a job on a node and return its id."""
        return int(self.run(number, "select tallybook.enqueue(%s, %s, '{}')", queue, task)[0][0])

    def state(self, job: int) -> str:
        """Return the state of a job on the node that its id names."""
        return str(self.run(job >> 43, "select tallybook.state(%s)", job)[0][0])

    def die(self, number: int, why: str = "no stamp") -> int:
        """Make a dead letter on a node and return its id."""
        with self.connect(number) as conn:
            hands, job = Hands(conn, "default"), self.enqueue(number)
            (attempt,) = hands.claim()
            assert attempt.id == job and hands.fail(attempt, final=True, message=why) == "dead"
        return job

    def named(self, **others: str) -> str:
        """Return the value of TALLYBOOK_NODES; nodes of these names have other DSNs."""
        dsns = dict(zip(NAMES, self.dsns, strict=False)) | others
        return "\n".join(f"{name}={dsn}" for name, dsn in dsns.items())

    def close(self) -> None:
        """Give the databases back, or drop them."""
        for number, (aside, database) in self._taken.items():
            database.session = self._sessions.pop(number, None)
            aside.give(database)
        for conn in self._sessions.values():
            conn.close()
        for server, name in self._made:
            server.drop_database(name)


def add(conn: Connection, name: str, dsn: str, number: int) -> None:
    """Add a node to the table of the connection's database."""
    parts = conninfo_to_dict(dsn)
    address = " ".join(f"{key}={parts[key]}" for key in ("host", "port", "dbname") if parts.get(key))
    sync.run(conn, _nodes.add(name, address, number, None))


def renumber(conn: psycopg.Connection[Any], number: int) -> None:
    """Set the number of an installation without jobs: copies of a template have the number 0."""
    statement = _RENUMBER.format(number=number, start=(number << 43) or 1, end=(number << 43) + (1 << 43) - 1)
    conn.execute(statement.encode())
