"""All counters read every second with 10 million jobs of history and 1 million in line, at 5,000 jobs per second.

Plain SQL loads the history and the line. Then a producer and a real worker run for the time of the measurement. Every
second one session reads all counters and keeps its snapshot open. Afterwards verify recounts in it and must agree.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import psycopg

from bench.figures import SCALE, at_most, median, percentile, plain, say
from bench.processes import Process
from bench.server import args, database, server, vacuum

_HISTORY, _LINE, _RATE, _SECONDS = 10_000_000, 1_000_000, 5_000, 30
_SLOTS = 500
_COUNTS = "select * from tallybook.counts()"
_READS = (_COUNTS, "select * from tallybook.queue_stats")
_STATES = (
    "scheduled",
    "retrying",
    "waiting",
    "available",
    "running",
    "dead",
)  # columns of counts(), behind queue and task
_RECOUNT = """
select l.queue, c.task, c.what, sum(c.n)::bigint
  from tallybook._recounted_open() c join tallybook.lane l on l.lane_id = c.lane_id group by 1, 2, 3"""

# Entries as a worker that drains claims of 500 would have written them, each claim in its own transaction.
_LOAD_ENDED = """\
with jobs as materialized (
  insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, task, args)
  select i, i, clock_timestamp(), %(lane)s, 1, 'd', 0, 0, 'noop', %(args)s::jsonb
    from (select nextval('tallybook.job_id') as i from generate_series(1, %(jobs)s)) s
  returning xid, seq, retention
)
insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state)
select xid, seq, clock_timestamp(), retention, 'completed' from jobs"""
_LOAD_CLAIM = """\
insert into tallybook.claim (id, number, lo, hi, from_xid, from_seq, pos_xid, pos_seq, claimed, claimed_at, lease,
                             lane_id, worker_id, jobs, retention, holes, closed)
select nextval('tallybook.claim_id'), 1, l.born, pg_snapshot_xmax(pg_current_snapshot()), l.born, 0, e.xid, e.seq,
       %(jobs)s, clock_timestamp(), gen_random_uuid(), l.lane_id, null, %(jobs)s, 'd', '{}', '{}'
  from tallybook.lane l, lateral (
         select x.xid, x.seq from tallybook.entry x where x.lane_id = l.lane_id
          order by x.xid desc, x.seq desc limit 1) e
 where l.lane_id = %(lane)s"""


def fill(conn: psycopg.Connection[Any], ended: int, line: int) -> None:
    """Load ended jobs and jobs in line by plain SQL; then recount, as after a move to another cluster."""
    (lane,) = conn.execute("select lane_id from tallybook._lane('default', 2, '')").fetchone() or (0,)
    # The line is in its own queue without a worker, so its length does not change.
    at_once = max(1, min(ended, 500_000))
    for first in range(0, ended, at_once):
        conn.execute(_LOAD_ENDED, {"lane": lane, "jobs": min(at_once, ended - first), "args": args(first)})
    conn.execute(_LOAD_CLAIM, {"lane": lane, "jobs": ended})
    (later,) = conn.execute("select lane_id from tallybook._lane('later', 2, '')").fetchone() or (0,)
    conn.execute(
        "insert into tallybook.entry"
        " (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, task, args)"
        " select i, i, clock_timestamp(), %s, 1, 'd', 0, 0, 'noop', %s::jsonb"
        " from (select nextval('tallybook.job_id') as i from generate_series(1, %s)) s",
        (later, args(0), line),
    )
    say("  counters: loaded; now the recount")
    began = time.perf_counter()
    conn.execute("select tallybook.recount()")
    plain("counters", "recount_s", time.perf_counter() - began, "s", f"{ended + line:,} jobs").show()


class Producer(threading.Thread):
    """Enqueues `rate` jobs per second, in batches of 100, until `ended` is set."""

    def __init__(self, dsn: str, rate: int) -> None:
        super().__init__(daemon=True)
        self._dsn, self._rate = dsn, rate
        self.ended = threading.Event()
        self.sent = 0

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            began = time.perf_counter()
            while not self.ended.is_set():
                texts = [args(n) for n in range(100)]
                conn.execute(
                    "select tallybook.enqueue_many(%s::text[], %s::text[], %s::text[])",
                    (["default"] * 100, ["noop"] * 100, texts),
                )
                self.sent += 100
                self.ended.wait(max(0.0, began + self.sent / self._rate - time.perf_counter()))


def run() -> None:
    """Print the figures."""
    seconds = max(5, int(_SECONDS * min(1.0, SCALE * 10)))
    with server() as running, database(running) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        fill(conn, max(1000, int(_HISTORY * SCALE)), max(1000, int(_LINE * SCALE)))
        vacuum(dsn)
        producer = Producer(dsn, _RATE)
        took: list[float] = []
        seen: list[list[tuple[Any, ...]]] = []
        # Sessions that have read the counters before, like those of a page: the first read of a session makes its
        # plans.
        sessions = [psycopg.connect(dsn, autocommit=True) for _ in range(seconds)]
        for session in sessions:
            for read in _READS:
                session.execute(read).fetchall()
        with Process("serve", dsn, json.dumps({"slots": _SLOTS})) as worker:
            producer.start()
            before = _completed(conn)
            began = time.perf_counter()
            for n in range(seconds):
                time.sleep(max(0.0, began + n + 1 - time.perf_counter()))
                sessions[n].execute("begin isolation level repeatable read")
                for read in _READS:
                    start = time.perf_counter()
                    rows = sessions[n].execute(read).fetchall()
                    took.append((time.perf_counter() - start) * 1000)
                    if read == _COUNTS:
                        seen.append(rows)
            through = (_completed(conn) - before) / (time.perf_counter() - began)
            producer.ended.set()
            producer.join()
            del worker
        say(f"  counters: {seconds} samples; comparing them with recounts of the same snapshots")
        wrong = 0
        for session, read_then in zip(sessions, seen, strict=True):
            counted = {
                (*row[:2], state): n for row in read_then for state, n in zip(_STATES, row[2:8], strict=True) if n
            }
            found = {tuple(row[:3]): row[3] for row in session.execute(_RECOUNT)}
            rows = session.execute("select * from tallybook.verify()").fetchall()
            rows += [(*key, counted.get(key, 0), found.get(key, 0)) for key in counted.keys() | found.keys()
                     if counted.get(key) != found.get(key)]  # fmt: skip
            wrong += bool(rows)
            for row in rows[:3]:
                say(f"  counters: differs: {row}")
            session.close()
        plain("counters", "jobs_per_s", through, "jobs/s", f"{producer.sent:,} jobs enqueued meanwhile").show()
        at_most(
            "counters",
            "read_ms",
            percentile(took, 0.95),
            "ms",
            20,
            f"p50 {median(took):.1f}, max {max(took):.1f} of {len(took)} reads",
        ).show()
        at_most("counters", "wrong_samples", wrong, "samples", 0, f"of {seconds}").show()


def _completed(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("select coalesce(sum(completed), 0) from tallybook.counts()").fetchone()
    assert row is not None
    return int(row[0])
