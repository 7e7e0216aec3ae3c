"""Many producers and claimers as real processes, killed and restarted; then a check of every job.

    findings, counts = Crowd(dsn, seed=7, seconds=3.0).run()
    assert findings == []

Producers record their commits in `ledger_check`, in the jobs' own transactions. Claimers record runs in `runs` and
accepted ends in `ends`. The machine determines the interleaving, the seed the choices.
"""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg.rows import dict_row

from .crowd_process import QUEUES, TASKS
from .database import Connection
from .paths import ROOT
from .waiting import wait_until

SEED = int(os.environ.get("TALLYBOOK_SEED") or random.randrange(1_000_000))
TABLES = """
create table ledger_check (job_id bigint primary key);
create table runs (lease uuid, job_id bigint, attempt int);
create table ends (lease uuid, job_id bigint, attempt int);
create table late (job_id bigint);
create table zombies (lost int);
"""
CHECKS = dict(
    re.findall(r"-- name: (.*?)\n(.*?);\n", (Path(__file__).parent / "crowd_checks.sql").read_text("utf-8"), re.DOTALL)
)
# Checked while all processes run. A cancel frees the key at once, even if a running claim does not see the cancel:
# claimed_jobs reports it to the worker then.
TWO_HOLDERS = """
    select format('key %s of %s: %s', j.unique_key, j.task, array_agg(j.id)) from tallybook.job j
     where j.unique_key is not null and j.state in ('scheduled', 'retrying', 'available', 'running')
       and not exists (select from tallybook.tombstone t where t.job_id = j.id and t.cancelled)
     group by j.task, j.unique_key having count(*) > 1"""

END_CANCELLED = """
    select count(tallybook.cancel_running(%(lease)s, job_id, attempt))
      from tallybook.claimed_jobs(%(lease)s) where blocked_by = 'cancelled'"""
COMPLETE = """
    select tallybook.complete_many(array_agg(%(lease)s::uuid), array_agg(job_id), array_agg(attempt))
      from tallybook.claimed_jobs(%(lease)s) where blocked_by is null having count(*) > 0"""

COUNTS = """
    select (select count(*) from ledger_check) as jobs, (select count(*) from runs) as runs,
           (select count(*) from ends) as ends, (select count(*) from late) as late,
           (select coalesce(sum(lost), 0) from zombies) as zombie_attempts,
           (select count(*) from tallybook.entry) as attempts, (select count(*) from tallybook.dead) as dead,
           (select count(*) from tallybook.outcome where state = 'cancelled') as cancelled,
           (select count(*) from tallybook.outcome where state = 'lost') as lost,
           (select count(*) from tallybook.claim where closed <> '{}') as claims_of_holes,
           (select count(*) from tallybook.claim where one_xid is not null) as claims_by_id"""
BUSY = """
    select application_name, state, wait_event_type, wait_event, now() - query_start, pg_blocking_pids(pid), pid, query
      from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"""


@dataclass
class Crowd:
    """The processes of one run on one database with Tallybook."""

    dsn: str
    seed: int
    seconds: float = 2.0
    producers: int = 4
    claimers: int = 4
    processes: dict[tuple[str, int], subprocess.Popen[bytes]] = field(default_factory=dict)
    kills: int = 0
    starts: int = 0

    def run(self) -> tuple[list[str], dict[str, int]]:
        """Return the findings and the counts."""
        print(f"crowd: seed {self.seed}")
        findings: list[str] = []
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(TABLES)
            try:
                self._load(conn, findings)
                self._stop(conn, findings)
            finally:
                for process in self.processes.values():
                    process.kill()
                    process.wait()
            try:
                drain(conn)
            except psycopg.Error as error:
                findings.append(f"the rest could not be run: {error}")
            return [*findings, *check(conn)], self._counts(conn)

    def _load(self, conn: Connection, findings: list[str]) -> None:
        rng = random.Random(self.seed)
        roles = {"claimer": self.claimers, "producer": self.producers, "late": 1, "zombie": 1, "maintenance": 1}
        for role, n in roles.items():
            for number in range(n):
                self._start(role, number)
        pace = threading.Event()
        end = None
        while end is None or time.monotonic() < end or not self.kills:  # a kill must not depend on luck either
            pace.wait(rng.uniform(0.1, 0.3))
            findings += self._all_alive()
            findings += [f"two jobs with one key: {row[0]}" for row in conn.execute(TWO_HOLDERS)]
            if end is None:
                if _certain(conn):  # from then on every process works
                    end = time.monotonic() + self.seconds
            elif self.kills == 0 or rng.random() < 0.6:  # at least once, even with few turns
                number = rng.randrange(self.claimers)
                self.processes["claimer", number].send_signal(signal.SIGKILL)
                self.processes["claimer", number].wait()
                self.kills += 1
                self.starts += 1
                self._start("claimer", number)

    def _stop(self, conn: Connection, findings: list[str]) -> None:
        """Let producers finish, and kill claimers in the middle of their work."""
        for (role, _), process in self.processes.items():
            process.send_signal(signal.SIGKILL if role == "claimer" else signal.SIGTERM)
        for (role, number), process in self.processes.items():
            try:
                if process.wait(70) != (-signal.SIGKILL if role == "claimer" else 0):
                    findings.append(f"a process that failed: {role} {number}, its error is above")
            except subprocess.TimeoutExpired:
                findings += [
                    f"a process that does not stop: {role} {number}, beside: {row}" for row in conn.execute(BUSY)
                ]
                process.kill()
        sessions = "select count(*) from pg_stat_activity where application_name = %s"
        wait_until(
            lambda: conn.execute(sessions, [f"crowd {conn.info.dbname}"]).fetchone() == (0,),
            "the killed ones' sessions are gone",
        )

    def _start(self, role: str, number: int) -> None:
        command = [sys.executable, "-m", "tests.support.crowd_process", role, self.dsn]
        seed = f"{self.seed}.{self.starts}"
        self.processes[role, number] = subprocess.Popen([*command, seed, str(number)], cwd=ROOT)

    def _all_alive(self) -> list[str]:
        """Restart failed processes and return them as findings: a control must continue to its end."""
        failed = [key for key, process in self.processes.items() if process.poll() is not None]
        for role, number in failed:
            self.starts += 1
            self._start(role, number)
        return [f"a process that failed: {role} {number}, its error is above" for role, number in failed]

    def _counts(self, conn: Connection) -> dict[str, int]:
        with conn.cursor(row_factory=dict_row) as cursor:
            counts = cursor.execute(COUNTS).fetchone()
        assert counts is not None
        return {**counts, "kills": self.kills}


def _certain(conn: Connection) -> bool:
    """Return whether all events that the negative controls need have happened: they must not depend on luck."""
    row = conn.execute("select (select count(*) from late) >= 2 and (select sum(lost) from zombies) >= 2").fetchone()
    return row == (True,)


def drain(conn: Connection) -> None:
    """Run all remaining jobs, with the clock far in the future."""
    for days in (1, 2):  # dead jobs are suspects first
        conn.execute("select tallybook.rescue(at => clock_timestamp() + make_interval(days => %s))", [days])
    start = "select tallybook.worker_start('drain', %s::text[], %s::text[])"
    (worker,) = conn.execute(start, [list(QUEUES), list(TASKS)]).fetchone() or (None,)
    promote = "select promoted from tallybook.promote(1000, null, clock_timestamp() + interval '1 day')"
    claim = "select claim_id, jobs from tallybook.claim(%s, %s::text[], %s::int[], %s)"
    while True:
        promoted = conn.execute(promote).fetchone()
        lease = uuid.uuid4()
        claimed = conn.execute(claim, [worker, list(QUEUES), [500] * len(QUEUES), lease]).fetchone()
        assert claimed is not None
        if claimed[0] is not None:  # it has 0 jobs if all were cancelled
            conn.execute(END_CANCELLED, {"lease": lease})
            conn.execute(COMPLETE, {"lease": lease})
        elif promoted == (0,):
            return


def check(conn: Connection) -> list[str]:
    """Return the findings with their names, at most 5 of a kind."""
    return [f"{name}: {row[0]}" for name, query in CHECKS.items() for row in conn.execute(query).fetchmany(5)]
