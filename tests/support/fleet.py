"""Several databases of one app: numbered nodes, with the table of nodes in the first."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from support.database import Connection
from tallybook._db import nodes as _nodes
from tallybook._db import sync
from tallybook._db.migrate import migrate
from tallybook._db.nodes import Node

NAMES = ("north", "south", "west", "east", "fifth", "sixth", "seventh", "eighth")
_RENUMBER = """\
alter sequence tallybook.job_id minvalue {start} maxvalue {end} start {start} restart {start};
update tallybook.installation set node = {number}"""


class Fleet:
    """Nodes 1 to `count`, named north, south, west, ...; with `table` the first lists them.

    `server` makes the databases. With `servers`, each node is on its own server, in this order.
    """

    def __init__(
        self, server: Any, count: int = 3, *, template: str | None = None, table: bool = True, servers: Any = ()
    ) -> None:
        self._made: list[tuple[Any, str]] = []
        self.dsns: list[str] = []
        for number in range(1, count + 1):
            self.dsns.append(self._database(servers[number - 1] if servers else server, number, template))
        if table:
            for number, dsn in enumerate(self.dsns, 1):
                self.add(NAMES[number - 1], dsn, number)

    def _database(self, server: Any, number: int, template: str | None) -> str:
        name = f"tallybook_node{number}_{secrets.token_hex(6)}"
        dsn = str(server.create_database(name, template))
        self._made.append((server, name))
        with psycopg.connect(dsn) as conn:
            if template is None:
                migrate(conn, node=number)
            else:
                renumber(conn, number)
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
        parts = conninfo_to_dict(dsn)
        address = " ".join(f"{key}={parts[key]}" for key in ("host", "port", "dbname") if parts.get(key))
        with self.connect(1) as conn:
            sync.run(conn, _nodes.add(name, address, number, None))

    def connect(self, number: int) -> Connection:
        """Open an autocommit connection to a node; the caller closes it."""
        return psycopg.connect(self.dsns[number - 1], autocommit=True)

    def run(self, number: int, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        """Run one statement on a node and return its rows."""
        with self.connect(number) as conn:
            cursor = conn.execute(statement.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

    def enqueue(self, number: int, queue: str = "default", task: str = "t") -> int:
        """Enqueue a job on a node and return its id."""
        return int(self.run(number, "select tallybook.enqueue(%s, %s, '{}')", queue, task)[0][0])

    def close(self) -> None:
        """Drop the databases."""
        for server, name in self._made:
            server.drop_database(name)


def renumber(conn: psycopg.Connection[Any], number: int) -> None:
    """Set the number of an installation without jobs: copies of a template have the number 0."""
    statement = _RENUMBER.format(number=number, start=(number << 43) or 1, end=(number << 43) + (1 << 43) - 1)
    conn.execute(statement.encode())


@contextmanager
def fleets(server: Any, template: str) -> Iterator[Callable[..., Fleet]]:
    """Yield a function that makes fleets; drop all their databases at the end."""
    made: list[Fleet] = []

    def one(count: int = 3, **options: Any) -> Fleet:
        made.append(Fleet(server, count, template=template, **options))
        return made[-1]

    try:
        yield one
    finally:
        for fleet in made:
            fleet.close()
