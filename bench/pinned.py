"""Another session holds an old snapshot for 120 s at 5,000 jobs per second: claims must not slow down."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import psycopg

from bench.figures import SCALE, at_most, percentile, say
from bench.server import args, database, server, start_worker

_RATE = 5000
_BATCH = 100


def _produce(dsn: str, seconds: float, sent: list[int]) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        start = time.perf_counter()
        texts = [args(n) for n in range(_BATCH)]
        for turn in range(int(seconds * _RATE / _BATCH)):
            if (wait := start + turn * _BATCH / _RATE - time.perf_counter()) > 0:
                time.sleep(wait)
            conn.execute(
                "select tallybook.enqueue_many(%s::text[], %s::text[], %s::text[])",
                (["default"] * _BATCH, ["noop"] * _BATCH, texts),
            )
            sent[0] += _BATCH


def run() -> None:
    """Print the figures."""
    seconds = max(10.0, 120 * SCALE)
    times: list[tuple[float, float]] = []
    with (
        server() as running,
        database(running) as dsn,
        psycopg.connect(dsn) as old,
        psycopg.connect(dsn, autocommit=True) as conn,
    ):
        worker = start_worker(conn, ["default"])
        conn.execute("select tallybook.enqueue('default', 'noop')")
        old.execute("set transaction isolation level repeatable read")
        old.execute("select count(*) from tallybook.entry")
        sent = [1]
        producer = threading.Thread(target=_produce, args=(dsn, seconds, sent))
        producer.start()
        start = time.perf_counter()
        done, shown = 0, 0.0
        while producer.is_alive() or done < sent[0]:
            took, jobs = _turn(conn, worker)
            now = time.perf_counter() - start
            if jobs:
                times.append((now, took))
                done += jobs
            else:
                time.sleep(0.002)
            if now - shown > 15:
                shown = now
                p50 = percentile([t for _, t in times[-200:]], 0.5)
                say(f"  pinned: {now:.0f} s, {done:,} jobs, claim p50 {p50:.2f} ms")
            if now > seconds + 60:
                break
        producer.join()
        left = conn.execute(
            "select count(*) from tallybook.entry e where not exists (select from tallybook.outcome o"
            " where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq)"
        ).fetchone()
        old.rollback()
    assert left is not None
    window = min(15.0, seconds / 3)
    first = percentile([took for at, took in times if at <= window], 0.5)
    last = percentile([took for at, took in times if seconds - window <= at <= seconds], 0.5)
    at_most(
        "pinned",
        "claim_p50_last_to_first",
        last / first,
        "ratio",
        1.2,
        f"first {first:.2f} ms, last {last:.2f} ms, {done:,} jobs",
    ).show()
    at_most("pinned", "left_behind", float(left[0]), "jobs", 0, f"{sent[0]:,} sent in {seconds:g} s").show()


def _turn(conn: psycopg.Connection[Any], worker: int) -> tuple[float, int]:
    lease = str(uuid.uuid4())
    before = time.perf_counter()
    row = conn.execute(
        "select jobs from tallybook.claim(%s::int, '{default}', %s::int[], %s::uuid, durable => false)",
        (worker, [_BATCH], lease),
    ).fetchone()
    took = (time.perf_counter() - before) * 1000
    if not row or not row[0]:
        return took, 0
    rows = conn.execute("select job_id, attempt from tallybook.claimed_jobs(%s::uuid)", (lease,)).fetchall()
    conn.execute(
        "select tallybook.complete_many(%s::uuid[], %s::bigint[], %s::int[])",
        ([lease] * len(rows), [r[0] for r in rows], [r[1] for r in rows]),
    )
    return took, len(rows)
