"""A million jobs of one tenant, then one each of 999 others: how many jobs start before the last of these has.

The handlers' own times show it. First all jobs are enqueued before the workers start; then another 999 come while the
workers run the million. The last figure is the cost: one worker drains one tenant's jobs, with and without a key.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from typing import Any

import psycopg

from bench.figures import SCALE, at_most, median, plain, say
from bench.processes import Process, drain
from bench.server import database, server, vacuum
from tallybook.embedded import Server

_OTHERS, _WORKERS = 999, 2
_LOAD = """
select tallybook.enqueue_many(array_fill('default'::text, array[%(n)s]), array_fill(%(task)s::text, array[%(n)s]),
  (select array_agg(format('{"to": "x", "n": %%s}', %(first)s + n)) from generate_series(0, %(n)s - 1) n),
  options => %(options)s)"""


def _load(conn: psycopg.Connection[Any], jobs: int, keys: list[str] | None, *, task: str, first: int = 0) -> None:
    for done in range(0, jobs, 5000):
        n = min(5000, jobs - done)
        options = None if keys is None else [json.dumps({"fair_key": keys[(done + i) % len(keys)]}) for i in range(n)]
        conn.execute(_LOAD, {"n": n, "task": task, "first": first + done, "options": options})


def _rounds(running: Server, jobs: int) -> tuple[int, int, float]:
    """Return the number of starts up to the last other job: present at the start, added later; and its seconds."""
    with database(running) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        _load(conn, jobs, ["big"], task="mark")
        say(f"  fair: {jobs:,} jobs of one tenant are loaded")
        _load(conn, _OTHERS, [f"other {n}" for n in range(_OTHERS)], task="mark", first=jobs)
        vacuum(dsn)
        later = jobs + _OTHERS
        with ExitStack() as stack:
            workers = [stack.enter_context(Process("serve", dsn, '{"slots": 50}')) for _ in range(_WORKERS)]
            _served(conn, "other")
            _load(conn, _OTHERS, [f"later {n}" for n in range(_OTHERS)], task="mark", first=later)
            begin = time.time()
            _served(conn, "later")
            starts: dict[int, float] = {}
            for worker in workers:
                worker.go()
                starts |= {int(n): at for n, at in worker.answer()["starts"].items()}
    last = max(starts[n] for n in range(jobs, later))
    last_later = max(starts[n] for n in range(later, later + _OTHERS))
    first = sum(at <= last for at in starts.values())
    return first, sum(begin <= at <= last_later for at in starts.values()), last_later - begin


def _served(conn: psycopg.Connection[Any], what: str) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        row = conn.execute(
            "select exists (select from tallybook.waiting w where w.fair_key >= %s and w.fair_key < %s)",
            (what, what + "~"),
        ).fetchone()
        if row == (False,):
            time.sleep(0.2)  # the jobs in line start meanwhile
            return
        time.sleep(0.02)
    raise RuntimeError(f"the jobs of {what} were not released within 120 s")


def run() -> None:
    """Print the figures."""
    jobs, drained = max(5_000, int(1_000_000 * SCALE)), max(4_000, int(40_000 * SCALE))
    turns = 3 if SCALE >= 0.5 else 1
    rates: dict[bool, list[float]] = {True: [], False: []}
    with server() as running:
        first, later, seconds = _rounds(running, jobs)
        for _ in range(turns):
            for fair in (True, False):
                with database(running) as dsn:
                    with psycopg.connect(dsn, autocommit=True) as conn:
                        _load(conn, drained, ["one"] if fair else None, task="noop")
                    vacuum(dsn)
                    rates[fair].append(drain(dsn, drained, 1, 100))
    shown = f"{_OTHERS} others behind {jobs:,} jobs of one tenant, {_WORKERS} workers"
    at_most("fair", "claims_until_all_started", float(first), "jobs", 2000, shown).show()
    shown = f"{_OTHERS} more that came while the workers ran these; {seconds:.2f} s"
    at_most("fair", "claims_until_newcomers_started", float(later), "jobs", 2000, shown).show()
    ours, without = median(rates[True]), median(rates[False])
    plain(
        "fair", "fair_jobs_per_s", ours, "jobs/s", f"one tenant, one worker of 100 slots; {without:,.0f} without a key"
    ).show()
