"""A worker in SQL with the steps of a worker in any language: claim, claimed_jobs, admit, start, end."""

from dataclasses import dataclass
from typing import Any, LiteralString
from uuid import UUID, uuid4

from psycopg.types.json import Jsonb

from support.database import Connection, Row, call, one

ENDS = {"cancelled": "cancel_running", "expired": "expire", "postponed": "postpone"}
"""Why a claimed job may not start, and the verb that ends its attempt."""


@dataclass
class Job:
    """One claimed attempt, as claimed_jobs returns it."""

    lease: UUID
    id: int
    attempt: int
    args: dict[str, Any]
    blocked_by: str | None
    order_key: str | None

    @property
    def cancelled(self) -> bool:
        return self.blocked_by == "cancelled"

    @property
    def changing(self) -> bool:
        return self.blocked_by == "changing"


class Hands:
    """Claims on one autocommit connection; attempts that it does not end stay open."""

    def __init__(self, db: Connection, *queues: str, at: str = "clock_timestamp()") -> None:
        self.db = db
        self.queues = list(queues or ["q"])
        query = f"select tallybook.worker_start('hands', %s, at => {at})"
        self.worker: int = self.one(query, self.queues)

    def one(self, query: str, *params: object) -> Any:
        return one(self.db, query, *params)

    def claim(self, max_jobs: int = 100) -> list[Job]:
        """Claim one batch and return the rows of claimed_jobs."""
        while True:
            lease = uuid4()
            row = self.db.execute(
                "select claim_id, jobs from tallybook.claim(%s, %s, %s, %s)",
                (self.worker, self.queues, [max_jobs] * len(self.queues), lease),
            ).fetchone()
            assert row is not None
            if row[0] is None:
                return []
            if row[1]:
                return self.claimed_jobs(lease)

    def claimed_jobs(self, lease: UUID, job: int | None = None) -> list[Job]:
        query = "select job_id, attempt, args, blocked_by, order_key from tallybook.claimed_jobs(%s, %s)"
        return [Job(lease, *row) for row in self.db.execute(query, (lease, job))]

    def turn(self, jobs: list[Job], *, patient: bool = True) -> tuple[list[int], list[int]]:
        """Ask for the turns of these jobs; return those that may start, and those that must ask again."""
        row = self.db.execute(
            "select ready, busy from tallybook.order_admit(%s, %s, %s, %s)",
            ([j.lease for j in jobs], [j.id for j in jobs], [j.attempt for j in jobs], patient),
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    def start(self, max_jobs: int = 100) -> list[Job]:
        """Claim jobs, request their turns and return those that may start now; end all others."""
        free = []
        for job in self.claim(max_jobs):
            if verb := ENDS.get(job.blocked_by):
                self.say(verb, job)
            else:
                assert not job.changing, f"job {job.id} is being changed"
                free.append(job)
        ready, busy = self.turn(free) if free else ([], [])
        assert not busy
        return [job for job in free if job.id in ready]

    def say(self, verb: str, job: Job, *more: Any) -> Any:
        """End an attempt: complete, fail, snooze, expire, postpone, cancel_running, move."""
        params = (job.lease, job.id, job.attempt, *more)
        return self.one(f"select tallybook.{verb}({', '.join(['%s'] * len(params))})", *params)

    def complete(self, *jobs: Job) -> None:
        for job in jobs:
            assert self.say("complete", job) is True

    def fail(self, job: Job, retry_in: str = "0", *, final: bool = False, **error: str) -> str:
        said: str = self.one(
            "select tallybook.fail(%s, %s, %s, %s, %s, final => %s)",
            job.lease, job.id, job.attempt, Jsonb({"message": "no luck", **error}), retry_in, final,
        )  # fmt: skip
        return said

    def rescued(self) -> None:
        """Die: a rescue takes the open attempts, and this worker is no longer registered."""
        self.db.execute("update tallybook.worker set seen_at = '-infinity' where id = %s", (self.worker,))
        self.db.execute("select tallybook.rescue(only_worker => %s)", (self.worker,))

    def run_all(self) -> list[int]:
        """Start and complete jobs until none is available; return the order of their starts."""
        order = []
        for _ in range(100):
            jobs = self.start()
            if not jobs and self.one("select promoted from tallybook.promote()") == 0:
                return order
            order += [job.id for job in jobs]
            self.complete(*jobs)
        raise AssertionError("the queue does not become empty")


def drain(db: Connection, queue: str = "q") -> list[int]:
    """Start and complete all jobs of a queue as a new worker; return the order of their starts."""
    return Hands(db, queue).run_all()


def put(db: Connection, **more: Any) -> int:
    """Enqueue a job to queue q with named options: put(db, order_key='k', args={...})."""
    ((job,),) = call(db, "enqueue", **{"queue": "q", "task": "t", **more})
    return job


def put_many(db: Connection, n: int, queue: str = "q", *, task: str = "t", args: str = "{}", **more: Any) -> list[int]:
    """Enqueue n jobs in one statement; a list has one value per job: put_many(db, 2, order_keys=["a", "b"])."""
    given = {"queues": [queue] * n, "tasks": [task] * n, "args": [args] * n, **more}
    ((jobs,),) = call(db, "enqueue_many", "job_ids", **given)
    return jobs


def child(db: Connection, *after: int, **more: Any) -> int:
    """Enqueue a job that waits for these."""
    ((job,),) = call(db, "enqueue_after", **{"queue": "q", "task": "child", "after": list(after), **more})
    return job


def resolve(db: Connection, *parents: int) -> Row:
    """Return the numbers of ended parents, and of released, cancelled and busy children."""
    (row,) = call(db, "parents_resolve", "ended, released, cancelled, busy", parents=list(parents) or None)
    return row


def cancel(db: Connection, job: int, reason: str | None = None) -> str:
    return str(one(db, "select tallybook.cancel(%s, %s)", job, reason))


def retry(db: Connection, job: int) -> int:
    """Retry a dead or cancelled job; return its attempt."""
    return int(one(db, "select tallybook.retry(%s)", job))


def states(db: Connection, *jobs: int) -> list[str]:
    """Return the states of these jobs in the view."""
    rows = dict(db.execute("select id, state from tallybook.job where id = any (%s)", (list(jobs),)).fetchall())
    return [rows.get(job, "gone") for job in jobs]


def enqueue_from(db: Connection, query: str | None, **more: Any) -> tuple[int, int]:
    """Enqueue jobs from a query, by default of task t to queue q; return the numbers of rows and of new jobs."""
    ((seen, created),) = call(
        db, "enqueue_from", "seen, created", **{"query": query, "queue": "q", "task": "t", **more}
    )
    return seen, created


def values(*keys: str) -> str:
    """Return a query with these keys, in this order."""
    rows = ", ".join(f"('{key}')" for key in keys)
    return f"select key, jsonb_build_object('key', key) as args from (values {rows}) v(key)"  # noqa: S608


def keys(db: Connection, where: LiteralString | str = "true") -> list[str | None]:
    """Return the unique keys of these jobs, in the order of their enqueue."""
    query = f"select unique_key from tallybook.job where {where} order by id"  # noqa: S608
    return [row[0] for row in db.execute(query)]  # type: ignore[arg-type]
