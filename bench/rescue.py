"""From the kill -9 of a worker that holds a session to the next claim of its jobs, with and without a long history.

Two workers serve one queue. Jobs hold forever in the worker that will be killed, and end at once in the other, which is
also the rescuer. Each kill is timed until the last of the dead worker's jobs is claimed again.

First with the default settings, where the check for dead workers every 5 s dominates. Then with a check every 0.2 s, so
that the cost of history would show: without one, and behind 10 million done jobs, loaded by plain SQL as entries,
claims and outcomes. Last with both workers behind a PgBouncer in transaction mode, where only the lease shows a death.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bench.figures import SCALE, at_most, median, plain, say
from bench.processes import Process
from bench.server import database, server, start_worker, vacuum
from tallybook.embedded import Server
from tests.support.pooler import PACKAGE, Pooler, installed

_HELD = 10  # jobs that a worker holds when it is killed
_BATCH = 1000  # of the done jobs, per claim
_CHUNK = 100_000
_QUICK = {"rescue_look": "200 ms"}
_LEASE = 9.0
_POOLED = {"lease": f"{_LEASE:g} s", "heartbeat": "3 s"}

# What enqueue_many and complete_many would have written. claim itself makes the claims in between.
_ENTRIES = """
insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, failures, crashes, retention, task, args)
select n, n, clock_timestamp(), l.lane_id, 1, 0, 0, l.retention, 'noop',
       jsonb_build_object('to', 'user@example.com', 'n', n)
  from (select nextval('tallybook.job_id') as n from generate_series(1, %s)) s,
       (select lane_id, retention from tallybook.lane where queue = 'default' limit 1) l"""
_OUTCOMES = """
insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state)
select e.xid, e.seq, clock_timestamp(), e.retention, 'completed'
  from tallybook.entry e
 where e.job_id > %s"""


def fill(conn: psycopg.Connection[Any], jobs: int) -> None:
    """Load done jobs behind the cursor of the queue's lane; a worker, now gone, claimed them in batches."""
    worker, last = start_worker(conn, ["default"]), 0
    conn.execute("set synchronous_commit = off")
    for first in range(0, jobs, _CHUNK):
        before = _one(conn, "select coalesce(max(job_id), 0) from tallybook.entry")
        conn.execute(_ENTRIES, (min(_CHUNK, jobs - first),))
        while True:
            row = conn.execute(
                "select claim_id, jobs from tallybook.claim(%s::int, '{default}', %s::int[], %s)",
                (worker, [_BATCH], uuid.uuid4()),
            ).fetchone()
            if row is None or row[0] is None:
                break
            last = row[0]
        conn.execute(_OUTCOMES, (before,))
        if first % 1_000_000 == 0:
            say(f"  rescue: {first:,} done jobs are loaded")
    left = _one(conn, "select (select count(*) from tallybook.entry) - (select count(*) from tallybook.outcome)")
    assert left == 0, f"{left} of the done jobs have not ended"
    conn.execute("select from tallybook.renew(%s::int, %s::bigint)", (worker, last + 1))
    conn.execute("select tallybook.worker_stop(%s::int)", (worker,))


def _one(conn: psycopg.Connection[Any], query: str, *params: object) -> Any:
    row = conn.execute(query, params).fetchone()  # type: ignore[arg-type]
    assert row is not None
    return row[0]


_NUMBERS = itertools.count(1)


@contextmanager
def victim(conn: psycopg.Connection[Any], dsn: str, settings: dict[str, str]) -> Iterator[tuple[Process, list[int]]]:
    """Start a worker that holds some jobs; yield it and their ids. The other worker may have run some, too."""
    name = f"victim{next(_NUMBERS)}"
    with Process("serve", dsn, json.dumps({"name": name, "slots": _HELD, **settings}), quiet=True) as process:
        since, held = _one(conn, "select coalesce(max(job_id), 0) from tallybook.entry"), []
        until = time.monotonic() + 30
        while len(held) < _HELD // 2:
            assert time.monotonic() < until, f"{name} does not get any jobs"
            conn.execute("select tallybook.enqueue('default', 'hold')")
            time.sleep(0.01)
            rows = conn.execute(
                "select e.job_id from tallybook.entry e"
                " cross join lateral tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c"
                " join tallybook.worker w on w.id = c.worker_id where e.job_id > %s and w.name = %s",
                (since, name),
            ).fetchall()
            held = [row[0] for row in rows]
        yield process, held


def kill(conn: psycopg.Connection[Any], dsn: str, settings: dict[str, str], most_wait: float) -> float:
    """Kill one worker at a random moment; return the seconds until the last of its jobs is claimed again."""
    with victim(conn, dsn, settings) as (process, held):
        time.sleep(random.uniform(0, most_wait))
        killed = time.time()
        os.kill(process.pid, signal.SIGKILL)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            again: list[tuple[int, datetime | None]] = conn.execute(
                "select e.job_id, c.claimed_at from tallybook.entry e left join lateral"
                " tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c on true"
                " where e.job_id = any (%s) and e.attempt = 2",
                (held,),
            ).fetchall()
            if len(again) == len(held) and all(at is not None for _, at in again):
                return max(at.timestamp() for _, at in again if at is not None) - killed
            time.sleep(0.05)
    raise AssertionError(f"not rescued within 60 s: {held}")


def kills(
    dsn: str, count: int, settings: dict[str, str], most_wait: float, what: str, *, workers_dsn: str | None = None
) -> list[float]:
    """Return the times of this many kills, with one surviving worker."""
    took: list[float] = []
    survivor, theirs = json.dumps({"name": "survivor", **settings}), workers_dsn or dsn
    with Process("serve", theirs, survivor, quiet=True) as other, psycopg.connect(dsn, autocommit=True) as conn:
        for _ in range(count):
            took.append(kill(conn, theirs, settings, most_wait))
        other.go()
        other.answer()
    say(f"  rescue: {what}: {count} kills, p50 {median(took):.2f} s, max {max(took):.2f} s")
    return took


def run() -> None:
    """Print the figures."""
    count, done = max(3, round(20 * SCALE)), max(10_000, int(10_000_000 * SCALE))
    with server() as running, database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select tallybook._lane('default', 2, '')")
        usual = kills(dsn, count, {}, 5.0, "default settings")
        quick = kills(dsn, count, _QUICK, 0.5, "a check every 0.2 s")
        with psycopg.connect(dsn, autocommit=True) as conn:
            fill(conn, done)
        vacuum(dsn)
        behind = kills(dsn, count, _QUICK, 0.5, f"the same behind {done:,} done jobs")
        pooled = _pooled(running, dsn, max(2, round(6 * SCALE)))
    shown = f"{count} kills of a worker with {_HELD // 2} jobs or more, default settings"
    at_most("rescue", "rescue_p50_s", median(usual), "s", 2, shown).show()
    at_most("rescue", "rescue_max_s", max(usual), "s", 6, shown).show()
    shown = f"{median(behind):.2f} s behind {done:,} done jobs, {median(quick):.2f} s without, a check every 0.2 s"
    at_most("rescue", "rescue_ratio_behind_done", median(behind) / median(quick), "ratio", 1.1, shown).show()
    plain("rescue", "rescue_p50_quick_s", median(quick), "s", f"a check every 0.2 s, {count} kills").show()
    if pooled:
        shown = f"{len(pooled)} kills behind PgBouncer, with a lease of {_LEASE:g} s; from the kill, less the lease"
        at_most("rescue", "rescue_pooled_past_lease_s", max(pooled) - _LEASE, "s", 5, shown).show()


def _pooled(running: Server, dsn: str, count: int) -> list[float]:
    if not installed():
        say(f"  rescue: not run behind a pooler, not installed: {PACKAGE}")
        return []
    with Pooler(running.dsn()) as pooler:
        through = pooler.dsn(str(conninfo_to_dict(dsn)["dbname"]))
        return kills(dsn, count, _POOLED, 1.0, "behind PgBouncer", workers_dsn=through)
