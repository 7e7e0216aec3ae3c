"""10,000 schedules, 200 of them due at the same instant of each second, four worker processes: each tick once, on time.

The lateness is from the tick to the start of the handler (fired, committed, claimed, started), over all ticks of the
run.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from bench.figures import SCALE, at_most, percentile, plain, say
from bench.processes import Process
from bench.server import database, server

_EACH_SECOND = 200
_WORKERS = 4

_LOAD = """
insert into tallybook.schedule (name, source, task, cron, since, due_at, created_at, changed_at)
select 's' || n, 'database', 'fired', ((%(first)s + n / %(each)s) %% 60)::int || ' * * * * *',
       now(), now(), now(), now()
  from generate_series(0, %(count)s - 1) n"""


_WARM = """
insert into tallybook.schedule (name, source, task, cron, since, due_at, created_at, changed_at)
select 'warm ' || n, 'database', 'fired', %(second)s || ' * * * * *', now(), now(), now(), now()
  from generate_series(1, %(each)s) n"""


def _wait(conn: psycopg.Connection[Any], until: datetime) -> None:
    """Wait by the server's clock, which the ticks follow."""
    row = conn.execute("select extract(epoch from %s - clock_timestamp())::float8", (until,)).fetchone()
    assert row is not None
    time.sleep(max(0.0, row[0]))


def run() -> None:
    """Print the figures."""
    count = max(600, int(10_000 * SCALE) // _EACH_SECOND * _EACH_SECOND)
    groups = count // _EACH_SECOND
    seconds = max(groups, int(60 * SCALE))
    with server() as running, database(running) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        with ExitStack() as stack:
            workers = [stack.enter_context(Process("serve", dsn)) for _ in range(_WORKERS)]
            # Each schedule ticks once a minute; the schedules of one group tick at the same second.
            start = (datetime.now(UTC) + timedelta(seconds=4 + count / 1000)).replace(microsecond=0)
            end = start + timedelta(seconds=seconds)
            conn.execute(_LOAD, {"first": start.second, "each": _EACH_SECOND, "count": count})
            # One uncounted instant of 200 first, so that the workers are warmed up.
            conn.execute(_WARM, {"second": (start - timedelta(seconds=2)).second, "each": _EACH_SECOND})
            conn.execute("analyze tallybook.schedule")
            while conn.execute("select 1 from tallybook.schedule where tick is null limit 1").fetchone():
                time.sleep(0.05)
            left = (start - datetime.now(UTC)).total_seconds()
            say(f"  schedule: {count} schedules planned, {left:.1f} s before the first tick that counts")
            _wait(conn, end + timedelta(seconds=2))
            said: list[list[Any]] = []
            for worker in workers:
                worker.go()
                said += worker.answer()["fires"]
        wanted = Counter(
            (f"s{n}", (start + timedelta(seconds=at)).timestamp())
            for n in range(count)
            for at in range(seconds)
            if (start + timedelta(seconds=at)).second == (start.second + n // _EACH_SECOND) % 60
        )
        ran = Counter(
            (name, tick) for name, tick, _ in said if name[0] == "s" and start.timestamp() <= tick < end.timestamp()
        )
        rows = conn.execute(
            "select schedule, tick, what, fired_at from tallybook.fire"
            " where schedule not like 'warm%%' and tick >= %s and tick < %s",
            (start, end),
        ).fetchall()
    on_record = Counter((row[0], row[1].timestamp()) for row in rows if row[2] == "enqueued")
    wrong = sum(max(abs(wanted[one] - ran[one]), abs(wanted[one] - on_record[one])) for one in wanted | ran | on_record)
    late = [1000 * (at - tick) for name, tick, at in said if (name, tick) in wanted]
    fired = [1000 * (row[3] - row[1]).total_seconds() for row in rows]
    shown = f"{wanted.total():,} ticks of {count:,} schedules, {_EACH_SECOND} at each instant, {_WORKERS} workers"
    at_most("schedule", "fired_wrong", float(wrong), "ticks", 0, shown).show()
    at_most(
        "schedule", "lateness_p99_ms", percentile(late, 0.99), "ms", 250,
        f"to the handler's start: p50 {percentile(late, 0.5):.0f}, max {max(late):.0f} ms",
    ).show()  # fmt: skip
    plain("schedule", "fire_p99_ms", percentile(fired, 0.99), "ms", "the part until a clock had claimed the run").show()
