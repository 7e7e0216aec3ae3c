"""A worker in SQL that requests permits of limits, at times that the test sets."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, cast
from uuid import UUID, uuid4

from support.database import Connection, call, one
from support.waiting import wait_until

T = datetime.fromisoformat("2031-03-30T00:30:00+00:00")
MS, S, MIN, HOUR = timedelta(milliseconds=1), timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)


def put(db: Connection, *keys: str, n: int = 1, at: datetime = T, **more: Any) -> list[int]:
    options = {"limits": list(keys)} if keys else None
    named = {"queue": "q", "task": "t", "options": options, "at": at, **more}
    return [call(db, "enqueue", **named)[0][0] for _ in range(n)]


@dataclass(eq=False)
class Asker:
    """A worker that claims and requests permits at times that the test sets; it records its starts and their times."""

    db: Connection
    queue: str = "q"
    started: list[tuple[int, datetime]] = field(default_factory=list)
    late: dict[int, timedelta] = field(default_factory=dict)
    """How late a start may be."""
    held: dict[int, tuple[UUID, int]] = field(default_factory=dict)
    unknown: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = one(self.db, "select tallybook.worker_start('w', array[%s], at => %s)", self.queue, T)
        self.db.execute("update tallybook.worker set seen_at = 'infinity' where id = %s", (self.worker,))

    def claim(self, at: datetime, n: int = 100) -> list[tuple[UUID, int, int, bool]]:
        lease = uuid4()
        query = (
            "select jobs > 0 from tallybook.claim(%s, array[%s], array[%s], %s, at => %s) where claim_id is not null"
        )
        while row := self.db.execute(query, (self.worker, self.queue, n, lease, at)).fetchone():
            if row[0]:
                break  # otherwise the claim had only cancelled jobs
        else:
            return []
        rows = self.db.execute(
            "select job_id, attempt, coalesce(blocked_by = 'limit', false) from tallybook.claimed_jobs(%s, at => %s)",
            (lease, at),
        )
        return [(lease, *row) for row in rows.fetchall()]

    def ask(
        self, jobs: list[tuple[UUID, int, int, bool]], at: datetime, names: list[str] | None = None, **more: Any
    ) -> list[int]:
        """Request permits for these jobs; return those that start, in this order."""
        given = "".join(f", {name} => {value}" for name, value in more.items())
        leases, ids, attempts = ([job[n] for job in jobs] for n in range(3))
        take = f"tallybook.limit_take(%s, %s, %s, %s, at => %s{given})"
        query = f"select job_id, starts_in, unknown, late from {take}"  # noqa: S608
        rows = self.db.execute(cast("Any", query), (leases, ids, attempts, names, at)).fetchall()
        self.unknown += [(job, name) for job, _, name, _ in rows if name is not None]
        starts = [(job, at + starts_in * S) for job, starts_in, name, _ in rows if name is None]
        self.late.update({job: late * S for job, _, name, late in rows if name is None})
        self.started += starts
        self.held.update({job: (lease, attempt) for lease, job, attempt, _ in jobs})
        return [job for job, _ in starts]

    def too_late(self, jobs: list[int], at: datetime) -> None:
        """Request new permits for jobs that had one and did not start in time."""
        again = [(lease, job, attempt, True) for job in jobs for lease, attempt in [self.held[job]]]
        self.started = [start for start in self.started if start[0] not in jobs]
        assert sorted(self.ask(again, at, missed=True)) == sorted(jobs)

    def look(self, at: datetime, n: int = 100) -> list[int]:
        """Promote due jobs, claim all available ones and request their permits."""
        self.db.execute("select tallybook.promote(at => %s)", (at,))
        started = []
        while jobs := self.claim(at, n):
            started += self.start([job for job in jobs if not job[3]], at)
            if limited := [job for job in jobs if job[3]]:
                started += self.ask(limited, at)
        return started

    def start(self, jobs: list[tuple[UUID, int, int, bool]], at: datetime) -> list[int]:
        """Start jobs that became available with their permits; nothing is requested."""
        self.held.update({job: (lease, attempt) for lease, job, attempt, _ in jobs})
        self.started += [(job, at) for _, job, _, _ in jobs]
        return [job for _, job, _, _ in jobs]

    def take(self, n: int = 100, at: datetime = T) -> list[int]:
        """Claim jobs and start them; nothing is requested."""
        return self.start(self.claim(at, n), at)

    def end(self, verb: str, job: int, **more: Any) -> Any:
        """End an attempt with this verb; return the verb's result."""
        lease, attempt = self.held.pop(job)
        ((said,),) = call(self.db, verb, lease=lease, job_id=job, attempt=attempt, **more)
        return said

    def complete(self, *jobs: int) -> None:
        for job in jobs:
            assert self.end("complete", job) is True

    def run(self, until: datetime, since: datetime = T) -> list[int]:
        """Look at `since`, and then whenever a job is due, up to `until`."""
        order, at = self.look(since), since
        while True:
            due = one(self.db, "select min(run_at) from tallybook.scheduled")
            if due is None or due > until:
                return order
            at = max(at, due)
            order += self.look(at)


def permits(db: Connection, *names: str, at: datetime = T) -> int:
    """Give the free permits of these names, or of all, to waiting jobs; return the number of these jobs."""
    return one(db, "select released from tallybook.concurrency_release(%s, at => %s)", list(names) or None, at)


def two_at_once(db: Connection, connect: Any, key: str, *, known: bool = True) -> list[float]:
    """Let two sessions request a permit of one key, the second before the first has committed.

    Return when their jobs start, in seconds after T.

    known: the key has a row already; otherwise both make it.
    """
    if known:
        db.execute("insert into tallybook.rate_state values (%s, '-infinity', '-infinity', null, 0)", (key,))
    put(db, key, n=2)
    askers, claims = [], []
    for _ in range(2):
        askers.append(asker := Asker(connect(autocommit=False)))
        claims.append(asker.claim(T, 1))
        asker.db.commit()
    first, second = askers
    waits = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    first.ask(claims[0], T)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(second.ask, claims[1], T)
        wait_until(lambda: asking.done() or one(db, waits) > 0, "it waits, or not")
        first.db.commit()
        asking.result(60)
        second.db.commit()
    return [(start - T) / S for asker in askers for _, start in asker.started]
