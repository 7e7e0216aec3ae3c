"""A concurrency limit of 10 on one key with 50,000 jobs: no eleventh job runs, and waiting jobs do not slow others
down.

First the claims of 100 other jobs are timed, in turn, in two databases of one server. In one of them, 50,000 jobs wait
for a permit. Then the workers run a part of these jobs. The handlers' own times show how many ran at one moment.
"""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack
from typing import Any

import psycopg

from bench.figures import SCALE, at_least, at_most, say
from bench.processes import Process
from bench.scheduled import claims
from bench.server import database, server, start_worker

_MOST, _WORKERS = 10, 4
_LOAD = """
select tallybook.enqueue_many(array_fill(%(queue)s::text, array[%(jobs)s]), array_fill('spell'::text, array[%(jobs)s]),
  (select array_agg(format('{"n": %%s}', n)) from generate_series(1, %(jobs)s) n),
  options => array_fill('{"limits": ["one"]}'::text, array[%(jobs)s]))"""


def _put_aside(conn: psycopg.Connection[Any], jobs: int) -> None:
    """Enqueue jobs that wait for a permit; a worker puts them aside as they come, and keeps those that get one."""
    worker = start_worker(conn, ["held"])
    for first in range(0, jobs, 1000):
        conn.execute(_LOAD, {"queue": "held", "jobs": min(1000, jobs - first)})
        while True:
            lease = uuid.uuid4()
            row = conn.execute(
                "select jobs from tallybook.claim(%s::int, '{held}', '{100}', %s::uuid, durable => false)",
                (worker, lease),
            ).fetchone()
            if not row or not row[0]:
                break
            conn.execute(
                "select count(*) from tallybook.claimed_jobs(%s::uuid) l"
                " where exists (select from tallybook.limit_take(array[%s::uuid], array[l.job_id], array[l.attempt]))",
                (lease, lease),
            )
        if first % 10_000 == 0:
            say(f"  concurrency: {first + 1000:,} jobs are loaded")


def run() -> None:
    """Print the figures."""
    jobs, count, run_jobs = max(1_000, int(50_000 * SCALE)), max(40, int(1000 * SCALE)), max(400, int(10_000 * SCALE))
    with server() as running:
        with database(running) as dsn, database(running) as without, psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select tallybook.concurrency_limit_set('one', %s)", (_MOST,))
            _put_aside(conn, jobs)
            waiting = conn.execute("select count(*) from tallybook.waiting").fetchone()
            ours, none = claims(dsn, without, count)
        with database(running) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select tallybook.concurrency_limit_set('one', %s)", (_MOST,))
            conn.execute(_LOAD, {"queue": "default", "jobs": run_jobs})
            begin = time.monotonic()
            with ExitStack() as stack:
                workers = [stack.enter_context(Process("serve", dsn, '{"slots": 50}')) for _ in range(_WORKERS)]
                while time.monotonic() - begin < 60 + run_jobs / 100 and _open(conn):
                    time.sleep(0.2)
                took = time.monotonic() - begin
                spells: list[list[float]] = []
                for worker in workers:
                    worker.go()
                    spells += worker.answer()["spells"]
    assert waiting is not None
    steps = sorted([(begun, 1) for begun, _ in spells] + [(ended, -1) for _, ended in spells])
    now = most = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    over = float(max(0, most - _MOST) + run_jobs - len(spells))
    at_most(
        "concurrency", "over_limit", over, "jobs", 0, f"at most {most} at once of {len(spells):,}, {_WORKERS} workers"
    ).show()
    shown = f"{ours:.2f} ms beside {waiting[0]:,} waiting jobs, {none:.2f} ms without, {count} claims of 100 in turn"
    at_most("concurrency", "claim_ratio_beside_waiting", ours / none, "ratio", 1.2, shown).show()
    at_least(
        "concurrency",
        "permits_used",
        len(spells) * 0.01 / took / _MOST,
        "of the permits",
        0.8,
        "10 ms each; includes the workers' start",
    ).show()


def _open(conn: psycopg.Connection[Any]) -> bool:
    row = conn.execute(
        "select (select count(*) from tallybook.outcome where state = 'completed')"
        " < (select count(distinct job_id) from tallybook.entry)"
        " or exists (select from tallybook.waiting)"
    ).fetchone()
    assert row is not None
    return bool(row[0])
