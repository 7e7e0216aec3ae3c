"""The server is away for 30 s while a worker is busy: how long after its return until the rate is back to normal.

Once it is stopped in order, and once killed with all its processes. After the kill there is crash recovery, and claims
that were not on disk yet are repeated. There is always work, and nobody restarts or notifies the worker.
"""

from __future__ import annotations

import math
import time

import psycopg

from bench.figures import SCALE, at_most, median, say
from bench.processes import Process
from bench.server import database, load, server, vacuum
from tallybook.embedded import Server

_SLOTS = 20
_MOST_PER_S = _SLOTS / 0.01  # each job takes 10 ms
_BEFORE, _AFTER = 5.0, 15.0
_STEP = 0.1


def back_after(ends: list[float], before: float, returned: float, *, window: float = 1.0) -> float:
    """Return the seconds from `returned` to the first second with 95 % of the rate `before`; inf: there is none."""
    last = max(ends, default=returned) - window
    for turn in range(max(0, int((last - returned) / _STEP)) + 1):
        start = returned + turn * _STEP
        if rate(ends, start, start + window) >= 0.95 * before:
            return start - returned
    return math.inf


def rate(ends: list[float], start: float, end: float) -> float:
    """Return the handlers per second that ended in this time."""
    return sum(start <= at < end for at in ends) / (end - start)


def one(running: Server, how: str, seconds: float) -> tuple[float, float, int]:
    """Run one outage; return the rate before, the seconds until it is back, and the jobs that did not complete."""
    jobs = int(_MOST_PER_S * (_BEFORE + _AFTER))
    with database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            load(conn, jobs, task="rest")
        vacuum(dsn)
        with Process("serve", dsn, f'{{"slots": {_SLOTS}}}') as worker:
            time.sleep(_BEFORE)
            gone = time.time()
            running.stop() if how == "stop" else running.kill()
            time.sleep(seconds)
            running.start()
            returned = time.time()
            left = _wait_until_done(dsn)
            worker.go()
            ends = worker.answer()["ends"]
    before = median([rate(ends, gone - n - 1, gone - n) for n in range(int(_BEFORE) - 2)])
    assert before > 0.2 * _MOST_PER_S, f"only {before:,.0f} jobs/s before the outage: too few to compare"
    return before, back_after(ends, before, returned), left


def _wait_until_done(dsn: str) -> int:
    """Wait until every job has ended, or none has for a while; return how many are left."""
    # Every attempt that has ended has one outcome. The view would give the same number, but keep a core busy.
    open_jobs = """select (select count(*) from tallybook.entry) - (select count(*) from tallybook.outcome)
                        + (select count(*) from tallybook.scheduled)"""
    last, still = -1, 0
    with psycopg.connect(dsn, autocommit=True) as conn:
        while True:
            row = conn.execute(open_jobs).fetchone()
            assert row is not None
            still = still + 1 if row[0] == last else 0
            last = int(row[0])
            if last == 0 or still > 20:
                return last
            time.sleep(1)


def run() -> None:
    """Print the figures."""
    seconds = max(5.0, 30 * SCALE)
    left = 0
    with server() as running:
        for how, figure in (("stop", "back_after_stop_s"), ("kill", "back_after_kill_s")):
            before, back, undone = one(running, how, seconds)
            left += undone
            say(f"  outage: {how}, {before:,.0f}/s before, back after {back:.1f} s")
            at_most("outage", figure, min(back, 9999.0), "s", 10, f"{before:,.0f}/s before, {seconds:g} s away").show()
    at_most("outage", "undone_after_outage", float(left), "jobs", 0, "jobs that never completed").show()
