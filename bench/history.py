"""The cost of history: claims with ten million ended jobs behind them against none, and beside the drop of a range.

Plain SQL loads the jobs, with the transaction ids that the ranges need. One range of ended jobs is past its retention
(half of all), and the rest is in younger ranges. A claimer runs all the time in its own session.
"""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import psycopg

from bench.figures import SCALE, at_most, in_turn, median, percentile, plain, say
from bench.server import database, load, server, start_worker, vacuum

_PARENTS = "array['tallybook.entry_default', 'tallybook.claim_default', 'tallybook.outcome_default']::regclass[]"
_LARGE = max(20_000, int(1_000_000 * SCALE))
_JOBS = max(20_000, int(10_000_000 * SCALE))
_CLAIMS = max(200, int(2000 * SCALE))
_BATCH = 100
_CHUNK = 500_000

# A claim of a hundred is one row; each hundred has its own transaction id.
_ENTRIES = """
insert into tallybook.entry (xid, seq, job_id, enqueued_at, lane_id, attempt, failures, crashes, retention, task, args)
select (%(xid)s + n / 100)::text::xid8, n, n, %(at)s, l.lane_id, 1, 0, 0, l.retention, 'noop',
       jsonb_build_object('to', 'user@example.com', 'n', n)
  from generate_series(%(first)s::bigint, %(last)s::bigint) n, tallybook._lane('default', 2, '') l"""
_OUTCOMES = """
insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state)
select (%(xid)s + n / 100)::text::xid8, n, %(at)s, l.retention, 'completed'
  from generate_series(%(first)s::bigint, %(last)s::bigint) n, tallybook._lane('default', 2, '') l"""
_CLAIMED = """
insert into tallybook.claim (xid, id, number, lo, hi, from_xid, from_seq, pos_xid, pos_seq, claimed, claimed_at,
                             lease, lane_id, worker_id, jobs, retention, holes, closed)
select x.x, nextval('tallybook.claim_id'), n, x.x, x.y, x.x, 0, x.x, n * 100 + 99, n * 100, %(at)s,
       gen_random_uuid(), l.lane_id, 0, 100, l.retention, '{}', '{}'
  from generate_series(%(first)s::bigint / 100, %(last)s::bigint / 100) n, tallybook._lane('default', 2, '') l,
       lateral (select (%(xid)s + n)::text::xid8 as x, (%(xid)s + n + 1)::text::xid8 as y) x"""


def _one(conn: psycopg.Connection[Any], query: str, *params: object) -> Any:
    row = conn.execute(query, params).fetchone()  # type: ignore[arg-type]
    assert row is not None
    return row[0]


def claim(conn: psycopg.Connection[Any], worker: int) -> float:
    """Claim a hundred jobs once, as a worker does; return the milliseconds. The jobs complete afterwards."""
    lease = uuid.uuid4()
    begin = time.perf_counter()
    row = conn.execute(
        "select claim_id, jobs from tallybook.claim(%s::int, '{default}', %s::int[], %s, false)",
        (worker, [_BATCH], lease),
    ).fetchone()
    took = 1000 * (time.perf_counter() - begin)
    assert row is not None and row[1], "there are jobs"
    conn.execute(
        "select tallybook.complete_many(array_agg(%s::uuid), array_agg(l.job_id), array_agg(l.attempt))"
        " from tallybook.claimed_jobs(%s) l",
        (lease, lease),
    )
    return took


def claims(with_them: str, without: str, count: int) -> list[list[float]]:
    """Time this many claims of existing jobs with and without history, in turn."""
    with psycopg.connect(with_them, autocommit=True) as one, psycopg.connect(without, autocommit=True) as other:
        workers = [start_worker(conn, ["default"]) for conn in (one, other)]
        for conn in (one, other):
            load(conn, (count + 20) * _BATCH)
        return in_turn(count, lambda: claim(one, workers[0]), lambda: claim(other, workers[1]))


def advance(conn: psycopg.Connection[Any], to: int) -> None:
    """Use up transaction ids up to this one."""
    conn.execute(
        "do $$ begin while pg_snapshot_xmax(pg_current_snapshot())::text::bigint <= "
        + str(to)
        + " loop perform pg_current_xact_id(); commit; end loop; end $$"
    )


def ended(conn: psycopg.Connection[Any], xid: int, begin: int, end: int, ago: str) -> None:
    """Load ended jobs with these ids, a hundred per transaction id."""
    conn.execute("set synchronous_commit = off")
    for first in range(begin, end, _CHUNK):
        values = {"first": first, "last": min(first + _CHUNK, end) - 1, "xid": xid}
        values["at"] = _one(conn, "select clock_timestamp() - %s::interval", ago)
        for query in (_ENTRIES, _CLAIMED, _OUTCOMES):
            conn.execute(query, values)  # type: ignore[arg-type]
        say(f"  history: {values['last'] + 1:,} ended jobs are loaded")


def fill(conn: psycopg.Connection[Any]) -> int:
    """Load two ranges of ended jobs, ten days and one day old, before the current one; return where the first ends."""
    half = _JOBS // 2
    start = _one(conn, "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint") + 50
    first_end, second_end = start + half // 100 + 1, start + 2 * (half // 100 + 1) + 1
    assert _one(conn, f"select tallybook._range_split({_PARENTS}, 0, {second_end + 5})")
    assert _one(conn, f"select tallybook._range_split({_PARENTS}, 0, {first_end})")
    ended(conn, start, 0, half, "10 days")
    ended(conn, start + 1, half, 2 * half, "1 day")
    conn.execute("select setval('tallybook.job_id', %s)", (_JOBS + 1,))
    advance(conn, second_end + 10)
    return first_end


class Claimer(threading.Thread):
    """Claims hundreds of jobs and completes them, until stopped."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self.dsn, self.took, self.on = dsn, list[float](), True

    def run(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            worker = start_worker(conn, ["default"])
            while self.on:
                load(conn, _BATCH)
                self.took.append(claim(conn, worker))


def drop(dsn: str) -> tuple[float, list[float], int, float]:
    """Prune until the old range is dropped, beside a claimer; return the drop's seconds, the claims, the rows, the
    sum.
    """
    claimer = Claimer(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        claimer.start()
        while len(claimer.took) < 30:
            time.sleep(0.01)
        first = len(claimer.took)
        began = time.perf_counter()
        while True:
            begin = time.perf_counter()
            effect = _one(conn, "select effect from tallybook.prune()")
            took = time.perf_counter() - begin
            if effect:
                break
            assert time.perf_counter() - began < 600, "it does not go"
            time.sleep(0.02)
        whole = time.perf_counter() - began
        while len(claimer.took) < first + 200:
            time.sleep(0.01)
        claimer.on = False
        claimer.join()
    return took, claimer.took[first:], effect, whole


class Producer(threading.Thread):
    """Enqueues one job after another, each in its own transaction, until stopped."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self.dsn, self.took, self.on = dsn, list[float](), True

    def run(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            while self.on:
                begin = time.perf_counter()
                conn.execute("select tallybook.enqueue('other', 'noop')")
                self.took.append(1000 * (time.perf_counter() - begin))


def cut(dsn: str) -> tuple[list[float], list[float], list[float], float]:
    """Cut a range with a million ended jobs, beside a producer and a claimer.

    Returns the times of both meanwhile, the times of the steps, and the longest enqueue before.
    """
    producer, claimer = Producer(dsn), Claimer(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        start = _one(conn, "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint") + 50
        ended(conn, start, 0, _LARGE, "1 day")
        conn.execute("select setval('tallybook.job_id', %s)", (_LARGE + 1,))
        advance(conn, start + _LARGE // 100 + 10)
        vacuum(dsn)
        steps = list[float]()
        for thread in (producer, claimer):
            thread.start()
        while len(claimer.took) < 30:
            time.sleep(0.01)
        first = len(producer.took), len(claimer.took)
        ranges = "select count(*) from tallybook._ranges('tallybook.entry_default')"
        before = _one(conn, ranges)
        while _one(conn, ranges) == before:
            assert len(steps) < 1000, "it is not cut"
            begin = time.perf_counter()
            _one(conn, f"select tallybook._range_split({_PARENTS}, 0)")
            steps.append(1000 * (time.perf_counter() - begin))
        time.sleep(0.05)
        for thread in (producer, claimer):
            thread.on = False
            thread.join()
    return producer.took[first[0] :], claimer.took[first[1] :], steps, max(producer.took[1 : first[0]])


def run() -> None:
    """Print the figures."""
    with server() as running:
        with database(running) as dsn:
            with psycopg.connect(dsn, autocommit=True) as conn:
                fill(conn)
                conn.execute("select tallybook.fold()")  # the counters must be folded first
            vacuum(dsn)
            with database(running) as empty:
                behind, none = claims(dsn, empty, _CLAIMS)
            took, beside, gone, whole = drop(dsn)
        with database(running) as dsn:
            put, claimed, steps, before = cut(dsn)
    shown = (
        f"p50 {median(behind):.2f} ms behind {_JOBS:,} ended jobs, {median(none):.2f} ms behind none,"
        f" batches of {_BATCH}"
    )
    at_most("history", "claim_ratio", median(behind) / median(none), "ratio", 1.2, shown).show()
    at_most("history", "drop_s", took, "s", 1, f"the run that dropped a range of {gone:,} ended jobs").show()
    shown = f"max {max(beside):.1f} ms, {len(beside)} claims while the range is counted and dropped"
    at_most("history", "claim_p99_ms", percentile(beside, 0.99), "ms", 20, shown).show()
    plain("history", "count_s", whole, "s", "all runs from the first piece on").show()
    shown = f"of {len(put)} while a range with {_LARGE:,} ended jobs is cut; median {median(put):.2f} ms"
    at_most("history", "cut_enqueue_ms", max(put), "ms", 20, f"{shown}, max {before:.1f} before").show()
    shown = f"of {len(claimed)}, median {median(claimed):.2f} ms; {len(steps)} steps, the longest {max(steps):.0f} ms"
    at_most("history", "cut_claim_ms", max(claimed), "ms", 20, shown).show()
