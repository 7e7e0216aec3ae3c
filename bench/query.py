"""A query-driven schedule over 100,000 candidates, 90 % of them queued already: from the fire to its commit.

There are no statistics, as right after an installation. The same run also measures the query alone, sorted; the same
rows written to a bare table with a unique key by INSERT ... SELECT ... ON CONFLICT DO NOTHING; and enqueue, one call
per row, for a part of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from bench.figures import SCALE, at_most, median, plain
from bench.server import database, server

_TABLES = """
create table asset (id bigint primary key, symbol text not null, price_at timestamptz, viewed_at timestamptz);
create table bare (id bigint generated always as identity, key text not null, args jsonb not null);
create unique index on bare (key);
create view stale as
select 'price:' || id as key, jsonb_build_object('asset_id', id, 'symbol', symbol) as args from asset
 where viewed_at > now() - interval '48 h' and (price_at is null or price_at < now() - interval '24 h')"""
_ASSETS = "insert into asset select n, 'S' || n, now() - interval '2 days', now() from generate_series(1, %s) n"
# What enqueue would have written for nine of ten candidates.
_QUEUED = """
with lane as materialized (select * from tallybook._lane('prices', 2, '')),
     job as materialized (select nextval('tallybook.job_id') as id, key, args from stale
                           where (args ->> 'asset_id')::int % 10 <> 0),
     taken as (insert into tallybook.unique_key (task, key, generation, job_id)
               select 'refresh_price', key, 1, id from job),
     bare as (insert into bare (key, args) select key, args from job)
insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, task, args,
                             unique_key)
select job.id, job.id, clock_timestamp(), lane.lane_id, 1, lane.retention, 0, 0, 'refresh_price', job.args, job.key
  from lane, job"""
_PUT = """\
select tallybook.schedule_set(
  'stale', %s, queue => 'prices', cron => '* * * * *', query => 'select key, args from stale')"""
_RUN: LiteralString = "select what, jobs from tallybook.schedule_run('stale')"
_BARE: LiteralString = "insert into bare (key, args) select key, args from stale on conflict do nothing returning key"
_ALONE: LiteralString = "select count(*) from (select * from stale order by key offset 0) s"
_ONE: LiteralString = """\
select count(tallybook.enqueue('prices', 'refresh_price', args, unique_key => key))
  from (select * from stale limit %s) s"""
_TURNS = 3


def _timed(conn: psycopg.Connection[Any], query: LiteralString, *params: object) -> tuple[float, Any]:
    start = time.perf_counter()
    row = conn.execute(query, params).fetchone()
    return time.perf_counter() - start, row


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _private_mib(pid: int) -> float:
    """Return the backend's own memory, without the shared buffers that it has touched."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) / 1024


@contextmanager
def _peak(pid: int, into: dict[str, float]) -> Iterator[None]:
    """Store the peak of additional memory while the block runs, read every 10 ms."""
    before, ended = _private_mib(pid), threading.Event()
    seen = [before]

    def look() -> None:
        while not ended.wait(0.01):
            seen.append(_private_mib(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
    into["memory"] = max(seen) - before


def turn(dsn: str, candidates: int) -> dict[str, float]:
    """Measure once on a fresh database; return the times."""
    took: dict[str, float] = {}
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("alter table tallybook.unique_key set (autovacuum_enabled = off)")
        conn.execute(_TABLES)
        conn.execute(_ASSETS, (candidates,))
        conn.execute(_QUEUED)
        conn.execute(_PUT, ("refresh_price",))
    with psycopg.connect(dsn, autocommit=True) as conn:
        pid = conn.info.backend_pid
        took["bare"], _ = _timed(conn, _BARE)
        took["alone"], _ = _timed(conn, _ALONE)
        before = _cpu(pid)
        with _peak(pid, took):
            took["seconds"], row = _timed(conn, _RUN)
        assert row == ("enqueued", candidates // 10), row
        took["cpu"] = _cpu(pid) - before
        took["none"], row = _timed(conn, _RUN)
        assert row == ("enqueued", 0), row
        part = max(1, candidates // 50)
        took["one"] = _timed(conn, _ONE, part)[0] * candidates / part
        conn.execute(_PUT, ("another",))
        took["all"], row = _timed(conn, _RUN)
        assert row == ("enqueued", candidates), row
    return took


def run() -> None:
    """Print the figures: medians of three databases."""
    candidates = max(1000, round(100_000 * SCALE))
    turns = []
    with server() as running:
        for _ in range(_TURNS):
            with database(running) as dsn:
                turns.append(turn(dsn, candidates))
    took = {name: median([one[name] for one in turns]) for name in turns[0]}
    shown = (
        f"{candidates:,} candidates, {candidates // 10:,} new, {took['cpu']:.2f} s of CPU;"
        f" the query alone {took['alone']:.2f} s, bare INSERT {took['bare']:.2f} s, one by one {took['one']:.1f} s"
    )
    at_most("query", "seconds", took["seconds"], "s", 2, shown).show()
    plain("query", "seconds_none_new", took["none"], "s", "the same once more").show()
    plain("query", "seconds_all_new", took["all"], "s", "for another task, which has no jobs yet").show()
    plain("query", "memory_mib", took["memory"], "MiB", "peak anonymous memory of the backend, less that before").show()
