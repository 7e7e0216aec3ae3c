"""48 connections that claim, one job at a time and ten at a time; beside a status column with SKIP LOCKED."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import psycopg

from bench.figures import SCALE, at_least, median, say
from bench.server import args, database, load, server, start_worker, vacuum
from tallybook.embedded import Server

_CONNECTIONS = 48
_TABLE = """
create table job (id bigint generated always as identity primary key, status text not null default 'ready',
  priority smallint not null default 2, task text not null, args jsonb not null, worker text, claimed_at timestamptz);
create index on job (priority, id) where status = 'ready';
"""
_SKIP_LOCKED = """
update job set status = 'running', worker = 'w', claimed_at = now() where id in (
  select id from job where status = 'ready' order by priority, id limit %s for update skip locked)
returning id, task, args
"""


def _race(dsn: str, seconds: float, work: Callable[[psycopg.Connection[Any], int], int]) -> float:
    """Jobs a second that all connections together take."""
    counts = [0] * _CONNECTIONS
    ready = threading.Barrier(_CONNECTIONS + 1)
    over = threading.Event()

    def claimer(number: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            ready.wait()
            while not over.is_set():
                counts[number] += work(conn, number)

    threads = [threading.Thread(target=claimer, args=(n,)) for n in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    over.wait(seconds)
    over.set()
    passed = time.perf_counter() - start
    for thread in threads:
        thread.join()
    return sum(counts) / passed


def ours(running: Server, batch: int, seconds: float, jobs: int) -> float:
    """Tallybook: claim, then read what was claimed."""
    with database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            workers = [start_worker(conn, ["default"]) for _ in range(_CONNECTIONS)]
            load(conn, jobs)
        vacuum(dsn)

        def claim(conn: psycopg.Connection[Any], number: int) -> int:
            lease = str(uuid.uuid4())
            conn.execute(
                "select jobs from tallybook.claim(%s::int, '{default}', %s::int[], %s::uuid, durable => false)",
                (workers[number], [batch], lease),
            )
            return len(
                conn.execute("select job_id, attempt, task, args from tallybook.leased(%s::uuid)", (lease,)).fetchall()
            )

        return _race(dsn, seconds, claim)


def status_column(running: Server, batch: int, seconds: float, jobs: int) -> float:
    """The usual table."""
    with database(running, tallybook=False) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(_TABLE)
            with conn.cursor().copy("copy job (task, args) from stdin") as to:
                for n in range(jobs):
                    to.write_row(("noop", args(n)))
        vacuum(dsn)
        return _race(dsn, seconds, lambda conn, _: len(conn.execute(_SKIP_LOCKED, (batch,)).fetchall()))


def run() -> None:
    """Print the figures: medians of interleaved runs."""
    seconds, turns = max(2.0, 8 * SCALE), 3 if SCALE >= 0.5 else 1
    with server() as running:
        for batch, figure, target in ((1, "ratio_one_at_a_time", 0.8), (10, "ratio_ten_at_a_time", 1.0)):
            jobs = int(40_000 * seconds) if batch > 1 else int(10_000 * seconds)
            mine, theirs = [], []
            for _ in range(turns):
                mine.append(ours(running, batch, seconds, jobs))
                theirs.append(status_column(running, batch, seconds, jobs))
                say(f"  claimers: {batch} at a time: ledger {mine[-1]:,.0f}/s, status column {theirs[-1]:,.0f}/s")
            ratio = median([a / b for a, b in zip(mine, theirs, strict=True)])
            shown = f"status column with SKIP LOCKED {median(theirs):,.0f} jobs/s, ours {median(mine):,.0f}"
            at_least("claimers", figure, ratio, "ratio", target, shown).show()
