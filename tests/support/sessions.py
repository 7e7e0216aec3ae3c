"""Sessions that wait for each other, and the cost of their statements."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from support.database import Connect, Connection, one
from support.waiting import wait_until

LANE_LOCK = 1413565441
_ROWS_READ = """
select coalesce(sum(pg_stat_get_xact_tuples_returned(c.oid)), 0)::bigint from pg_class c
  join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'tallybook' and c.relkind in ('i', 'r')"""


def enqueue(db: Connection, queue: str = "q", *, n: int = 1, **options: Any) -> list[int]:
    """Enqueue `n` jobs with one call each, in one transaction."""
    named = "".join(f", {name} => %({name})s" for name in options)
    query = f"select tallybook.enqueue(%(queue)s, 'work'{named}) from generate_series(1, %(n)s)"  # noqa: S608
    cursor = db.execute(query, {"queue": queue, "n": n, **options})
    return [job for (job,) in cursor.fetchall()]


def start_worker(db: Connection, *queues: str, session: bool = False) -> int:
    """Start a worker of these queues, or of q; with `session`, a lock of its session shows that it lives."""
    query = "select tallybook.worker_start('w', %s, session => %s)"
    return int(one(db, query, list(queues or ["q"]), session))


def claimed_jobs(db: Connection, lease: UUID | None) -> list[int]:
    """Return the jobs of a claim, by its lease."""
    return [job for (job,) in db.execute("select job_id from tallybook.claimed_jobs(%s)", [lease]).fetchall()]


def pages(db: Connection, query: str, *params: object) -> int:
    """Return the fewest pages that one of five runs of a statement touches; the effects of each are rolled back.

    The others may have touched more because of new plans, after autovacuum or beside a server that is making databases.
    """
    found = []
    for _ in range(5):
        with db.transaction(force_rollback=True):
            plan = one(db, f"explain (analyze, buffers, format json) {query}", *params)[0]["Plan"]
        found.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    return int(min(found))


@dataclass
class Reading:
    """What one call read."""

    pages: int
    whole_tables: set[str]
    indexes: set[str]


def _scans(db: Connection, tables: str) -> dict[str, int]:
    query = (
        "select 'table ' || relname, seq_scan from pg_stat_xact_user_tables"
        " where schemaname = 'tallybook' and relname ~ %s"
        " union all select 'index ' || c.relname, pg_stat_get_xact_numscans(c.oid) from pg_class c"
        " where c.relnamespace = 'tallybook'::regnamespace and c.relkind = 'i'"
    )
    return dict(db.execute(query, [tables]).fetchall())


def reading(db: Connection, call: str, tables: str) -> Reading:
    """Return the fewest pages of eight runs, because the first ones also read the catalog, and the scans of all.

    Scans of whole tables are noted for those whose names match `tables`.
    """
    found, used = [], set()
    for _ in range(8):
        with db.transaction(force_rollback=True):
            before = _scans(db, tables)
            plan = one(db, f"explain (analyze, buffers, timing off, format json) {call}")[0]["Plan"]
            used |= {name for name, n in _scans(db, tables).items() if n > before.get(name, 0)}
        found.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    whole, indexes = (
        {name.removeprefix(kind) for name in used if name.startswith(kind)} for kind in ("table ", "index ")
    )
    return Reading(min(found), whole, indexes)


def placed(db: Connection, call: str) -> str:
    """Return the call with the ids in the table `place` instead of their names, as in :name."""
    for name, place in db.execute("select name, id from place").fetchall():
        call = call.replace(f":{name}", place)
    return call


def rows_read(db: Connection, work: Callable[[], object]) -> int:
    """Return how many rows and index entries of Tallybook the second of two runs reads; both are rolled back."""
    found = 0
    for _ in range(2):
        with db.transaction(force_rollback=True):
            before = one(db, _ROWS_READ)
            work()
            found = one(db, _ROWS_READ) - before
    return found


def is_blocked(db: Connection, session: Connection) -> bool:
    """Whether this session waits for another."""
    return one(db, "select cardinality(pg_blocking_pids(%s)) > 0", session.info.backend_pid)


@contextmanager
def behind(*sessions: Connection) -> Iterator[ThreadPoolExecutor]:
    """Yield threads for calls that must wait; cancel calls that still wait at the end."""
    with ThreadPoolExecutor(4) as pool:
        try:
            yield pool
        finally:
            for conn in sessions:
                conn.cancel_safe()


def crossed(
    db: Connection,
    connect: Connect,
    hold: Callable[[Connection], object],
    first: Callable[[Connection], Any],
    second: Callable[[Connection], Any],
) -> list[Any]:
    """Start two calls that wait for a third session, or for each other; roll that back and return their results.

    What the third session holds is in the middle of what both take. If they take it in opposite orders, they deadlock.
    """
    third, *sessions = connect(autocommit=False), connect(), connect()
    hold(third)
    with behind(third, *sessions) as pool:
        calls = [pool.submit(call, conn) for call, conn in zip((first, second), sessions, strict=True)]
        wait_until(lambda: all(is_blocked(db, conn) for conn in sessions), "both calls to wait")
        third.rollback()
        return [made.result(timeout=20) for made in calls]
