"""Helpers of all tests for their database: types of connections, one value, a call, a new database."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

Connection = psycopg.Connection[tuple[Any, ...]]
Connect = Callable[..., Connection]
Row = tuple[Any, ...]

UNREACHABLE = "host=127.0.0.1 port=1 dbname=shop user=u password=geheim"


def one(db: psycopg.Connection[Any], query: Any, *params: Any) -> Any:
    """Return the first column of the first row, which must exist.

    A dict has named parameters; without parameters, % is literal.
    """
    row = db.execute(
        query, params[0] if len(params) == 1 and isinstance(params[0], dict) else params or None
    ).fetchone()
    assert row is not None, f"no row: {query}"
    return row[0]


def call(db: Connection, verb: str, columns: str = "*", **args: Any) -> list[Row]:
    """Select these columns from a function of Tallybook with named arguments; a dict is passed as JSON."""
    values = {name: Jsonb(value) if isinstance(value, dict) else value for name, value in args.items()}
    names = ", ".join(f"{name} => %({name})s" for name in values)
    query = f"select {columns} from tallybook.{verb}({names})"  # noqa: S608
    return db.execute(query, values).fetchall()  # type: ignore[arg-type]


def miscounted(db: Connection) -> list[Row]:
    """Return the differences of the counters from a recount."""
    return db.execute("select * from tallybook.verify()").fetchall()


def dump(db: Connection) -> str:
    """Return every row of every table and view of the schema as text, with bytea in both of PostgreSQL's formats."""
    names = db.execute(
        "select c.oid::regclass::text from pg_class c"
        " where c.relnamespace = 'tallybook'::regnamespace and c.relkind in ('r', 'v')"
    ).fetchall()
    assert len(names) > 20
    texts = []
    for spelling in ("hex", "escape"):
        db.execute(sql.SQL("set bytea_output = {}").format(spelling))
        for (name,) in names:
            schema, _, table = name.rpartition(".")
            rows = db.execute(
                sql.SQL("select t::text from {} t").format(sql.Identifier(schema or "tallybook", table.strip('"')))
            )
            texts += [row[0] for row in rows]
    return "\n".join(texts)


@contextmanager
def fresh(server: Any, template: str | None = None) -> Iterator[str]:
    """Make a database, perhaps from a template, yield its conninfo and drop it at the end."""
    name = f"tallybook_shared_{secrets.token_hex(6)}"
    dsn = server.create_database(name, template)
    try:
        yield dsn
    finally:
        server.drop_database(name)


@contextmanager
def without_statistics(server: Any, template: str) -> Iterator[Connection]:
    """Make a database whose tables are never analyzed and never vacuumed on their own, and yield a session."""
    with fresh(server, template) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        db.execute("set synchronous_commit = off")
        tables = "select relname from pg_class where relnamespace = 'tallybook'::regnamespace and relkind = 'r'"
        for (table,) in db.execute(tables).fetchall():
            off = sql.SQL("alter table tallybook.{} set (autovacuum_enabled = off)")
            db.execute(off.format(sql.Identifier(table)))
        yield db
