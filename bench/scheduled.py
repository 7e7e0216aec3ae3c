"""Ten million jobs scheduled for later: their cost for claims, and how late due jobs start at 2,000 per second.

The claims are timed in turn in two databases of one server, one with the scheduled jobs and one without. The lateness
is that of a real worker process, from run_at to the start of the handler, in the database with the scheduled jobs.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import psycopg

from bench.figures import SCALE, at_most, in_turn, median, percentile, plain, say
from bench.processes import Process
from bench.server import database, load, server, start_worker, vacuum

_RATE = 2000
_SLOTS = 200
_BATCH = 100
_CHUNK = 500_000
_AHEAD = 3.5  # seconds in which the worker starts

# What enqueue with run_at would have written, from an hour to ten days from now.
_LATER = """
insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, task, args)
select nextval('tallybook.job_id'), clock_timestamp() + make_interval(secs => 3600 + random() * 860000),
       clock_timestamp(), l.lane_id, 1, 0, 0, 'noop', jsonb_build_object('to', 'user@example.com', 'n', n)
  from generate_series(1, %s) n, (select lane_id from tallybook.lane where queue = 'default' limit 1) l"""
_DUE = """
insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, task, args)
select nextval('tallybook.job_id'), to_timestamp(%s::float8 + n / %s::float8), clock_timestamp(),
       l.lane_id, 1, 0, 0, 'note', jsonb_build_object('n', n)
  from generate_series(1, %s) n, (select lane_id from tallybook.lane where queue = 'default' limit 1) l"""

_LEFT = "select exists (select from tallybook.scheduled where run_at <= to_timestamp(%s))"


def fill(dsn: str, jobs: int) -> None:
    """Load jobs that are scheduled for later, by plain SQL."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select tallybook._lane('default', 2, '')")
        conn.execute("set synchronous_commit = off")
        for first in range(0, jobs, _CHUNK):
            conn.execute(_LATER, (min(_CHUNK, jobs - first),))
            say(f"  scheduled: {min(first + _CHUNK, jobs):,} jobs are scheduled for later")
    vacuum(dsn)


def _claim(conn: psycopg.Connection[Any], worker: int) -> float:
    before = time.perf_counter()
    row = conn.execute(
        "select jobs from tallybook.claim(%s::int, '{default}', %s::int[], %s::uuid, durable => false)",
        (worker, [_BATCH], uuid.uuid4()),
    ).fetchone()
    took = (time.perf_counter() - before) * 1000
    assert row is not None and row[0] == _BATCH, row
    return took


def claims(with_them: str, without: str, count: int) -> tuple[float, float]:
    """Return the median time of a claim of 100 jobs in ms, with and without the scheduled jobs."""
    with psycopg.connect(with_them, autocommit=True) as one, psycopg.connect(without, autocommit=True) as other:
        conns = (one, other)
        workers = [start_worker(conn, ["default"]) for conn in conns]
        for conn in conns:
            load(conn, (count + 20) * _BATCH)
            conn.execute("analyze")
        took = in_turn(count, lambda: _claim(one, workers[0]), lambda: _claim(other, workers[1]))
        for conn, worker in zip(conns, workers, strict=True):
            conn.execute("select tallybook.worker_stop(%s::int)", (worker,))
            conn.execute("truncate tallybook.entry, tallybook.claim, tallybook.outcome")
    return median(took[0]), median(took[1])


def lateness(dsn: str, seconds: float) -> list[float]:
    """Return how late each job started, in ms, while 2,000 per second fall due for this many seconds."""
    count = int(_RATE * seconds)
    with psycopg.connect(dsn, autocommit=True) as conn:
        start = time.time() + _AHEAD + count / 100_000
        conn.execute(_DUE, (start, _RATE, count))
        with Process("serve", dsn, json.dumps({"slots": _SLOTS})) as worker:
            say(f"  scheduled: the worker was ready {start - time.time():.1f} s before the first is due")
            until = start + seconds + 30
            while time.time() < until and conn.execute(_LEFT, (start + seconds,)).fetchone() == (True,):
                time.sleep(0.5)
            time.sleep(1)
            worker.go()
            starts = {int(n): at for n, at in worker.answer()["starts"].items()}
    assert len(starts) == count, f"{len(starts)} of {count} jobs were started"
    return [(starts[n] - start - n / _RATE) * 1000 for n in range(1, count + 1)]


def run() -> None:
    """Print the figures."""
    jobs, seconds, count = max(10_000, int(10_000_000 * SCALE)), max(3.0, 30 * SCALE), max(40, int(1000 * SCALE))
    with server() as running, database(running) as dsn:
        fill(dsn, jobs)
        with database(running) as without:
            ours, none = claims(dsn, without, count)
        late = lateness(dsn, seconds)
    shown = f"{ours:.2f} ms behind {jobs:,} scheduled jobs, {none:.2f} ms without, {count} claims of {_BATCH} in turn"
    at_most("scheduled", "claim_ratio", ours / none, "ratio", 1.2, shown).show()
    shown = f"{len(late):,} jobs at {_RATE}/s among {jobs:,}, one worker process with {_SLOTS} slots"
    at_most("scheduled", "late_p50_ms", percentile(late, 0.5), "ms", 50, shown).show()
    at_most("scheduled", "late_p99_ms", percentile(late, 0.99), "ms", 250, shown).show()
    plain("scheduled", "late_max_ms", max(late), "ms", f"earliest {min(late):.1f} ms").show()
