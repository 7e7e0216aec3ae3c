"""What a job costs the server from enqueue to done: WAL, dead rows, statements and CPU; batches of 100, history kept."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import psycopg

from bench.figures import SCALE, at_most, plain
from bench.server import database, load, server, start_worker, wal


def drain(conn: psycopg.Connection[Any], worker: int, batch: int) -> int:
    """Claim, read and complete until nothing is left; how many."""
    done = 0
    while True:
        lease = str(uuid.uuid4())
        row = conn.execute(
            "select jobs from tallybook.claim(%s::int, '{default}', %s::int[], %s::uuid, durable => false)",
            (worker, [batch], lease),
        ).fetchone()
        if not row or not row[0]:
            return done
        rows = conn.execute("select job_id, attempt, task, args from tallybook.leased(%s::uuid)", (lease,)).fetchall()
        ids = [r[0] for r in rows]
        answer = conn.execute(
            "select tallybook.complete_many(%s::uuid[], %s::bigint[], %s::int[])",
            ([lease] * len(ids), ids, [r[1] for r in rows]),
        ).fetchone()
        assert answer == ([],)
        done += len(rows)


def cpu_us(pid: int) -> float | None:
    """CPU time of one backend so far, in microseconds; None where there is no /proc."""
    path = Path(f"/proc/{pid}/schedstat")
    return int(path.read_text().split()[0]) / 1000 if path.exists() else None


def statements(conn: psycopg.Connection[Any]) -> int:
    """Transactions of this database so far; here every statement is one."""
    conn.execute("select pg_stat_force_next_flush()")
    row = conn.execute("select xact_commit from pg_stat_database where datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


def run() -> None:
    """Print the figures."""
    jobs = max(1000, int(20_000 * SCALE))
    with server() as running, database(running) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("set synchronous_commit = off")  # counts bytes, not time
        for table in ("entry", "claim", "outcome"):  # no vacuum in between: what is dead stays to be counted
            conn.execute(f"alter table tallybook.{table}_default_1 set (autovacuum_enabled = off)")
        worker = start_worker(conn, ["default"])
        load(conn, 1000, batch=100)
        drain(conn, worker, 100)  # first touches write full pages; they are no cost of a job
        pid = conn.info.backend_pid
        cpu = cpu_us(pid)
        said = statements(conn)
        at = wal(conn)
        load(conn, jobs, batch=100)
        between = wal(conn)
        assert drain(conn, worker, 100) == jobs
        end = wal(conn)
        after = cpu_us(pid)
        conn.execute("select pg_stat_force_next_flush()")
        dead = conn.execute(
            "select coalesce(sum(n_dead_tup), 0)::int from pg_stat_user_tables where schemaname = 'tallybook'"
            " and relname ~ '^(entry|claim|outcome|scheduled|dead|unique_key|tombstone)'"
        ).fetchone()
        assert dead is not None
        parts = f"enqueue {(between - at) / jobs:.0f} B, claim and complete {(end - between) / jobs:.0f} B"
        at_most("cost", "wal_bytes_per_job", (end - at) / jobs, "B", 500, parts).show()
        at_most("cost", "dead_tuples_per_job", dead[0] / jobs, "rows", 0, f"{jobs} jobs, autovacuum off").show()
        plain("cost", "statements_per_job", (statements(conn) - said) / jobs, "statements", "batches of 100").show()
        used = None if cpu is None or after is None else (after - cpu) / jobs
        plain("cost", "server_cpu_per_job", used, "us", f"one backend, {os.cpu_count()} cores").show()
