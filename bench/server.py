"""The server for all measurements: PostgreSQL 18, durable, with enough room for its buffers and its log."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from tallybook._db.migrate import migrate
from tallybook.embedded import Server, temporary_server

SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "max_connections": "200",
    "checkpoint_timeout": "30min",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
}


@contextmanager
def server() -> Iterator[Server]:
    """Run a separate durable server for one benchmark."""
    with temporary_server(18, settings=SETTINGS, durable=True) as running:
        yield running


@contextmanager
def database(running: Server, *, tallybook: bool = True) -> Iterator[str]:
    """Make a fresh database, with the schema unless `tallybook` is false; yields its DSN."""
    name = f"bench_{secrets.token_hex(4)}"
    dsn = running.create_database(name)
    try:
        if tallybook:
            with psycopg.connect(dsn, autocommit=True) as conn:
                migrate(conn)
        yield dsn
    finally:
        running.drop_database(name)


def args(number: int) -> str:
    """Return the payload of every benchmark's jobs, peers included."""
    return json.dumps({"to": f"user{number}@example.com", "n": number})


def load(
    conn: psycopg.Connection[Any], jobs: int, *, queue: str = "default", task: str = "noop", batch: int = 1000
) -> None:
    """Enqueue this many jobs, in batches."""
    for first in range(0, jobs, batch):
        numbers = range(first, min(first + batch, jobs))
        conn.execute(
            "select tallybook.enqueue_many(%s::text[], %s::text[], %s::text[])",
            ([queue] * len(numbers), [task] * len(numbers), [args(n) for n in numbers]),
        )


def start_worker(conn: psycopg.Connection[Any], queues: list[str]) -> int:
    """Register a worker for claims that a benchmark makes itself; return its id."""
    row = conn.execute(
        "select tallybook.worker_start('bench', %s::text[], '{noop}', at => 'infinity')", (queues,)
    ).fetchone()
    assert row is not None
    return int(row[0])


def wal(conn: psycopg.Connection[Any]) -> int:
    """Return the bytes of write-ahead log so far."""
    row = conn.execute("select (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    assert row is not None
    return int(row[0])


def vacuum(dsn: str) -> None:
    """Do what autovacuum would do within a minute: every system is measured with statistics."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("vacuum (analyze)")


__all__ = ["SETTINGS", "args", "database", "load", "server", "sql", "start_worker", "vacuum", "wal"]
