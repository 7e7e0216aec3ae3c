"""The cost of a job from enqueue to done, with history kept: WAL, dead rows, statements and CPU.

Measured twice. First by the verbs alone, in batches of 100 over one connection, where every byte is exact. Then with a
real worker process with 500 slots, whose own CPU and statements count as well.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import psycopg

from bench.cpu import HERE, server_cpu, thread_cpu
from bench.figures import SCALE, at_most, plain
from bench.processes import Process
from bench.server import database, load, server, start_worker, vacuum, wal
from tallybook.embedded import Server

_SLOTS = 500


def drain(conn: psycopg.Connection[Any], worker: int, batch: int) -> int:
    """Claim, read and complete until nothing is left; return the number of jobs."""
    done = 0
    while True:
        lease = str(uuid.uuid4())
        row = conn.execute(
            "select jobs from tallybook.claim(%s::int, '{default}', %s::int[], %s::uuid, durable => false)",
            (worker, [batch], lease),
        ).fetchone()
        if not row or not row[0]:
            return done
        rows = conn.execute(
            "select job_id, attempt, task, args from tallybook.claimed_jobs(%s::uuid)", (lease,)
        ).fetchall()
        ids = [r[0] for r in rows]
        answer = conn.execute(
            "select tallybook.complete_many(%s::uuid[], %s::bigint[], %s::int[])",
            ([lease] * len(ids), ids, [r[1] for r in rows]),
        ).fetchone()
        assert answer == ([],)
        done += len(rows)


def statements(conn: psycopg.Connection[Any]) -> int:
    """Return the transactions of this database so far; here every statement is one."""
    conn.execute("select pg_stat_force_next_flush()")
    row = conn.execute("select xact_commit from pg_stat_database where datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


def storage(conn: psycopg.Connection[Any]) -> int:
    """Return the bytes of all tables of Tallybook, with their indexes, without the args of the jobs."""
    row = conn.execute("""
    select sum(pg_total_relation_size(oid)) - (select sum(pg_column_size(args)) from tallybook.entry)
      from pg_class where relnamespace = 'tallybook'::regnamespace and relkind = 'r'""").fetchone()
    assert row is not None
    return int(row[0])


def _no_vacuum(conn: psycopg.Connection[Any]) -> None:
    """Turn autovacuum off, so that dead rows can be counted and vacuum's CPU does not count as a job's."""
    for table in ("entry", "claim", "outcome"):
        conn.execute(f"alter table tallybook.{table}_default_1 set (autovacuum_enabled = off)")


def by_verbs(running: Server, jobs: int) -> None:
    """Measure one connection that claims and completes in batches of 100."""
    with database(running) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("set synchronous_commit = off")  # bytes are measured here, not time
        _no_vacuum(conn)
        worker = start_worker(conn, ["default"])
        load(conn, 1000, batch=100)
        drain(conn, worker, 100)  # the first changes write full pages, which are not a job's cost
        pid = conn.info.backend_pid
        cpu = thread_cpu(pid) if HERE else 0.0
        said = statements(conn)
        stored = storage(conn)
        at = wal(conn)
        load(conn, jobs, batch=100)
        between = wal(conn)
        assert drain(conn, worker, 100) == jobs
        end = wal(conn)
        used = (thread_cpu(pid) - cpu) / jobs * 1e6 if HERE else None
        conn.execute("select pg_stat_force_next_flush()")
        dead = conn.execute(
            "select coalesce(sum(n_dead_tup), 0)::int from pg_stat_user_tables where schemaname = 'tallybook'"
            " and relname ~ '^(entry|claim|outcome|scheduled|dead|unique_key|tombstone)'"
        ).fetchone()
        assert dead is not None
        parts = f"enqueue {(between - at) / jobs:.0f} B, claim and complete {(end - between) / jobs:.0f} B"
        at_most("cost", "wal_bytes_per_job", (end - at) / jobs, "B", 500, parts).show()
        at_most("cost", "dead_tuples_per_job", dead[0] / jobs, "rows", 0, f"{jobs} jobs, autovacuum off").show()
        kept = (storage(conn) - stored) / jobs
        at_most("cost", "storage_bytes_per_job", kept, "B", 250, "tables and indexes, without the args").show()
        plain("cost", "statements_per_job", (statements(conn) - said) / jobs, "statements", "batches of 100").show()
        plain("cost", "server_cpu_per_job", used, "us", f"one backend, {os.cpu_count()} cores").show()


def by_worker(running: Server, jobs: int) -> None:
    """Measure one worker process of the product, from the start of its claims to its end."""
    with database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            _no_vacuum(conn)
            load(conn, jobs)
        vacuum(dsn)
        assert running.pid is not None
        with psycopg.connect(dsn, autocommit=True) as conn:
            said = statements(conn)
            with Process("drain", dsn, str(_SLOTS)) as worker:
                cpu = server_cpu(running.pid) if HERE else 0.0
                worker.go()
                answer = worker.answer()
            assert answer["completed"] == jobs, answer
            _alone(conn)  # its sessions report their statements and CPU when they end
            used = (server_cpu(running.pid) - cpu) / jobs * 1e6 if HERE else None
            told = (statements(conn) - said) / jobs
    shown = f"{jobs} no-op jobs, {_SLOTS} slots"
    plain("cost", "worker_cpu_per_job", answer["cpu_s"] / jobs * 1e6, "us", f"the worker's process, {shown}").show()
    plain("cost", "worker_server_cpu_per_job", used, "us", "all server processes meanwhile").show()
    plain("cost", "worker_statements_per_job", told, "statements", f"transactions, including the start, {shown}").show()


def _alone(conn: psycopg.Connection[Any]) -> None:
    others = "select from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    until = time.monotonic() + 10
    while conn.execute(others).fetchall() and time.monotonic() < until:
        time.sleep(0.02)


def run() -> None:
    """Print the figures."""
    jobs = max(1000, int(20_000 * SCALE))
    with server() as running:
        by_verbs(running, jobs)
        by_worker(running, jobs)
