"""100,000 jobs over 100 keys of 20 per second each, four worker processes: whether a window has too many, and the
waste.

All jobs are enqueued at the start, so each key is at its limit all the time. The handlers' start times are checked.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import psycopg

from bench.figures import SCALE, at_least, at_most, percentile, plain, say
from bench.processes import Process
from bench.server import database, server

_KEYS, _CALLS, _WORKERS = 100, 20, 4
_LOAD = """
select cardinality(job_ids) from tallybook.enqueue_many(
  array_fill('default'::text, array[%(jobs)s]), array_fill('note'::text, array[%(jobs)s]),
  (select array_agg(format('{"n": %%s}', n) order by n) from generate_series(0, %(jobs)s - 1) n),
  options => (select array_agg(format('{"limits": ["api:%%s"]}', n %% %(keys)s) order by n)
                from generate_series(0, %(jobs)s - 1) n))"""


def run() -> None:
    """Print the figures."""
    each = max(60, int(1_000 * SCALE))
    jobs = each * _KEYS
    with server() as running, database(running) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select tallybook.rate_limit_set('api', %s, '1 second')", (_CALLS,))
        conn.execute(_LOAD, {"jobs": jobs, "keys": _KEYS})
        with ExitStack() as stack:
            workers = [stack.enter_context(Process("serve", dsn, '{"slots": 100}')) for _ in range(_WORKERS)]
            until, left, shown = time.monotonic() + 60 + 3 * each / _CALLS, jobs, 0.0
            while left and time.monotonic() < until:
                time.sleep(0.5)
                left = jobs - _done(conn)
                if time.monotonic() - shown > 10:
                    shown = time.monotonic()
                    say(f"  limit: {jobs - left:,} of {jobs:,} jobs have completed")
            said: dict[int, float] = {}
            for worker in workers:
                worker.go()
                said |= {int(n): at for n, at in worker.answer()["starts"].items()}
        called = conn.execute("select count(*) from tallybook.rate_call").fetchone()
    starts: dict[int, list[float]] = defaultdict(list)
    for n, at in said.items():
        starts[n % _KEYS].append(at)
    exceeded, gaps, used = 0, [], []
    for of_key in starts.values():
        of_key.sort()
        exceeded += sum(later - first < 1.0 for first, later in zip(of_key, of_key[_CALLS:], strict=False))
        gaps += [later - first for first, later in pairwise(of_key)]
        used.append((len(of_key) - 1) / _CALLS / (of_key[-1] - of_key[0]))
    assert called is not None
    shown_as = f"{len(said):,} starts of {jobs:,} jobs, {_KEYS} keys of {_CALLS}/s, {_WORKERS} workers"
    at_most("limit", "windows_exceeded", float(exceeded + jobs - len(said)), "windows", 0, shown_as).show()
    at_least("limit", "rate_used", sum(used) / len(used), "of the rate", 0.95, f"least {min(used):.3f}").show()
    plain("limit", "gap_p1_ms", 1000 * percentile(gaps, 0.01), "ms", f"p99 {1000 * percentile(gaps, 0.99):.0f}").show()
    plain(
        "limit", "calls_wasted", (called[0] - len(said)) / jobs, "of the jobs", "turns that a late start gave up"
    ).show()


def _done(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("select count(*) from tallybook.outcome where state = 'completed'").fetchone()
    assert row is not None
    return int(row[0])
