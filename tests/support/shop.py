"""Databases on separate clusters, which move from one to another.

The transaction ids of the cluster `far` are an epoch ahead; those of `near` and `fresh` begin at 700. If `near` must be
some ids ahead of `fresh`, the test uses ids up: jobs enqueued on `fresh` can then get ids between those of the dump.
"""

import secrets
import signal
from contextlib import ExitStack
from pathlib import Path

import psycopg

from support.clusters import burn, dump, next_xid, restore
from support.database import Connection, one
from support.house import QUEUES
from support.waiting import wait_until
from support.worker_process import TABLES, Workers
from tallybook._db.migrate import migrate
from tallybook.embedded import Server

OPEN = (
    "select count(*) from tallybook.job where state in ('available', 'running', 'waiting')"
    " or state = 'scheduled' and run_at < now() + interval '1 day'"
)
BELIEVE = "update tallybook.installation set system_identifier = (select system_identifier from pg_control_system())"
WAYS = {
    "to a lower counter": ("far", "fresh"),
    "to a higher counter": ("fresh", "far"),
    "into the ids of the dump": ("near", "fresh"),
}


class Shop:
    """One database, and connections to it."""

    def __init__(self, server: Server, stack: ExitStack, *, empty: bool = False) -> None:
        self.dsn = server.create_database(f"shop_{secrets.token_hex(4)}")
        self._stack = stack
        self.db = self.connect()
        if not empty:
            migrate(self.db)
            self.db.execute(TABLES)

    def connect(self) -> Connection:
        conn = psycopg.connect(self.dsn, autocommit=True)
        self._stack.callback(conn.close)
        return conn


def catch_up(shop: Shop, other: Shop, ids: int) -> None:
    """Use up transaction ids until this cluster's counter is `ids` ahead of the other's."""
    burn(shop.db, max(0, next_xid(other.db) + ids - next_xid(shop.db)))


def moved(old: Shop, new: Shop, folder: Path, *options: str) -> None:
    """Move the whole database by pg_dump and pg_restore."""
    dump(old.dsn, folder / "shop.dump", *options)
    restore(folder / "shop.dump", new.dsn)


def worked_off(new: Shop, *, count: int = 1) -> list[str]:
    """Run `count` worker processes until no job is left; return their output."""
    begun = one(new.db, "select clock_timestamp()")
    there = "select count(*) from tallybook.worker where ended_at is null and started_at > %s"
    with Workers(new.dsn, new.db) as workers:
        started = [workers.start(wait=False, queues=QUEUES) for _ in range(count)]
        # Wait for all of them: a worker that gets the signal before it handles signals is killed by it.
        wait_until(lambda: one(new.db, there, begun) == count, "the workers are there")
        wait_until(lambda: one(new.db, OPEN) == 0, "all jobs have ended", seconds=90)
        for worker in started:
            worker.signal(signal.SIGTERM)
        assert [worker.ends() for worker in started] == [0] * count
        return [worker.said for worker in started]
