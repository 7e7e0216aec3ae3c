"""The verbs against a small reference model in plain Python, step by step, on the real server.

The model knows lines and states, nothing of transactions, windows or tables.
"""

from __future__ import annotations

import json
import random
import secrets
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from psycopg import sql

from support.chance import QUIET, THOROUGH
from support.database import Connection, miscounted, one
from support.job_lists import STATES, differences, some_filters

DAY = timedelta(days=1)
QUEUE = "mail"
TASKS = ("send", "pack")
LEASE_TIME = DAY / 2
KEYS = st.sampled_from([None, None, "k", "l"])
NEW = st.tuples(st.sampled_from(TASKS), st.integers(0, 2), st.sampled_from([None, -1, 1, 2]), KEYS)
"""A new job's task, priority, days until it runs, and unique key."""


@dataclass(eq=False)
class Attempt:
    """A place in a line."""

    job: Job
    number: int
    cancelled: bool = False
    by_id: bool = False
    written: int = 0


@dataclass(eq=False)
class Job:
    """A job as the view shows it, and the fields that decide its future."""

    id: int
    task: str
    priority: int
    key: str | None
    max_attempts: int | None
    state: str = "available"
    part: str = ""
    attempt: int = 1
    started: int = 0
    failures: int = 0
    crashes: int = 0
    errors: list[str] = field(default_factory=list)
    reason: str | None = None
    run_at: datetime | None = None
    lease: uuid.UUID | None = None
    worker: int | None = None
    cancel_asked: bool = False
    place: Attempt | None = None

    @property
    def open(self) -> bool:
        """Whether it holds its unique key."""
        return self.state in ("scheduled", "retrying", "available", "running")


@dataclass(eq=False)
class Worker:
    id: int
    tasks: tuple[str, ...]
    seen_at: datetime
    suspect_since: datetime | None = None
    gone: bool = False


class Ledger(RuleBasedStateMachine):
    """One queue and one connection; every rule runs one verb on both sides."""

    db: ClassVar[Connection]
    examples: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        Ledger.examples += 1
        if Ledger.examples % 100 == 1:
            self.db.execute("truncate " + ", ".join(f"tallybook.{table}" for table in TABLES))
        else:  # quicker, but it leaves dead rows
            for table in TABLES:
                self.db.execute(sql.SQL("delete from tallybook.{}").format(sql.Identifier(table)))
        self.one("select tallybook.recount()")
        self.base: datetime = self.one("select date_trunc('second', clock_timestamp())")
        self.now = self.base
        self.jobs: dict[int, Job] = {}
        self.lines: dict[tuple[int, str], list[Attempt]] = {}
        self.windows: dict[tuple[int, str], int] = {}
        self.workers: list[Worker] = []
        self.paused = False
        self.written = 0
        self.start_worker(TASKS)

    # Rules: producers.

    @rule(new=NEW, limit=st.sampled_from([None, 1, 2]))
    def enqueue(self, new: tuple[str, int, int | None, str | None], limit: int | None) -> None:
        task, priority, days, key = new
        run_at = None if days is None else self.base + days * DAY
        call = "select tallybook.enqueue(%s, %s, '{}', %s, %s, %s, %s)"
        got = self.one(call, QUEUE, task, run_at, priority, key, limit)
        self.written += 1
        self.put(got, task, priority, run_at, key, limit)

    @rule(jobs=st.lists(NEW, max_size=5))
    def enqueue_many(self, jobs: list[tuple[str, int, int | None, str | None]]) -> None:
        run_ats = [None if days is None else self.base + days * DAY for _, _, days, _ in jobs]
        ids, created = self.row(
            "select * from tallybook.enqueue_many(%s::text[], %s::text[], %s::text[], %s::timestamptz[], %s::int[],"
            " %s::text[])",
            [QUEUE] * len(jobs), [job[0] for job in jobs], ["{}"] * len(jobs), run_ats, [job[1] for job in jobs],
            [job[3] for job in jobs],
        )  # fmt: skip
        self.written += 1
        for got, new, (task, priority, _, key), run_at in zip(ids, created, jobs, run_ats, strict=True):
            assert new == self.put(got, task, priority, run_at, key, None)
        for line in self.lines.values():  # in the order of their ids, whatever their keys are
            line.sort(key=lambda place: (place.written, place.job.id if place.written == self.written else 0))

    def put(
        self, got: int, task: str, priority: int, run_at: datetime | None, key: str | None, limit: int | None
    ) -> bool:
        """Return whether it is a new job."""
        if holders := self.holders(task, key):
            assert [got] == holders
            return False
        assert got not in self.jobs
        job = self.jobs[got] = Job(got, task, priority, key, limit)
        if run_at is not None and run_at > self.base:
            job.state, job.run_at = "scheduled", run_at
        else:
            self.line_up(job)
        return True

    # Rules: workers.

    @precondition(lambda self: len(self.workers) < 4)
    @rule(tasks=st.sampled_from([TASKS, TASKS[:1]]))
    def start_worker(self, tasks: tuple[str, ...]) -> None:
        call = "select tallybook.worker_start('w', array[%s], %s::text[], at => %s)"
        started = self.one(call, QUEUE, list(tasks), self.now)
        self.workers.append(Worker(started, tasks, self.now))

    @rule(n=st.integers(0, 4), data=st.data())
    def claim(self, n: int, data: st.DataObject) -> None:
        worker, lease = data.draw(st.sampled_from(self.workers)), uuid.uuid4()
        call = ("select jobs from tallybook.claim(%s, array[%s], array[%s], %s)", worker.id, QUEUE, n, lease)
        if worker.gone:
            self.refused("TB006", *call)
            return
        jobs = self.one(*call)
        got = self.db.execute(
            "select job_id, attempt, coalesce(blocked_by = 'cancelled', false) from tallybook.claimed_jobs(%s)", [lease]
        ).fetchall()
        assert len(got) == jobs
        expected = [] if n == 0 or self.paused else self.take(worker, n)
        assert got == [(place.job.id, place.number, False) for place in expected]
        for place in expected:
            self.run(place.job, worker, lease)

    def take(self, worker: Worker, n: int) -> list[Attempt]:
        """Take the next n of the first lane that has work; those that must not start leave it as well.

        Places written after the lane's window was opened belong to the next window, so a batch may be smaller than n.
        """
        walked = [
            (priority, line[0].written, part)
            for (priority, part), line in self.lines.items()
            if line and (part == "" or part.removeprefix("task:") in worker.tasks)
        ]
        if not walked:
            return []
        priority, _, part = min(walked)
        line = self.lines[priority, part]
        while line:
            if line[0].written > self.windows.get((priority, part), 0):
                self.windows[priority, part] = self.written
            window = [place for place in line if place.written <= self.windows[priority, part]]
            batch = window[:n]
            del line[: len(batch)]
            for place in batch:
                if place.cancelled and not place.by_id and place.job.place is place:
                    place.job.place = None
            if taken := [place for place in batch if not place.by_id and not place.cancelled]:
                return taken
        return []

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def claim_job(self, data: st.DataObject) -> None:
        worker, lease = data.draw(st.sampled_from(self.workers)), uuid.uuid4()
        job = data.draw(st.sampled_from(list(self.jobs.values())))
        call = ("select tallybook.claim_job(%s, %s, %s, %s)", worker.id, job.id, lease, self.now)
        if worker.gone:
            self.refused("TB006", *call)
            return
        got = self.one(*call)
        self.written += 1
        if job.state in ("scheduled", "retrying") and job.run_at is not None and job.run_at <= self.now:
            self.line_up(job)
        assert got == (job.state == "available" and not self.paused)
        if got:
            assert job.place is not None
            job.place.by_id = True
            self.run(job, worker, lease)

    def run(self, job: Job, worker: Worker, lease: uuid.UUID) -> None:
        job.state, job.lease, job.worker, job.started = "running", lease, worker.id, job.started + 1

    # Rules: ends. Each is called with the lease that holds the attempt, and with leases and attempts that do not.

    @precondition(lambda self: self.running)
    @rule(data=st.data(), n=st.integers(1, 4))
    def complete(self, data: st.DataObject, n: int) -> None:
        jobs = list({job.id: job for job in (data.draw(st.sampled_from(self.running)) for _ in range(n))}.values())
        others = [job for job in self.jobs.values() if job not in jobs]
        right = [(job.lease, job.id, job.attempt) for job in jobs]
        wrong = []
        if others:
            other = data.draw(st.sampled_from(others))
            wrong = [(uuid.uuid4(), other.id, other.attempt), (right[0][0], other.id, other.attempt + 1)]
        refused = self.one(
            "select tallybook.complete_many(%s::uuid[], %s::bigint[], %s::int[])",
            *(list(column) for column in zip(*right, *wrong, strict=True)),
        )
        assert refused == [wrong_id for _, wrong_id, _ in wrong]
        for job in jobs:
            self.end(job, "completed")
        assert self.one("select tallybook.complete(%s, %s, %s)", *right[0]) is True, "twice by one lease is once"
        assert self.one("select tallybook.snooze(%s, %s, %s, '0')", *right[0]) == "refused"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), days=st.sampled_from([0, 1, 3]), final=st.booleans(), limit=st.sampled_from([None, 3]))
    def fail(self, data: st.DataObject, days: int, final: bool, limit: int | None) -> None:
        job = data.draw(st.sampled_from(self.running))
        got = self.one(
            "select tallybook.fail(%s, %s, %s, %s, %s, %s, %s, %s)",
            job.lease, job.id, job.attempt, json.dumps({"message": f"no luck in {job.attempt}"}), days * DAY, limit,
            final, self.now,
        )  # fmt: skip
        self.written += 1
        job.failures += 1
        job.errors.append(f"no luck in {job.attempt}")
        if final or job.failures >= (job.max_attempts or limit or 5):
            assert got == "dead"
            self.end(job, "dead", "failed")
        else:
            assert got == ("scheduled" if days else "available")
            self.go_on(job, self.now + days * DAY)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), days=st.sampled_from([0, 1, 3]))
    def snooze(self, data: st.DataObject, days: int) -> None:
        job = data.draw(st.sampled_from(self.running))
        call = "select tallybook.snooze(%s, %s, %s, %s, %s)"
        got = self.one(call, job.lease, job.id, job.attempt, days * DAY, self.now)
        self.written += 1
        assert got == ("scheduled" if days else "available")
        self.go_on(job, self.now + days * DAY)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.running))
        assert self.one("select tallybook.move(%s, %s, %s)", job.lease, job.id, job.attempt) == "moved"
        self.written += 1
        job.part = f"task:{job.task}"
        job.started -= 1
        job.attempt += 1
        self.line_up(job)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reason=st.sampled_from([None, "not wanted"]))
    def cancelled(self, data: st.DataObject, reason: str | None) -> None:
        job = data.draw(st.sampled_from(self.running))
        got = self.one("select tallybook.cancel_running(%s, %s, %s, %s)", job.lease, job.id, job.attempt, reason)
        assert got == "cancelled"
        self.end(job, "cancelled", reason)

    # Rules: people.

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), reason=st.sampled_from([None, "changed my mind"]))
    def cancel(self, data: st.DataObject, reason: str | None) -> None:
        job = data.draw(st.sampled_from(list(self.jobs.values())))
        got = self.one("select tallybook.cancel(%s, %s)", job.id, reason)
        if job.state == "running":
            assert got == "cancelling"
            if not job.cancel_asked:  # the first request counts
                job.reason, job.cancel_asked = reason, True
        elif job.open:
            assert got == "cancelled"
            job.state, job.reason, job.cancel_asked = "cancelled", reason, True
            if job.place is not None:
                job.place.cancelled = True
        elif job.state == "dead":  # one more attempt, which is in line and has ended
            assert got == "cancelled"
            self.written += 1
            job.state, job.reason, job.attempt = "cancelled", reason, job.attempt + 1
            job.lease = job.worker = None
            place = Attempt(job, job.attempt, by_id=True, written=self.written)
            self.lines.setdefault((job.priority, job.part), []).append(place)
        else:
            assert got == job.state

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(list(self.jobs.values())))
        if job.state not in ("dead", "cancelled") or self.holders(job.task, job.key):
            self.refused("TB005", "select tallybook.retry(%s, %s)", job.id, self.now)
            return
        got = self.one("select tallybook.retry(%s, %s)", job.id, self.now)
        self.written += 1
        job.reason, job.cancel_asked = None, False
        if job.run_at is not None:  # cancelled before its time: the retry undoes the cancel
            assert got == job.attempt
            job.state = "retrying" if job.failures else "scheduled"
        else:  # cancelled in its lane: its place stays cancelled, and the job gets another one
            assert got == job.attempt + 1
            job.failures = job.crashes = 0
            self.go_on(job, self.now)

    @rule()
    def pause(self) -> None:
        assert self.one("select tallybook.pause(%s)", QUEUE) != self.paused
        self.paused = True

    @rule()
    def resume(self) -> None:
        assert self.one("select tallybook.resume(%s)", QUEUE) == self.paused
        self.paused = False

    # Rules: time, and the work behind it.

    @rule(days=st.integers(1, 2))
    def wait(self, days: int) -> None:
        self.now += days * DAY

    @rule(most=st.sampled_from([1, 2, 1000]))
    def promote(self, most: int) -> None:
        promoted, _, next_run_at = self.row("select * from tallybook.promote(%s, null, %s)", most, self.now)
        self.written += 1
        held = [job for job in self.jobs.values() if job.run_at is not None]
        due = sorted(
            (job for job in held if job.run_at <= self.now), key=lambda job: (job.run_at, job.failures, job.id)
        )
        assert promoted == min(most, len(due))
        # If promote cannot take them all, jobs that are due at one instant may come in any order.
        ids = [row[0] for row in self.db.execute("select job_id from tallybook.scheduled")]
        came = [job for job in due if job.id not in ids]
        assert len(came) == promoted
        left = [job for job in due if job.id in ids]
        assert all(job.run_at <= later.run_at for job in came for later in left)  # type: ignore[operator]
        for job in came:
            self.line_up(job)
        rest = [job.run_at for job in held if job.run_at is not None]
        assert next_run_at == (min(rest) if rest else None)

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        mine = [job for job in self.running if job.worker == worker.id]
        renew = "select job_id from tallybook.renew(%s, 0, %s::bigint[], %s)"
        params = (worker.id, [job.id for job in mine], self.now)
        if worker.gone:
            self.refused("TB006", renew, *params)
            return
        told = {row[0] for row in self.db.execute(renew, params)}
        assert told >= {job.id for job in mine if job.cancel_asked}
        worker.seen_at, worker.suspect_since = self.now, None

    @rule()
    def rescue(self) -> None:
        dead, suspects = set(), 0
        for worker in self.workers:
            if worker.gone or worker.seen_at >= self.now - LEASE_TIME:
                continue
            if worker.suspect_since is None or worker.suspect_since > self.now - LEASE_TIME / 3:
                worker.suspect_since = worker.suspect_since or self.now
                suspects += 1
            else:
                worker.gone = True
                dead.add(worker.id)
        lost = [job for job in self.running if job.worker in dead]
        got = self.row("select * from tallybook.rescue(%s, max_crashes => 2, at => %s)", LEASE_TIME, self.now)
        self.written += 1
        assert got == (len(lost), suspects)
        alone = {job.id for job in lost if sum(other.worker == job.worker for other in lost) == 1}
        for job in sorted(lost, key=lambda job: job.id):
            job.crashes += 1
            job.errors.append("worker w died, or could not be reached")
            if job.crashes >= (2 if job.id in alone else 6):
                self.end(job, "dead", "crashed")
            else:
                self.go_on(job, self.now)
        if all(worker.gone for worker in self.workers):
            self.workers = []
            self.start_worker(TASKS)

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """A verb that is rolled back to a savepoint has no effect."""
        job = data.draw(st.sampled_from([*self.jobs.values(), Job(0, "send", 1, None, None)]))
        verb = data.draw(st.sampled_from(VERBS))
        worker = data.draw(st.sampled_from(self.workers)).id
        values = {"queue": QUEUE, "job": job.id, "attempt": job.attempt, "worker": worker, "at": self.now}
        values |= {"lease": job.lease or uuid.uuid4(), "new": uuid.uuid4()}
        self.db.execute("begin; savepoint s")
        try:
            self.db.execute(f"select * from tallybook.{verb}", values)  # noqa: S608
        except psycopg.Error as error:
            assert (error.sqlstate or "").startswith("TB"), error
        self.db.execute("rollback to savepoint s; commit")

    @rule()
    def fold(self) -> None:
        self.one("select tallybook.fold()")

    def teardown(self) -> None:
        """S3-17: after any verbs in any order, a recount agrees with the counters.

        Issue 7: every list of jobs by filter, page by page, has the jobs of the view.
        """
        assert miscounted(self.db) == []
        rng = random.Random(self.written)
        for named in [{"states": [state]} for state in STATES] + [
            some_filters(
                rng, queue=[QUEUE, "none"], task=[*TASKS], error=["NO luck in 1", "died", "luck"], unserved=[True]
            )
            for _ in range(12)
        ]:
            assert differences(self.db, **named) == ""

    # Checks of both sides after each step.

    @invariant()
    def view(self) -> None:
        columns = "id, task, state, priority, attempt, attempts, failures, crashes, max_attempts, unique_key, worker_id"
        shown = self.db.execute(
            f"select {columns}, array(select e ->> 'message' from jsonb_array_elements(errors) e),"  # noqa: S608
            " last_error, reason from tallybook.job order by id"
        ).fetchall()
        assert shown == [
            (
                job.id, job.task, job.state, job.priority, job.attempt, job.started, job.failures, job.crashes,
                job.max_attempts, job.key,
                job.worker if job.state in ("running", "completed", "cancelled") else None,
                job.errors, job.errors[-1] if job.errors else None, job.reason,
            )
            for _, job in sorted(self.jobs.items())
        ]  # fmt: skip

    @invariant()
    def attempts_are_numbered(self) -> None:
        """Every attempt from 1 on is recorded exactly once, with at most one outcome."""
        wrong = self.db.execute(
            "select job_id from tallybook.attempt group by job_id"
            " having count(*) <> max(attempt) or count(distinct attempt) <> count(*)"
        ).fetchall()
        assert wrong == []

    # Both sides.

    def holders(self, task: str, key: str | None) -> list[int]:
        return [job.id for job in self.jobs.values() if job.open and key and (job.task, job.key) == (task, key)]

    def line_up(self, job: Job) -> None:
        job.state, job.run_at = "cancelled" if job.cancel_asked else "available", None
        job.lease = job.worker = None
        job.place = Attempt(job, job.attempt, cancelled=job.cancel_asked, written=self.written)
        self.lines.setdefault((job.priority, job.part), []).append(job.place)

    def go_on(self, job: Job, run_at: datetime) -> None:
        """Create the job's next attempt; a cancel that was requested applies to it too."""
        job.attempt += 1
        job.lease = job.worker = job.place = None
        if run_at > self.now:
            job.state, job.run_at = "retrying" if job.failures else "scheduled", run_at
            if job.cancel_asked:
                job.state = "cancelled"
        else:
            self.line_up(job)

    def end(self, job: Job, state: str, reason: str | None = None) -> None:
        job.state, job.reason, job.place, job.cancel_asked = state, reason, None, False

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "running"]

    def row(self, statement: str, *params: Any) -> tuple[Any, ...]:
        (row,) = self.db.execute(statement, params)
        return row

    def one(self, statement: str, *params: Any) -> Any:
        return self.row(statement, *params)[0]

    def refused(self, sqlstate: str, statement: str, *params: Any) -> None:
        with pytest.raises(psycopg.Error) as caught:
            self.one(statement, *params)
        assert caught.value.sqlstate == sqlstate


TABLES = ("entry", "claim", "outcome", "scheduled", "dead", "tombstone", "unique_key", "worker", "lane", "queue")
VERBS = (
    "enqueue(%(queue)s, 'send', unique_key => 'k')",
    "enqueue(%(queue)s, 'send', run_at => clock_timestamp() + '1 h')",
    "enqueue_many(array[%(queue)s, %(queue)s], array['send', 'pack'], array['{}', '{}'],"
    " unique_keys => array['k', null])",
    "claim(%(worker)s, array[%(queue)s], array[3], %(new)s)",
    "claim_job(%(worker)s, %(job)s, %(new)s, %(at)s)",
    "complete(%(lease)s, %(job)s, %(attempt)s)",
    "fail(%(lease)s, %(job)s, %(attempt)s, '{}')",
    "snooze(%(lease)s, %(job)s, %(attempt)s, '0')",
    "move(%(lease)s, %(job)s, %(attempt)s)",
    "cancel_running(%(lease)s, %(job)s, %(attempt)s)",
    "cancel(%(job)s)",
    "retry(%(job)s)",
    "promote(10, null, %(at)s + interval '9 days')",
    "rescue(at => %(at)s + interval '9 days')",
    "pause(%(queue)s)",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_verbs_do_what_the_model_does(careless: Connection) -> None:
    """Random verbs in random order, some rolled back, return what the model does, and the view shows its state."""
    Ledger.db = careless
    run_state_machine_as_test(
        Ledger,
        settings=settings(
            print_blob=True,
            max_examples=1000 if THOROUGH else 60,
            stateful_step_count=100 if THOROUGH else 40,
            deadline=None,
            suppress_health_check=QUIET,
        ),
    )


TEXT = st.characters(exclude_characters="\x00", exclude_categories=["Cs"])
NAMES = st.text(TEXT, max_size=20)


@pytest.mark.slow
@settings(max_examples=1000 if THOROUGH else 80, deadline=None, suppress_health_check=QUIET)
@given(
    args=st.dictionaries(
        NAMES,
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.integers(-(10**60), 10**60)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(TEXT),
            lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=5),
        ),
        max_size=6,
    ),
    many=st.booleans(),
)
def test_args_come_back_as_they_went_in(careless: Connection, args: dict[str, Any], many: bool) -> None:
    """I13: the view shows args as they were enqueued: big integers, Unicode, nested and empty values."""

    def exact(text: str) -> Any:
        """Parse JSON with exact numbers: jsonb keeps every digit, but writes 5.8e+16 as an integer."""
        return json.loads(text, parse_float=Decimal, parse_int=Decimal)

    text = json.dumps(args)
    if many:
        enqueue = "select job_ids[1] from tallybook.enqueue_many('{mail}', '{send}', array[%s::text])"
    else:
        enqueue = "select tallybook.enqueue('mail', 'send', %s)"
    job = one(careless, enqueue, text)
    assert exact(one(careless, "select args::text from tallybook.job where id = %s", job)) == exact(text)


@settings(max_examples=300 if THOROUGH else 40, deadline=None, suppress_health_check=QUIET)
@given(
    specs=st.lists(
        st.fixed_dictionaries(
            {
                "queue": st.sampled_from(["mail", "files"]),
                "task": st.sampled_from(TASKS),
                "args": st.dictionaries(NAMES, st.integers(), max_size=2).map(json.dumps),
                "hours": st.sampled_from([None, -1, 5, 6]),
                "priority": st.sampled_from([None, 0, 2]),
                "key": KEYS,
                "limit": st.sampled_from([None, 1, 7]),
                "headers": st.sampled_from([None, '{"trace": "00-1"}']),
            }
        ),
        max_size=8,
    )
)
def test_a_batch_is_its_singles_in_order(careless: Connection, specs: list[dict[str, Any]]) -> None:
    """I14: enqueue_many does what enqueue of each job in order does, even if unique keys repeat in the batch."""

    def elsewhere(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the same jobs in queues and with keys of their own, with a suffix after a space."""
        own = secrets.token_hex(4)
        return [
            {**spec, "queue": f"{spec['queue']} {own}", "key": spec["key"] and f"{spec['key']} {own}"} for spec in specs
        ]

    def shown(ids: list[int]) -> list[tuple[Any, ...]]:
        """Return the jobs of the view, then the lanes in the order of claims, with each job as its place in `ids`."""
        jobs = careless.execute(
            "select array_position(%(ids)s, id) as n, split_part(queue, ' ', 1), task, state, priority, args, headers,"
            " max_attempts, split_part(unique_key, ' ', 1), case when state = 'scheduled' then run_at end"
            " from tallybook.job where id = any (%(ids)s) order by n",
            {"ids": ids},
        ).fetchall()
        lanes = careless.execute(
            "select split_part(l.queue, ' ', 1) as queue, l.priority, array_position(%(ids)s, e.job_id)"
            " from tallybook.entry e"
            " join tallybook.lane l using (lane_id) where e.job_id = any (%(ids)s) order by 1, 2, e.xid, e.seq",
            {"ids": ids},
        ).fetchall()
        return [*jobs, *lanes]

    base = one(careless, "select clock_timestamp()")
    for spec in specs:
        spec["run_at"] = None if spec["hours"] is None else base + timedelta(hours=spec["hours"])
        spec["some_priority"] = 2 if spec["priority"] is None else spec["priority"]
    first, second = elsewhere(specs), elsewhere(specs)
    enqueue = (
        "select tallybook.enqueue(%(queue)s, %(task)s, %(args)s, %(run_at)s, %(some_priority)s, %(key)s, %(limit)s,"
        " %(headers)s)"
    )
    ids = [one(careless, enqueue, spec) for spec in first]
    columns = ("queue", "task", "args", "run_at", "priority", "key", "limit", "headers")
    row = careless.execute(
        "select * from tallybook.enqueue_many(%s::text[], %s::text[], %s::text[], %s::timestamptz[], %s::int[],"
        " %s::text[], %s::int[], %s::text[])",
        [[spec[column] for spec in second] for column in columns],
    ).fetchone()
    assert row is not None
    assert [ids.index(job) for job in ids] == [row[0].index(job) for job in row[0]], "the same of them are new"
    assert row[1] == [ids.index(job) == n for n, job in enumerate(ids)]
    assert shown(row[0]) == shown(ids)
