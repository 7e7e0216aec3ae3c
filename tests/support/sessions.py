"""Sessions that wait for each other, and the cost of their statements."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from support.database import Connection

LANE_LOCK = 1413565441


def enqueue(db: Connection, queue: str = "q", *, n: int = 1, **options: Any) -> list[int]:
    """Enqueue `n` jobs with one call each, in one transaction."""
    named = "".join(f", {name} => %({name})s" for name in options)
    query = f"select tallybook.enqueue(%(queue)s, 'work'{named}) from generate_series(1, %(n)s)"  # noqa: S608
    cursor = db.execute(query, {"queue": queue, "n": n, **options})
    return [job for (job,) in cursor.fetchall()]


def buffers(db: Connection, query: str, *params: object) -> int:
    """Return how many pages a statement touches after planning; its effects are rolled back.

    This is the least of some runs, because autovacuum, and a server that is making databases, cause new plans.
    """
    found = []
    for _ in range(3):
        with db.transaction(force_rollback=True):
            for _ in range(2):
                cursor = db.execute("explain (analyze, buffers, format json) " + query, params)
                plan = cursor.fetchall()[0][0][0]["Plan"]
            found.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    return int(min(found))


@contextmanager
def behind(*sessions: Connection) -> Iterator[ThreadPoolExecutor]:
    """Yield threads for calls that must wait; cancel calls that still wait at the end."""
    with ThreadPoolExecutor(4) as pool:
        try:
            yield pool
        finally:
            for conn in sessions:
                conn.cancel_safe()
