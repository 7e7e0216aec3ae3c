"""Another session holds an old snapshot for 120 s at 1,000 delayed or retried jobs per second: none may start later.

500 jobs per second are enqueued with a delay of one second. Each fails its first attempt and is retried after a second.
So half of the due jobs are delayed and half are retried. The figure is the time from run_at to the start of the handler
in a worker process.
"""

from __future__ import annotations

import json
import threading
import time

import psycopg

from bench.figures import SCALE, at_most, percentile, plain, say
from bench.processes import Process
from bench.server import database, server

_RATE = 500
_BATCH = 25
_SLOTS = 200
_PUT = """
select tallybook.enqueue_many(
  array_fill('default'::text, array[%(batch)s]), array_fill('again'::text, array[%(batch)s]),
  array(select jsonb_build_object('n', n)::text
          from generate_series(%(first)s::int, %(first)s::int + %(batch)s::int - 1) n),
  run_ats => array_fill(clock_timestamp() + interval '1 s', array[%(batch)s]))"""


def _produce(dsn: str, seconds: float) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        start = time.perf_counter()
        for turn in range(int(seconds * _RATE / _BATCH)):
            if (wait := start + turn * _BATCH / _RATE - time.perf_counter()) > 0:
                time.sleep(wait)
            conn.execute(_PUT, {"batch": _BATCH, "first": 1 + turn * _BATCH})


def run() -> None:
    """Print the figures."""
    seconds = max(10.0, 120 * SCALE)
    window = min(15.0, seconds / 3)
    with (
        server() as running,
        database(running) as dsn,
        psycopg.connect(dsn) as old,
        psycopg.connect(dsn, autocommit=True) as conn,
        Process("serve", dsn, json.dumps({"slots": _SLOTS}), quiet=True) as worker,
    ):
        old.execute("set transaction isolation level repeatable read")
        old.execute("select count(*) from tallybook.scheduled")
        began = time.time()
        producer = threading.Thread(target=_produce, args=(dsn, seconds))
        producer.start()
        producer.join()
        until = time.time() + 60
        while time.time() < until and conn.execute("select exists (select from tallybook.scheduled)").fetchone() == (
            True,
        ):
            time.sleep(0.2)
        time.sleep(1)
        worker.go()
        starts = {int(n): at for n, at in worker.answer()["starts"].items()}
        rows = conn.execute(
            "select case when e.attempt = 1 then 1 else -1 end * (e.args ->> 'n')::int,"
            "  extract(epoch from e.run_at)::float8 from tallybook.entry e where e.task = 'again'"
        ).fetchall()
        dead = conn.execute("select n_dead_tup from pg_stat_user_tables where relname = 'scheduled'").fetchone()
        old.rollback()
    late = [(due - began, (starts[n] - due) * 1000) for n, due in rows if n in starts]
    ended = max(at for at, _ in late)
    first = [ms for at, ms in late if at <= 1 + window]
    last = [ms for at, ms in late if at >= ended - window]
    say(f"  pinned_scheduled: {dead[0] if dead else 0:,} dead rows are left in scheduled")
    for at in range(0, int(ended), int(window)):
        part = [ms for due, ms in late if at <= due < at + window]
        say(f"  pinned_scheduled: from {at} s: p50 {percentile(part, 0.5):.1f} ms, p99 {percentile(part, 0.99):.1f} ms")
    for what, among in (("delayed", [n for n, _ in rows if n > 0]), ("retried", [n for n, _ in rows if n < 0])):
        say(f"  pinned_scheduled: {len(among):,} {what}, {sum(n in starts for n in among):,} of them started")
    begin, end = percentile(first, 0.5), percentile(last, 0.5)
    shown = f"first {begin:.1f} ms, last {end:.1f} ms, {window:g} s each of {seconds:g} s"
    at_most("pinned_scheduled", "late_p50_last_to_first", end / begin, "ratio", 1.2, shown).show()
    shown = f"{len(late):,} attempts, one worker process with {_SLOTS} slots"
    plain("pinned_scheduled", "late_p99_ms_while_pinned", percentile([ms for _, ms in late], 0.99), "ms", shown).show()
    missing = 2 * int(seconds * _RATE / _BATCH) * _BATCH - len(late)
    at_most("pinned_scheduled", "not_started", missing, "attempts", 0, f"{_RATE}/s delayed, each retried once").show()
