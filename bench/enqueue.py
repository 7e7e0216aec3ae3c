"""Enqueue beside the bare statements that bound it: INSERT of one row, and COPY into the same indexes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg

from bench.figures import SCALE, at_least, median, plain
from bench.server import args, database, load, server

_BARE = """
create table bare (id bigint generated always as identity, at timestamptz default now(), task text, args jsonb);
create table copied (like tallybook.entry including defaults);
create index on copied (lane_id, xid, seq) with (fillfactor = 100);
create index on copied (job_id) with (fillfactor = 100);
"""


def _rate(seconds: float, work: Callable[[int], int]) -> float:
    start, done, turn = time.perf_counter(), 0, 0
    while (passed := time.perf_counter() - start) < seconds:
        done += work(turn)
        turn += 1
    return done / passed


def run() -> None:
    """Print the figures: medians of interleaved turns."""
    turns, seconds = max(3, round(8 * SCALE)), max(0.5, 1.5 * SCALE)
    with server() as running, database(running) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(_BARE)

        def insert(turn: int) -> int:
            conn.execute("insert into bare (task, args) values (%s, %s::jsonb)", ("noop", args(turn)))
            return 1

        def enqueue(turn: int) -> int:
            conn.execute("select tallybook.enqueue('default', %s, %s::jsonb)", ("noop", args(turn)))
            return 1

        def copy(turn: int) -> int:
            _copy(conn, turn)
            return 1000

        def many(turn: int) -> int:
            load(conn, 1000)
            return 1000

        for work in (insert, enqueue, copy, many):  # warm
            work(0)
        single: list[float] = []
        bulk: list[float] = []
        limits: dict[str, list[float]] = {"insert": [], "enqueue": [], "copy": [], "many": []}
        for _ in range(turns):
            limits["insert"].append(_rate(seconds, insert))
            limits["enqueue"].append(_rate(seconds, enqueue))
            limits["copy"].append(_rate(seconds, copy))
            limits["many"].append(_rate(seconds, many))
            single.append(limits["enqueue"][-1] / limits["insert"][-1])
            bulk.append(limits["many"][-1] / limits["copy"][-1])
        rates = {name: f"{median(values):,.0f}/s" for name, values in limits.items()}
        at_least("enqueue", "single_ratio_to_insert", median(single), "ratio", 0.7, f"INSERT {rates['insert']}").show()
        at_least("enqueue", "bulk_ratio_to_copy", median(bulk), "ratio", 0.4, f"COPY {rates['copy']}").show()
        plain("enqueue", "single_per_s", median(limits["enqueue"]), "jobs/s", "one connection, durable").show()
        plain("enqueue", "bulk_per_s", median(limits["many"]), "jobs/s", "one connection, 1,000 per statement").show()


def _copy(conn: psycopg.Connection[Any], turn: int) -> None:
    columns = "seq, job_id, enqueued_at, lane_id, attempt, failures, crashes, retention, task, args"
    with conn.cursor().copy(f"copy copied ({columns}) from stdin") as to:
        for n in range(turn * 1000, turn * 1000 + 1000):
            to.write_row((n, n, "2026-01-01 00:00:00+00", 1, 1, 0, 0, "d", "noop", args(n)))
