"""The view job and lists of it: lists by filter, compared with the view; verbs for many jobs; the times of a job."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from support.broken import without
from support.chance import THOROUGH
from support.database import Connect, Connection, call, one
from support.hands import Hands, Job, put, put_many, states
from support.job_lists import STATES, differences, ids, page, pages, some_filters
from support.sessions import crossed, rows_read
from support.subjects import clock, promote, push

LATER = datetime.now(UTC) + timedelta(days=1)


def test_pages_join_to_the_list(db: Connection) -> None:
    """Jobs are listed newest first, in pages, of all queues or of one."""
    jobs = [put(db, queue="q" if n % 2 else "r", args={"n": n}) for n in range(10)]
    assert ids(db) == jobs[::-1]
    assert ids(db, queue="q") == jobs[::-2]
    assert ids(db, queue="none") == []
    assert [len(page) for page in pages(db, max_jobs=4)] == [4, 4, 2]


def test_jobs_are_listed_beside_an_open_transaction(db: Connection, hands: Hands, connect: Connect) -> None:
    """Available jobs are listed while a lane's cursor waits for a transaction, and so is the job that commits late."""
    late = connect(autocommit=False)
    last = put(late)
    put(db)
    assert len(hands.run_all()) == 1
    job = put(db)
    assert ids(db, states=["available"]) == [job]
    late.commit()
    assert sorted(ids(db, states=["available"])) == sorted([last, job])


def test_many_are_cancelled_retried_and_dropped(db: Connection, hands: Hands) -> None:
    """Each job has its own answer, once; one that has ended or does not exist stops no other."""
    over, runs, dies, stands = (put(db) for _ in range(4))
    first, second, third = hands.start(3)
    hands.complete(first)
    hands.fail(third, final=True)
    assert call(db, "cancel_jobs", jobs=[stands, runs, over, 99, over], reason="no more") == [
        (over, "refused", f"job {over} is completed already"),
        (runs, "cancelling", None),
        (stands, "cancelled", None),
        (99, "unknown", "there is no job 99"),
    ]
    hands.say("cancel_running", second)
    assert call(db, "retry_jobs", jobs=[dies, stands, over, 99]) == [
        (over, "refused", f"job {over} is not dead or cancelled. It is completed"),
        (dies, "retried", "attempt 2"),
        (stands, "retried", "attempt 2"),
        (99, "unknown", "there is no job 99"),
    ]
    assert states(db, over, runs, dies, stands) == ["completed", "cancelled", "available", "available"]
    for job in hands.start():
        hands.fail(job, final=True)
    assert call(db, "drop_jobs", jobs=[stands, over, 99]) == [
        (over, "refused", f"job {over} is completed"),
        (stands, "dropped", None),
        (99, "unknown", "there is no job 99"),
    ]
    assert db.execute("select job_id from tallybook.dead").fetchall() == [(dies,)]


@pytest.mark.direct("watches which session waits for which")
def test_retries_of_the_same_dead_letters_do_not_deadlock(db: Connection, hands: Hands, connect: Connect) -> None:
    """F18: retry_dead and retry_jobs lock the same dead letters in the same order, however these died."""
    jobs = [put(db) for _ in range(3)]
    for job in hands.start()[::-1]:
        hands.fail(job, final=True)
    both = crossed(
        db, connect, lambda third: third.execute("select tallybook.retry(%s)", (jobs[1],)),
        lambda conn: conn.execute("select * from tallybook.retry_dead()").fetchone(),
        lambda conn: [how for _, how, _ in call(conn, "retry_jobs", jobs=jobs)],
    )  # fmt: skip
    assert both in ([(3, 0), ["refused"] * 3], [(0, 3), ["retried"] * 3])
    assert states(db, *jobs) == ["available"] * 3


@pytest.mark.parametrize("verb", ["retry_jobs", "cancel_jobs", "drop_jobs"])
def test_at_most_a_thousand_at_once(db: Connection, verb: str) -> None:
    """More than 1000 ids are refused before any job is changed."""
    job = put(db)
    with pytest.raises(psycopg.Error, match="at most 1000 ids") as said:
        call(db, verb, jobs=[job, *range(2, 1002)])
    assert said.value.sqlstate == "TB005"
    with pytest.raises(psycopg.Error, match="at most 1000 ids"):
        db.execute(f"select tallybook.{verb}(array[1, null]::bigint[])")  # type: ignore[arg-type]
    assert states(db, job) == ["available"]


class Shop:
    """Random verbs of producers, workers, people and services, on two queues."""

    def __init__(self, db: Connection, seed: int) -> None:
        self.db, self.rng = db, random.Random(seed)
        self.hands = Hands(db, "q", "r")
        self.taken: list[Job] = []
        self.jobs: list[int] = []

    def put(self) -> None:
        rng = self.rng
        more: dict[str, Any] = {"queue": rng.choice("qr"), "task": rng.choice("tu"), "priority": rng.choice([1, 2])}
        kind = rng.choice(["plain", "plain", "later", "order", "fair", "key", "linked", "child", "subject"])
        more |= {
            "later": {"run_at": LATER},
            "order": {"order_key": rng.choice("ab")},
            "fair": {"options": {"fair_key": rng.choice("xy")}},
            "key": {"unique_key": rng.choice("kl")},
            "linked": {"headers": {"links": {"submission": rng.choice([1, "1", 2])}}},
        }.get(kind, {})
        if kind == "child" and self.jobs:
            parent = rng.choice(self.jobs)
            if states(self.db, parent) not in (["dead"], ["gone"]):
                self.jobs.append(self.hands.one("select tallybook.enqueue_after('q', 't', %s)", [parent]))
        elif kind == "subject":
            self.jobs.append(push(self.db, rng.choice(["one", "two"]), task="s")[0])
        else:
            self.jobs.append(put(self.db, **more))

    def end(self) -> None:
        if not self.taken:
            self.taken = self.hands.start(self.rng.randint(1, 4))
            return
        job = self.taken.pop(self.rng.randrange(len(self.taken)))
        more: dict[str, list[Any]] = {"snooze": ["1 h"], "crash": ['{"type": "Crash", "message": "out of memory"}']}
        fails: dict[str, dict[str, Any]] = {"again": {}, "later": {"retry_in": "1 h"}, "dead": {"final": True}}
        how = self.rng.choice(["complete", "complete", *fails, "snooze", "cancel_running", "move", "crash"])
        if how in fails:
            self.hands.fail(job, **fails[how])
        else:
            self.hands.say(how, job, *more.get(how, []))

    def person(self) -> None:
        if not self.jobs:
            return
        some = self.rng.sample(self.jobs, min(3, len(self.jobs)))
        verb = self.rng.choice(["cancel_jobs", "retry_jobs", "drop_jobs", "claim_job"])
        if verb == "claim_job":
            lease = uuid4()
            if self.db.execute("select from tallybook.job where id = %s", some[:1]).fetchone():
                self.hands.one("select tallybook.claim_job(%s, %s, %s)", self.hands.worker, some[0], lease)
                found = self.hands.claimed_jobs(lease)
                self.taken += [job for job in found if job.blocked_by not in ("cancelled", "postponed")]
            return
        call(self.db, verb, jobs=some)

    def step(self) -> None:
        self.rng.choice([self.put, self.put, self.end, self.end, self.end, self.person, self.promote])()

    def leave(self) -> None:
        """Leave one dead and one running job, so that none of these states is missing by chance."""
        left = [put(self.db, priority=0) for _ in range(2)]
        taken = []
        while len(taken) < 2:
            for job in self.hands.claim(2):
                (taken if job.id in left else self.taken).append(job)
        self.hands.fail(taken[0], final=True)
        self.taken.append(taken[1])

    def promote(self) -> None:
        self.hands.one("select tallybook.promote(3, at => clock_timestamp() + interval '1 h')")
        self.hands.one("select tallybook.fair_release()")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100 if THOROUGH else 2))
def test_the_pages_are_the_view(db: Connection, seed: int) -> None:
    """Whatever was done to the jobs, all pages of a list together have the view's jobs for its filter, each once."""

    def filters(db: Connection, rng: random.Random) -> list[dict[str, Any]]:
        row = db.execute("select array_agg(enqueued_at order by id) from tallybook.job").fetchone()
        times = (row and row[0]) or [LATER]
        return [
            {},
            *({"states": [state]} for state in STATES),
            *({"states": [state], "queue": "q"} for state in STATES),
            *(
                some_filters(
                    rng,
                    queue=["q", "r"],
                    task=["t", "s"],
                    error=["no luck", "MEMORY"],
                    since=times,
                    before=times,
                    links=[{"submission": 1}],
                    unserved=[True],
                )
                for _ in range(10)
            ),
        ]

    shop = Shop(db, seed)
    seen: set[str] = set()
    for _ in range(2):
        for _ in range(50):
            shop.step()
        shop.leave()
        for named in filters(db, shop.rng):
            assert differences(db, **named) == "", f"seed {seed}"
        seen |= {state for (state,) in db.execute("select distinct state from tallybook.job")}
    assert len(seen) >= 5 and seen >= {"available", "running", "dead"}, "the test has seen what it is about"


def test_control_a_source_that_is_left_out_is_noticed(db: Connection) -> None:
    """Control: without the tombstones a completed job ahead of the cursor is missing."""
    hands, lease = Hands(db, "q"), uuid4()
    put(db)
    job = put(db)
    hands.one("select tallybook.claim_job(%s, %s, %s)", hands.worker, job, lease)
    hands.complete(*hands.claimed_jobs(lease))
    assert differences(db, states=["completed"]) == ""
    without(db, "_job_sources", "ids := ids || 'taken'::text; mine", "mine")
    assert f"missing: [({job}, " in differences(db, states=["completed"])


def test_a_page_reads_a_bounded_number_of_rows(db: Connection, connect: Any) -> None:
    """Issue 7: even with plans from empty tables a page reads a bounded number of rows, and reports how far it got."""
    pages = {
        "the newest": {},
        "the line": {"states": ["available"]},
        "completed behind the line": {"states": ["completed"]},
        "a task that there is not": {"task": "none"},
        "a quiet queue": {"queue": "r"},
        "what has failed": {"error": "no luck"},
        "what is retrying": {"states": ["retrying"]},
        "since tomorrow": {"since": LATER},
    }
    tables = """
select format('%I.%I', n.nspname, c.relname) from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where n.nspname = 'tallybook' and c.relkind = 'r'"""
    old = connect()
    hands = Hands(db, "q", "r")
    for (table,) in db.execute(tables).fetchall():
        db.execute(f"vacuum (analyze) {table}".encode())
    for named in pages.values():
        ids(old, **named)
    quiet = put(db, queue="r")
    failed = put(db)
    for job in hands.start() + hands.start():
        hands.complete(job) if job.id == quiet else hands.fail(job, "1 h")
    put_many(db, 20_000)
    for what, named in pages.items():
        assert rows_read(old, lambda named=named: page(old, **named, max_looked=1000)) < 6_000, what  # type: ignore[misc]
    rows, more = page(old, task="none", max_looked=1000)
    assert rows == [] and more is not None and more["looked_to"] is not None
    assert ids(old, states=["completed"]) == ids(old, queue="r") == [quiet]
    assert ids(old, states=["retrying"]) == ids(old, error="LUCK") == [failed]
    assert ids(old, task="none", max_looked=1000) == []
    control = rows_read(
        old, lambda: old.execute("select id from tallybook.job where task = 'none' order by id desc").fetchall()
    )
    assert control > 20_000, "control: without a bound all is read"


def test_a_page_is_bounded_after_an_analyze_beside_a_bulk_insert(db: Connection, connect: Any) -> None:
    """If the tables are analyzed while many jobs are inserted, the planner expects few rows: a page still reads few."""
    put(db)
    bulk = connect(autocommit=False)
    put_many(bulk, 5_000)
    db.execute("analyze tallybook.entry")
    bulk.commit()
    known = one(db, "select sum(reltuples) from pg_class where relname like 'entry_default_%' and relkind = 'r'")
    assert known < 10, "the statistics are from before the commit"
    assert rows_read(db, lambda: page(db, max_looked=1000)) < 1_000


# --- updated_at, when a job's state began, and last_attempt_at, when it was last started -----------------------------


def times(db: Connection, job: int) -> tuple[Any, ...]:
    """The state, updated_at and last_attempt_at."""
    (row,) = db.execute("select state, updated_at, last_attempt_at from tallybook.job where id = %s", [job]).fetchall()
    return row


def started(db: Connection, job: int) -> datetime:
    """Return the time of the job's newest claim, even if that started nothing."""
    return one(db, "select max(started_at) from tallybook.attempt where job_id = %s", job)


def test_from_line_to_end(db: Connection, hands: Hands) -> None:
    """S1-02: updated_at is the time of the enqueue, then the claim, then the end; last_attempt_at is the claim's."""
    job = put(db)
    enqueued_at = one(db, "select enqueued_at from tallybook.job where id = %s", job)
    assert times(db, job) == ("available", enqueued_at, None)
    (attempt,) = hands.start()
    claimed_at = started(db, job)
    assert times(db, job) == ("running", claimed_at, claimed_at)
    hands.complete(attempt)
    assert times(db, job) == ("completed", one(db, "select ended_at from tallybook.attempt"), claimed_at)


def test_through_a_failure(db: Connection, hands: Hands) -> None:
    """updated_at is the failure, then the due time, then the death; last_attempt_at is the newest start."""
    job = put(db)
    hands.fail(hands.start()[0], "1 h")
    first, failed_at = started(db, job), one(db, "select ended_at from tallybook.attempt where attempt = 1")
    assert times(db, job) == ("retrying", failed_at, first)
    db.execute("update tallybook.scheduled set run_at = clock_timestamp()")
    due_at = one(db, "select run_at from tallybook.scheduled")
    assert promote(db) == 1
    assert times(db, job) == ("available", due_at, first)
    (attempt,) = hands.start()
    assert started(db, job) > first
    hands.fail(attempt, final=True)
    assert times(db, job) == ("dead", one(db, "select died_at from tallybook.dead"), started(db, job))


def test_what_was_never_started(db: Connection, hands: Hands) -> None:
    """updated_at is the enqueue, then the cancel; without a start, even if set aside, last_attempt_at is null."""
    later, aside = put(db, run_at=clock(db, "1 h")), put(db)
    enqueued_at = one(db, "select enqueued_at from tallybook.job where id = %s", later)
    assert times(db, later) == ("scheduled", enqueued_at, None)
    one(db, "select tallybook.cancel(%s)", later)
    state, since, start = times(db, later)
    assert (state, start) == ("cancelled", None)
    assert enqueued_at < since <= clock(db)
    (attempt,) = hands.claim()
    assert hands.say("move", attempt) == "moved"
    assert times(db, aside)[::2] == ("available", None)


def test_many_iterations(db: Connection, hands: Hands) -> None:
    """last_attempt_at is the newest start, even after a later attempt was set aside before its start."""
    job = put(db)
    attempt: Job
    for _ in range(4):
        (attempt,) = hands.start()
        assert hands.say("snooze", attempt, "0")
    last = started(db, job)
    assert times(db, job)[2] == last
    (attempt,) = hands.claim()
    assert hands.say("move", attempt) == "moved"
    assert started(db, job) > last  # the claim whose attempt did not start
    assert times(db, job)[2] == last
