"""48 connections that claim, one job and ten jobs per claim; beside a status column with SKIP LOCKED.

pgbench runs both, prepared, one transaction after the other: a Python client would be the bottleneck. Its sessions
claim for a while before the clock starts, since real claimers live long and have cached plans.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bench.figures import SCALE, at_least, median, say
from bench.server import args, database, load, server, start_worker, vacuum
from tallybook.embedded import Server, binaries

_CONNECTIONS = 48
_WARM = 2
_TABLE = """
create table job (id bigint generated always as identity primary key, status text not null default 'ready',
  priority smallint not null default 2, task text not null, args jsonb not null, worker text, claimed_at timestamptz);
create index on job (priority, id) where status = 'ready';
"""
# Two statements in one round trip, as a worker sends them; both use the same random lease.
_OURS = r"""
\set a random(1, 9000000000000000000)
\set b random(1, 9000000000000000000)
\startpipeline
select jobs from tallybook.claim(:first::int + :client_id::int, '{default}', array[:batch]::int[],
  md5(:a::text || ':' || :b::text)::uuid, durable => false);
select job_id, attempt, task, args from tallybook.claimed_jobs(md5(:a::text || ':' || :b::text)::uuid);
\endpipeline
"""
_SKIP_LOCKED = """
update job set status = 'running', worker = 'w', claimed_at = now() where id in (
  select id from job where status = 'ready' order by priority, id limit :batch for update skip locked)
returning id, task, args;
"""


def _race(dsn: str, seconds: int, script: str, count: str, **variables: int) -> float:
    """Return the jobs per second that all connections together take, as counted in the database."""
    known = conninfo_to_dict(dsn)
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file, psycopg.connect(dsn, autocommit=True) as conn:
        file.write(script)
        file.flush()

        def taken() -> int:
            row = conn.execute(count.encode()).fetchone()
            assert row is not None
            return int(row[0])

        command = [str(Path(binaries(18)) / "pgbench"), "-n", "-M", "prepared", "-f", file.name]
        command += ["-c", str(_CONNECTIONS), "-j", "2", "-T", str(_WARM + seconds)]
        command += [f"-D{name}={value}" for name, value in variables.items()]
        command += ["-h", str(known["host"]), "-p", str(known.get("port", 5432)), "-U", str(known["user"])]
        with subprocess.Popen([*command, str(known["dbname"])], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as race:
            try:
                race.wait(timeout=_WARM)
            except subprocess.TimeoutExpired:
                before = taken()
            else:
                before = 0
            out, err = race.communicate()
            if race.returncode:
                raise RuntimeError(f"pgbench failed: {err.decode()[-2000:]}")
        left = "number of failed transactions: 0 " in out.decode()
        assert left, out.decode()
        return (taken() - before) / seconds


def ours(running: Server, batch: int, seconds: int, jobs: int) -> float:
    """Measure Tallybook: claim, then read the claimed jobs."""
    with database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            workers = [start_worker(conn, ["default"]) for _ in range(_CONNECTIONS)]
            load(conn, jobs)
        vacuum(dsn)
        count = "select coalesce(sum(c.jobs), 0) from tallybook.claim c"
        return _race(dsn, seconds, _OURS, count, batch=batch, first=workers[0])


def status_column(running: Server, batch: int, seconds: int, jobs: int) -> float:
    """Measure the usual table."""
    with database(running, tallybook=False) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(_TABLE)
            with conn.cursor().copy("copy job (task, args) from stdin") as to:
                for n in range(jobs):
                    to.write_row(("noop", args(n)))
        vacuum(dsn)
        return _race(dsn, seconds, _SKIP_LOCKED, "select count(*) from job where status = 'running'", batch=batch)


def run() -> None:
    """Print the figures: medians of interleaved runs."""
    seconds, turns = max(3, round(8 * SCALE)), 3 if SCALE >= 0.5 else 1
    with server() as running:
        for batch, figure, target in ((1, "ratio_one_at_a_time", 0.5), (10, "ratio_ten_at_a_time", 1.0)):
            jobs = int((60_000 if batch > 1 else 12_000) * (seconds + _WARM))
            mine, theirs = [], []
            for _ in range(turns):
                mine.append(ours(running, batch, seconds, jobs))
                theirs.append(status_column(running, batch, seconds, jobs))
                say(f"  claimers: {batch} at a time: ledger {mine[-1]:,.0f}/s, status column {theirs[-1]:,.0f}/s")
            ratio = median([a / b for a, b in zip(mine, theirs, strict=True)])
            shown = f"status column with SKIP LOCKED {median(theirs):,.0f} jobs/s, ours {median(mine):,.0f}"
            at_least("claimers", figure, ratio, "ratio", target, shown).show()
