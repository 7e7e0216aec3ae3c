"""One process of the crowd: `python -m tests.support.crowd_process ROLE DSN SEED NUMBER`, until SIGTERM (see crowd.py).

Every connection is in autocommit mode, so that the code shows each transaction as begin ... commit.
"""

import json
import random
import signal
import sys
import threading
import uuid
from typing import Any

import psycopg

from .database import Connection, one

QUEUES = ("mail", "files", "reports")
TASKS = ("send", "pack", "scan")
stop = threading.Event()

RECORD = "insert into ledger_check (job_id) select unnest(%s::bigint[]) on conflict do nothing"
ENQUEUE = (
    "select tallybook.enqueue(%s, %s, '{\"n\": 1}', priority => %s, unique_key => %s,"
    " run_at => clock_timestamp() + make_interval(secs => %s), max_attempts => %s)"
)
ENQUEUE_MANY = (
    "select job_ids from tallybook.enqueue_many(%s::text[], %s::text[], %s::text[], priorities => %s::int[],"
    " unique_keys => %s::text[], run_ats => array(select clock_timestamp() + make_interval(secs => d)"
    " from unnest(%s::float[]) with ordinality u(d, n) order by n))"
)

PASSED = "select bool_or(tallybook._cursor_passed(lane_id, retention, xid, seq)) from tallybook.entry where job_id = %s"

DEAD = "select job_id from tallybook.dead where job_id = any (%s) limit 1"


class Producer:
    """Enqueues and cancels in transactions of every kind, and records its jobs in ledger_check in the same ones."""

    def __init__(self, dsn: str, rng: random.Random, number: int) -> None:
        self.rng, self.number = rng, number
        self.quick: Connection = _connect(dsn)
        self.slow: Connection = _connect(dsn)
        self.slow_for = 0  # number of further transactions for which the slow one stays open
        self.prepared: str | None = None
        self.gids = 0
        # Both lists have only this producer's jobs: a unique key may have returned another producer's job, and two
        # transactions that cancel the same jobs wait for each other.
        self.committed: list[int] = []
        self.mine: list[int] = []  # committed jobs, each cancelled at most once: two cancels of one job may wait
        self.keyed: set[int] = set()
        self.can_prepare = one(self.quick, "select current_setting('max_prepared_transactions')::int") > 0

    def turn(self) -> None:
        if self.slow_for > 0:
            self.slow_for -= 1
            if self.slow_for == 0:
                self.end(self.slow, "slow")
        elif self.rng.random() < 0.3:
            self.open_slow()
        kind = self.rng.choices(("one", "several", "bulk", "prepare", "cancel"), (4, 4, 2, 1, 2))[0]
        getattr(self, kind)()
        stop.wait(self.rng.choice((0.0, 0.01)))

    def one(self) -> None:
        self.quick.execute("begin")
        ids = self.put(self.quick, keyed=True)
        self.finish(self.quick, ids)

    def several(self) -> None:
        """Enqueue some jobs in savepoints, and roll back some of them."""
        self.quick.execute("begin")
        ids = self.put(self.quick, keyed=True)
        for _ in range(self.rng.randint(1, 4)):
            self.quick.execute("savepoint s")
            more = self.put(self.quick)
            if self.mine and self.rng.random() < 0.2:
                self.quick.execute("select tallybook.cancel(%s)", [self.mine.pop()])
            if self.rng.random() < 0.4:
                self.quick.execute("rollback to savepoint s")
            else:
                ids += more
        self.finish(self.quick, ids)

    def bulk(self) -> None:
        self.quick.execute("begin")
        n = self.rng.randint(1, 20)
        keys = [f"k{self.rng.randrange(12)}" if self.rng.random() < 0.1 else None for _ in range(n)]
        ids = one(
            self.quick,
            ENQUEUE_MANY,
            self.rng.choices(QUEUES, k=n),
            self.rng.choices(TASKS, k=n),
            ["{}"] * n,
            self.rng.choices((1, 2, 3), k=n),
            keys,
            [self.delay() for _ in range(n)],
        )
        self.quick.execute(RECORD, [ids])
        self.keyed.update(job for job, key in zip(ids, keys, strict=True) if key)
        self.finish(self.quick, ids)

    def open_slow(self) -> None:
        """Open a transaction that stays open while others run. With unique keys this process would wait for itself."""
        self.slow.execute("begin")
        for _ in range(self.rng.randint(1, 3)):
            self.put(self.slow)
        if self.mine and self.rng.random() < 0.3:
            self.slow.execute("select tallybook.cancel(%s)", [self.mine.pop()])
        self.slow_for = self.rng.randint(1, 25)

    def prepare(self) -> None:
        """End the prepared transaction if there is one, otherwise prepare one."""
        if not self.can_prepare:
            return
        if self.prepared is not None:
            self.quick.execute(f"{self.rng.choice(('commit', 'rollback'))} prepared '{self.prepared}'")
            self.prepared = None
            return
        self.gids += 1
        gid = f"crowd_{one(self.quick, 'select current_database()')}_{self.number}_{self.gids}"
        self.quick.execute("begin")
        self.quick.execute("set local tallybook.notify = off")
        self.put(self.quick)
        self.quick.execute(f"prepare transaction '{gid}'")
        self.prepared = gid

    def cancel(self) -> None:
        """Cancel a job that this producer committed, or a dead letter that its slow transaction cannot hold."""
        if self.slow_for == 0 and self.rng.random() < 0.3:
            dead = self.quick.execute(DEAD, [self.committed]).fetchone() or ()
            self.mine += [job for job in dead if job not in self.mine]
        if self.mine:
            self.quick.execute("begin")
            self.quick.execute("select tallybook.cancel(%s)", [self.mine.pop()])
            self.end(self.quick, "quick")

    def close(self) -> None:
        """End all open transactions."""
        if self.slow_for:
            self.end(self.slow, "slow")
        if self.prepared is not None:
            self.prepare()

    def put(self, conn: Connection, *, keyed: bool = False) -> list[int]:
        key = f"k{self.rng.randrange(12)}" if keyed and self.rng.random() < 0.2 else None
        limit = self.rng.choice((None, 1, 2))
        queue, task, priority = self.rng.choice(QUEUES), self.rng.choice(TASKS), self.rng.choice((1, 2, 3))
        job_id = one(conn, ENQUEUE, queue, task, priority, key, self.delay(), limit)
        conn.execute(RECORD, [[job_id]])
        if key:
            self.keyed.add(job_id)
        return [job_id]

    def delay(self) -> float:
        return self.rng.choice((0.0, 0.0, 0.0, self.rng.uniform(0.0, 0.5)))

    def finish(self, conn: Connection, ids: list[int]) -> None:
        if self.end(conn, "quick"):
            own = [job for job in ids if job not in self.keyed]
            self.committed += own
            self.mine += self.rng.sample(own, k=len(own) // 5)

    def end(self, conn: Connection, kind: str) -> bool:
        committed = self.rng.random() < (0.7 if kind == "slow" else 0.8)
        conn.execute("commit" if committed else "rollback")
        return committed


class Late:
    """Always commits late: after a newer job of the same lane was claimed."""

    def __init__(self, dsn: str, rng: random.Random, number: int) -> None:
        self.rng = rng
        self.slow, self.quick = _connect(dsn), _connect(dsn)
        for queue in QUEUES:  # only it uses priority 0: claimed soon, and in one lane
            self.quick.execute("begin")
            self.quick.execute(RECORD, [[one(self.quick, ENQUEUE, queue, "send", 0, None, 0.0, None)]])
            self.quick.execute("commit")

    def turn(self) -> None:
        queue = self.rng.choice(QUEUES)
        self.slow.execute("begin")
        ids = [one(self.slow, ENQUEUE, queue, "send", 0, None, 0.0, None) for _ in range(2)]
        self.slow.execute(RECORD, [ids])
        self.quick.execute("begin")
        newer = one(self.quick, ENQUEUE, queue, "send", 0, None, 0.0, None)
        self.quick.execute(RECORD, [[newer]])
        self.quick.execute("commit")
        while not stop.wait(0.02):
            if one(self.quick, PASSED, newer):
                self.quick.execute("insert into late (job_id) select unnest(%s::bigint[])", [ids])
                break
        self.slow.execute("commit")


class Claimer:
    """Claims batches of random size, records each run, and ends the attempts in all ways, some late, some never."""

    def __init__(self, dsn: str, rng: random.Random, number: int) -> None:
        self.rng, self.number = rng, number
        self.conn: Connection = _connect(dsn)
        self.running: list[tuple[uuid.UUID, int, int]] = []
        self.start()

    def start(self) -> None:
        self.running = []
        self.tasks = self.rng.sample(TASKS, k=self.rng.randint(1, 3))
        start = "select tallybook.worker_start(%s, %s::text[], %s::text[])"
        self.worker = one(self.conn, start, f"claimer {self.number}", list(QUEUES), self.tasks)

    def turn(self) -> None:
        try:
            self.beat()
            lease = uuid.uuid4()
            claimed = self.claim_one(lease) if self.rng.random() < 0.1 else self.claim(lease)
        except psycopg.errors.Error as error:
            if error.sqlstate != "TB006":
                raise
            self.conn.execute("rollback")
            self.start()  # it was slow, and a rescue gave it up
            return
        if claimed:
            self.begin_runs(lease)
        self.rng.shuffle(self.running)
        keep = self.rng.randint(0, 3)
        todo, self.running = self.running[keep:], self.running[:keep]
        self.end(todo)
        if not claimed:
            stop.wait(0.01)

    def beat(self) -> None:
        told = self.conn.execute(
            "select job_id from tallybook.renew(%s, 0, %s)", [self.worker, [run[1] for run in self.running]]
        ).fetchall()
        for (job_id,) in told:
            for run in [run for run in self.running if run[1] == job_id]:
                self.running.remove(run)
                self.verb(run, "tallybook.cancel_running(%s, %s, %s)")

    def claim(self, lease: uuid.UUID) -> bool:
        self.conn.execute("begin")
        own = [] if self.rng.random() < 0.8 else [self.put()]
        # Trap 1: two claims in one transaction, by one process only: two could wait for each other's lanes.
        doubled = bool(own) and self.number == 0 and self.rng.random() < 0.7
        queues = self.rng.sample(QUEUES, k=self.rng.randint(1, 3))
        limits = [self.rng.choice((0, 1, 3, 10, 60)) for _ in queues]
        sql = "select jobs from tallybook.claim(%s, %s::text[], %s::int[], %s, %s)"
        durable = bool(own) or self.rng.random() < 0.5
        claimed = bool(one(self.conn, sql, self.worker, queues, limits, lease, durable) > 0)
        if own:
            own.append(self.put())
            if doubled:  # the second claim's jobs are left to a rescue
                one(self.conn, sql, self.worker, list(QUEUES), [2, 2, 2], uuid.uuid4(), True)
            self.conn.execute(RECORD, [own])
        if self.rng.random() < 0.1:
            self.conn.execute("rollback")
            return False
        self.conn.execute("commit")
        return claimed

    def claim_one(self, lease: uuid.UUID) -> bool:
        """Claim one of the newest jobs by its id."""
        row = self.conn.execute(
            "select job_id from ledger_check order by job_id desc offset %s limit 1", [self.rng.randint(0, 200)]
        ).fetchone()
        call = "select tallybook.claim_job(%s, %s, %s)"
        return row is not None and bool(one(self.conn, call, self.worker, row[0], lease))

    def put(self) -> int:
        return int(one(self.conn, ENQUEUE, self.rng.choice(QUEUES), self.rng.choice(TASKS), 2, None, 0.0, None))

    def begin_runs(self, lease: uuid.UUID) -> None:
        rows = self.conn.execute(
            "select job_id, attempt, coalesce(blocked_by = 'cancelled', false) from tallybook.claimed_jobs(%s)", [lease]
        ).fetchall()
        for job_id, attempt, cancelled in rows:
            run = (lease, job_id, attempt)
            if cancelled:
                self.verb(run, "tallybook.cancel_running(%s, %s, %s)")
                continue
            self.running.append(run)
        begun = [run for run in self.running if run[0] == lease]
        with self.conn.cursor() as cursor:
            cursor.executemany("insert into runs (lease, job_id, attempt) values (%s, %s, %s)", begun)

    def end(self, todo: list[tuple[uuid.UUID, int, int]]) -> None:
        together = []
        for run in todo:
            kind = self.rng.choices(
                ("complete", "fail", "snooze", "move", "cancel_running", "never"), (60, 18, 8, 6, 4, 1)
            )[0]
            if kind == "complete":
                together.append(run)
            elif kind == "fail":
                delay = self.rng.choice((0.0, self.rng.uniform(0, 0.3)))
                error = json.dumps({"message": "no luck"})
                self.verb(run, "tallybook.fail(%s, %s, %s, %s, make_interval(secs => %s))", error, delay)
            elif kind == "snooze":
                self.verb(run, "tallybook.snooze(%s, %s, %s, make_interval(secs => %s))", self.rng.choice((0.0, 0.1)))
            elif kind != "never":
                self.verb(run, f"tallybook.{kind}(%s, %s, %s)")
        if together:
            self.complete(together)

    def verb(self, run: tuple[uuid.UUID, int, int], call: str, *more: Any) -> None:
        """End one attempt, and record it in the same transaction if it was accepted."""
        self.conn.execute("begin")
        if one(self.conn, f"select {call}", *run, *more) != "refused":
            self.conn.execute("insert into ends (lease, job_id, attempt) values (%s, %s, %s)", run)
        self.conn.execute("commit")

    def complete(self, runs: list[tuple[uuid.UUID, int, int]]) -> None:
        leases, ids, attempts = map(list, zip(*runs, strict=True))
        self.conn.execute("begin")
        refused = one(
            self.conn, "select tallybook.complete_many(%s::uuid[], %s::bigint[], %s::int[])", leases, ids, attempts
        )
        with self.conn.cursor() as cursor:
            accepted = [run for run in runs if run[1] not in refused]
            cursor.executemany("insert into ends (lease, job_id, attempt) values (%s, %s, %s)", accepted)
        self.conn.execute("commit")


class Zombie(Claimer):
    """Is given up while it runs jobs, and still ends them afterwards."""

    def turn(self) -> None:
        lease = uuid.uuid4()
        claim = "select jobs from tallybook.claim(%s, %s::text[], %s::int[], %s)"
        if not one(self.conn, claim, self.worker, list(QUEUES), [5] * len(QUEUES), lease):
            stop.wait(0.02)
            return
        self.begin_runs(lease)
        lost = one(self.conn, "select tallybook.worker_stop(%s)", self.worker)
        for run in self.running:
            kind = self.rng.choice(("complete", "fail", "snooze", "cancelled"))
            if kind == "complete":
                self.complete([run])
            elif kind == "fail":
                self.verb(run, "tallybook.fail(%s, %s, %s, '{}')")
            elif kind == "snooze":
                self.verb(run, "tallybook.snooze(%s, %s, %s, '0')")
            else:
                self.verb(run, "tallybook.cancel_running(%s, %s, %s)")
        self.conn.execute("insert into zombies (lost) values (%s)", [lost])
        self.start()


class Maintenance:
    """Promotes due jobs and rescues jobs of dead workers, all the time."""

    def __init__(self, dsn: str, rng: random.Random, number: int) -> None:
        self.rng = rng
        self.conn: Connection = _connect(dsn)
        self.after: Any = None

    def turn(self) -> None:
        after = None if self.rng.random() < 0.2 else self.after
        row = self.conn.execute(
            "select last_run_at from tallybook.promote(%s, %s)", [self.rng.choice((1, 10, 500)), after]
        ).fetchone()
        self.after = row[0] if row and row[0] else after
        if self.rng.random() < 0.2:
            self.conn.execute("select tallybook.rescue('1 s', grace => '0.2 s')")
        stop.wait(0.02)


def _connect(dsn: str) -> Connection:
    """Connect with short timeouts, so that a hanging statement is an error that names it."""
    conn: Connection = psycopg.connect(dsn, autocommit=True, options="-c statement_timeout=60s")
    conn.execute("select set_config('application_name', 'crowd ' || current_database(), false)")
    return conn


ROLES = {kind.__name__.lower(): kind for kind in (Producer, Late, Claimer, Zombie, Maintenance)}


def main(role: str, dsn: str, seed: str, number: str) -> None:
    # Not by a signal handler, which runs in this thread and may find it inside stop.wait() with the event's lock.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=lambda: (signal.sigwait({signal.SIGTERM}), stop.set()), daemon=True).start()
    actor = ROLES[role](dsn, random.Random(f"{seed}/{role}/{number}"), int(number))
    while not stop.is_set():
        actor.turn()
    if isinstance(actor, Producer):  # the others have no open transaction, and a rescue must find their running jobs
        actor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
