"""Subjects against a small reference model of FetchQ's documents, step by step, on the real server.

The model is a dict of documents with a state, args, iterations, failures and a time. It knows no tables. It has to know
one thing about ours: a job in its lane that is moved to later stays in the lane until promote runs (`lined`).
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from psycopg import sql

from support.chance import QUIET, THOROUGH
from support.database import Connection
from support.hands import Hands, Job
from support.subjects import call, end, forget, many, push, upsert

DAY = timedelta(days=1)
TABLES = ("entry", "claim", "outcome", "scheduled", "dead", "tombstone", "amendment", "subject_job", "worker", "lane")
NAMES = st.sampled_from("abc")
DAYS = st.sampled_from([None, -1, 1, 2])
NUMBERS = st.integers(1, 2)
ARGS = st.sampled_from([None, 7])


@dataclass(eq=False)
class Document:
    job: int
    n: int
    now: datetime
    run_at: datetime | None = None
    """The time it is planned for; in its lane, the time to which an upsert has moved it."""
    lined: bool = True
    """Whether its job is in its lane, although it may have been moved to later."""
    attempt: Job | None = None
    ended: str | None = None
    max_attempts: int | None = None
    iterations: int = 0
    failures: int = 0
    attempts: int = 0
    crashes: int = 0
    cancelled: bool = False
    """Whether it will be forgotten once its attempt has ended."""

    @property
    def due(self) -> bool:
        return self.run_at is not None and self.run_at < self.now + DAY / 2

    @property
    def next_run_at(self) -> datetime | None:
        return None if self.lined and self.due else self.run_at

    @property
    def state(self) -> str:
        return self.ended or ("active" if self.attempt else "planned" if self.next_run_at else "pending")

    @property
    def report(self) -> str | None:
        return {"active": "active", "dead": "dead", "killed": "dead"}.get(self.state)


class Documents(RuleBasedStateMachine):
    """One queue, one task and one worker at a time; every rule runs one verb on both sides."""

    db: ClassVar[Connection]

    def __init__(self) -> None:
        super().__init__()
        for table in TABLES:
            self.db.execute(sql.SQL("delete from tallybook.{}").format(sql.Identifier(table)))
        self.hands = Hands(self.db)
        self.base: datetime = self.hands.one("select date_trunc('second', clock_timestamp())")
        self.documents: dict[str, Document] = {}
        self.gone: dict[int, tuple[str, Document]] = {}
        """Subjects that were cancelled before they started, by job; a person may retry them."""

    def time(self, days: int | None) -> datetime | None:
        return None if days is None else self.base + days * DAY

    # Producers.

    @rule(name=NAMES, n=NUMBERS, days=DAYS, limit=st.sampled_from([None, 2]))
    def push(self, name: str, n: int, days: int | None, limit: int | None) -> None:
        job, created = push(self.db, name, args={"n": n}, run_at=self.time(days), max_attempts=limit)
        assert created is (name not in self.documents)
        if created:
            self.made(name, job, n, days)
            self.documents[name].max_attempts = limit
        assert job == self.documents[name].job

    @rule(rows=st.lists(st.tuples(NAMES, NUMBERS, DAYS), min_size=1, max_size=4))
    def push_many(self, rows: list[tuple[str, int, int | None]]) -> None:
        for (name, n, days), (subject, job, report, old, new) in zip(rows, self.batch("push", rows), strict=True):
            assert (subject, old) == (name, None)
            assert report == ("unchanged" if name in self.documents else "created")
            if report == "created":
                self.made(name, job, n, days)
                assert days != 1 or new == self.documents[name].run_at
            assert job == self.documents[name].job

    @rule(n=NUMBERS)
    def append(self, n: int) -> None:
        ((job, name),) = call(self.db, "subject_append", queue="q", task="t", args={"n": n})
        self.made(name, job, n, None)

    @rule(name=NAMES, n=NUMBERS, days=DAYS)
    def upsert(self, name: str, n: int, days: int | None) -> None:
        self.upserted(name, n, days, upsert(self.db, name, args={"n": n}, run_at=self.time(days)))

    @rule(rows=st.lists(st.tuples(NAMES, NUMBERS, DAYS), min_size=1, max_size=4))
    def upsert_many(self, rows: list[tuple[str, int, int | None]]) -> None:
        last = {name: place for place, (name, _, _) in enumerate(rows)}
        said = self.batch("upsert", rows)
        for place, ((name, n, days), (subject, *report)) in enumerate(zip(rows, said, strict=True)):
            assert subject == name
            if last[name] == place:
                self.upserted(name, n, days, tuple(report))
        for (name, _, _), place in zip(rows, range(len(rows)), strict=True):
            if last[name] != place:
                won = said[last[name]][2]
                assert said[place][1:3] == (said[last[name]][1], "unchanged" if won in ("created", "updated") else won)

    def batch(self, verb: str, rows: list[tuple[str, int, int | None]]) -> list[tuple[Any, ...]]:
        names, numbers, days = zip(*rows, strict=True)
        return many(
            self.db, f"subject_{verb}_many", names, args=[json.dumps({"n": n}) for n in numbers],
            run_ats=[self.time(one) for one in days],
        )  # fmt: skip

    def made(self, name: str, job: int, n: int, days: int | None) -> None:
        self.documents[name] = made = Document(job, n, self.base)
        if days is not None and days > 0:
            made.run_at, made.lined = self.time(days), False

    def upserted(self, name: str, n: int, days: int | None, said: tuple[Any, ...]) -> None:
        job, report, old, new = said
        found = self.documents.get(name)
        if found is None:
            assert (report, old) == ("created", None)
            self.made(name, job, n, days)
        elif found.report:
            assert said == (found.job, found.report, None, None)
        elif found.state == "completed":
            assert (report, old) == ("updated", None)
            assert job != found.job
            self.made(name, job, n, days)
            self.documents[name].iterations = found.iterations
        else:
            assert job == found.job
            run_at = self.time(days)
            moves = run_at not in (None, found.run_at)
            if found.lined:  # one that runs at once is not moved to the past
                moves = moves and ((days or 0) > 0 or found.run_at is not None)
            else:
                assert old == found.run_at
            changed = n != found.n or moves
            found.n, found.run_at = n, run_at if moves else found.run_at
            assert new == found.run_at or (found.lined and not moves)
            assert report == ("updated" if changed else "unchanged")

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        found = self.documents.get(name)
        expected = "unknown" if found is None else "active" if found.state == "active" else "forgotten"
        assert forget(self.db, name) == expected
        if found is not None and expected == "forgotten":
            del self.documents[name]
            if found.state in ("planned", "pending"):
                self.gone[found.job] = (name, found)

    # People.

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        if (found := self.documents.get(name)) is None:
            return
        said = self.hands.one("select tallybook.cancel(%s)", found.job)
        if found.state == "active":
            assert said == "cancelling"
            found.cancelled = True
        elif found.state in ("planned", "pending"):
            assert said == "cancelled"
            del self.documents[name]
            self.gone[found.job] = (name, found)
        elif found.state in ("dead", "killed"):  # a person's retry would put it in line, as it does with a dead letter
            assert said == "cancelled"
            del self.documents[name]
            found.ended, found.lined = None, True
            self.gone[found.job] = (name, found)
        else:
            assert said == found.state

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def retry_cancelled(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.gone)))
        name, found = self.gone[job]
        if name in self.documents:
            with pytest.raises(psycopg.Error) as caught:
                self.hands.one("select tallybook.retry(%s)", job)
            assert caught.value.sqlstate == "TB005"
            return
        self.hands.one("select tallybook.retry(%s)", job)
        del self.gone[job]
        self.documents[name] = found
        if found.lined:
            found.failures = found.crashes = 0
            found.run_at = found.next_run_at

    @rule(name=NAMES)
    def retry_dead(self, name: str) -> None:
        if (found := self.documents.get(name)) is None or found.report != "dead":
            return
        self.hands.one("select tallybook.retry(%s)", found.job)
        found.ended, found.failures, found.crashes, found.lined = None, 0, 0, True

    # Maintenance.

    @rule(days=st.integers(1, 2))
    def wait(self, days: int) -> None:
        """Let time pass: all that is scheduled comes nearer."""
        for table in ("scheduled", "amendment"):
            query = sql.SQL("update tallybook.{} set run_at = run_at - %s").format(sql.Identifier(table))
            self.db.execute(query, (days * DAY,))
        for one in self.everything():
            if one.run_at is not None:
                one.run_at -= days * DAY

    @rule()
    def promote(self) -> None:
        due = [one for one in self.everything() if not one.lined and one.due]
        moved = [one for one in self.documents.values() if one.lined and one.run_at]
        ((promoted, *_),) = call(self.db, "promote")
        assert promoted == len(due)
        for one in due:
            one.lined, one.run_at = True, None
        kept = dict(self.db.execute("select job_id, run_at from tallybook.amendment").fetchall())
        for one in moved:  # they leave the lane, unless the tombstone of a cancelled attempt still exists
            if kept.get(one.job) is None:
                one.lined, one.run_at = one.state == "pending", one.next_run_at

    def everything(self) -> list[Document]:
        return [*self.documents.values(), *(found for _, found in self.gone.values())]

    @rule()
    def die(self) -> None:
        """Let the worker die: its subjects are eligible again, and another worker starts."""
        mine = [(name, one) for name, one in self.documents.items() if one.state == "active"]
        self.hands.rescued()
        for name, one in mine:
            one.crashes += 1
            if one.crashes >= (3 if len(mine) == 1 else 9):
                self.over(name, one, "dead")
            else:
                self.again(name, one, None)
        self.hands = Hands(self.db)

    # The worker.

    @rule(most=st.sampled_from([1, 2, None]))
    def claim(self, most: int | None) -> None:
        """Each subject that starts was pending; a postponed or cancelled one goes where it belongs.

        A worker that takes all leaves nothing pending.
        """
        while jobs := self.hands.claim(most or 100):
            self.started(jobs)
            if most:
                return
        if most is None:
            assert [one for one in self.documents.values() if one.state == "pending"] == []

    def started(self, jobs: list[Job]) -> None:
        by_job = {one.job: one for one in self.everything()}
        for job in jobs:
            found = by_job.get(job.id)
            if job.cancelled:
                assert found is None or job.id in self.gone
                self.hands.say("cancel_running", job)
            elif job.blocked_by == "postponed":
                assert found is not None
                assert found.state == "planned"
                self.hands.say("postpone", job)
                found.lined = False
            else:
                assert found is not None
                assert (found.state, job.args) == ("pending", {"n": found.n})
                assert job.id in {one.job for one in self.documents.values()}
                found.run_at, found.attempt = None, job
                found.attempts += 1

    active = precondition(lambda self: any(one.state == "active" for one in self.documents.values()))

    def pick(self, data: st.DataObject) -> tuple[str, Document, Job]:
        # In the order of their jobs: an appended subject has a random name.
        active = sorted(self.documents.items(), key=lambda item: item[1].job)
        name, found = data.draw(st.sampled_from([item for item in active if item[1].state == "active"]))
        assert found.attempt is not None
        return name, found, found.attempt

    @active
    @rule(data=st.data(), days=st.sampled_from([-1, 1, 2]), args=ARGS)
    def reschedule(self, data: st.DataObject, days: int, args: int | None) -> None:
        name, found, job = self.pick(data)
        said = end(self.hands, "subject_reschedule", job, run_at=self.time(days), **self.given(found, args))
        assert said == ("scheduled" if days > 0 else "available")
        found.iterations += 1
        found.failures = found.crashes = found.attempts = 0
        self.again(name, found, self.time(days) if days > 0 else None)

    @active
    @rule(data=st.data(), args=ARGS, plain=st.booleans())
    def complete(self, data: st.DataObject, args: int | None, plain: bool) -> None:
        name, found, job = self.pick(data)
        if plain:
            assert self.hands.say("complete", job) is True
        else:
            assert end(self.hands, "subject_complete", job, **self.given(found, args)) == "completed"
        found.iterations += 1
        found.failures = 0
        self.over(name, found, "completed")

    @active
    @rule(data=st.data(), args=ARGS)
    def kill(self, data: st.DataObject, args: int | None) -> None:
        name, found, job = self.pick(data)
        assert end(self.hands, "subject_kill", job, **self.given(found, args)) == "dead"
        found.iterations += 1
        self.over(name, found, "killed")

    @active
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name, _, job = self.pick(data)
        assert end(self.hands, "subject_drop", job) == "dropped"
        del self.documents[name]

    @active
    @rule(data=st.data(), later=st.booleans(), plain=st.booleans())
    def reject(self, data: st.DataObject, later: bool, plain: bool) -> None:
        name, found, job = self.pick(data)
        run_in = "1 day" if later else "0"
        if plain:
            said = self.hands.fail(job, run_in)
        else:
            said = end(self.hands, "subject_reject", job, message="no luck", retry_in=run_in)
        found.failures += 1
        if found.failures >= (found.max_attempts or 5):
            assert said == "dead"
            self.over(name, found, "dead")
        else:
            assert said == ("scheduled" if later else "available")
            if later:
                query = "select run_at from tallybook.scheduled where job_id = %s"
                self.again(name, found, self.hands.one(query, job.id))
            else:
                self.again(name, found, None)

    def given(self, found: Document, args: int | None) -> dict[str, Any]:
        if args is None:
            return {}
        found.n = args
        return {"args": {"n": args}}

    def again(self, name: str, found: Document, run_at: datetime | None) -> None:
        """Continue with the next attempt, unless the subject was cancelled."""
        found.attempt, found.run_at, found.lined = None, run_at, run_at is None
        if found.cancelled:
            found.cancelled = False
            del self.documents[name]
            self.gone[found.job] = (name, found)

    def over(self, name: str, found: Document, state: str) -> None:
        found.attempt, found.ended, found.cancelled = None, state, False

    # Checks of both sides after each step.

    @invariant()
    def view(self) -> None:
        shown = self.db.execute(
            "select subject, job_id, state, (args ->> 'n')::int, iterations, failures, attempts,"
            " case when state = 'planned' then next_run_at end from tallybook.subject order by subject"
        ).fetchall()
        assert shown == [
            (name, one.job, one.state, one.n, one.iterations, one.failures, one.attempts, one.next_run_at)
            for name, one in sorted(self.documents.items())
        ]

    @invariant()
    def one_job_each(self) -> None:
        """At most one job of a name is open."""
        twice = self.db.execute(
            "select subject from tallybook.job where state not in ('completed', 'cancelled', 'dead')"
            " group by subject having count(*) > 1"
        ).fetchall()
        assert twice == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("counts", [True, False], ids=["guard", "control"])
def test_subjects_do_what_documents_do(careless: Connection, counts: bool) -> None:
    """S3-01, S3-02, S3-07, S3-13, S3-22, S3-25, S3-27, S3-28, S3-29: random verbs agree with the model.

    In random order each verb reports what the model does, and the view shows the model's documents.
    """
    if not counts:  # a reschedule that does not count the iteration is found
        careless.execute(
            "create or replace function tallybook._subject_iterated(p_options jsonb, p_at timestamptz) returns jsonb"
            " language sql as 'select p_options'"
        )
    Documents.db = careless
    how = settings(
        # To find the control's fault is enough: no shorter example is searched for.
        phases=tuple(Phase) if counts else [Phase.generate],
        print_blob=True,
        report_multiple_bugs=False,
        max_examples=500 if THOROUGH else 40,
        stateful_step_count=60 if THOROUGH else 30,
        deadline=None,
        suppress_health_check=QUIET,
    )
    with nullcontext() if counts else pytest.raises(AssertionError):
        run_state_machine_as_test(Documents, settings=how)
