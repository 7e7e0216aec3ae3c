"""Ends of jobs: in a user's transaction, with a result, by expiry, with on_dead; dead letters; cancel_many."""

import json
import threading
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from support.database import Connect, Connection, one
from support.hands import Hands, Job, put, states
from support.subjects import clock, end
from support.waiting import wait_until

pytestmark = pytest.mark.direct("holds transactions open beside one another and watches which waits")


# --- in a user's transaction ---------------------------------------------------------------------------------------

LEASE = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
ENDED = "select tallybook.ended(%s, %s, %s)"
COMPLETE = "select tallybook.complete(%s, %s, 1)"


def claimed(db: Connection, jobs: int = 1) -> list[int]:
    """Return new jobs that one worker has claimed under LEASE."""
    ids = [one(db, "select tallybook.enqueue('mail', 'send')") for _ in range(jobs)]
    worker = one(db, "select tallybook.worker_start('w', array['mail'])")
    assert one(db, "select jobs from tallybook.claim(%s, array['mail'], array[99], %s)", worker, LEASE) == jobs
    return ids


def test_ended_says_how_an_attempt_ended(db: Connection) -> None:
    """P5 F7: ended is running until the attempt has ended, then how; null for what the lease does not hold."""
    jobs = claimed(db, 5)
    assert [one(db, ENDED, LEASE, job, 1) for job in jobs] == ["running"] * 5
    one(db, COMPLETE, LEASE, jobs[0])
    one(db, "select tallybook.fail(%s, %s, 1, '{}')", LEASE, jobs[1])
    one(db, "select tallybook.snooze(%s, %s, 1, '1 h')", LEASE, jobs[2])
    one(db, "select tallybook.fail(%s, %s, 1, '{}', final => true)", LEASE, jobs[3])
    found = [one(db, ENDED, LEASE, job, 1) for job in jobs]
    assert found == ["completed", "failed", "snoozed", "dead", "running"]
    assert one(db, ENDED, LEASE, jobs[0], 2) is None
    assert one(db, ENDED, "00000000-0000-0000-0000-000000000001", jobs[0], 1) is None


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_complete_in_a_transaction_of_the_users(db: Connection, connect: Connect, level: str) -> None:
    """S5-03 P4: at every isolation level the end is part of the transaction: unseen before, gone with a rollback."""
    (job,) = claimed(db)
    user = connect()
    for closing, expected in (("rollback", "running"), ("commit", "completed")):
        user.execute(f"begin isolation level {level}")  # type: ignore[call-overload]
        assert one(user, COMPLETE, LEASE, job) is True
        assert one(user, COMPLETE, LEASE, job) is True  # a repeated call
        assert one(db, ENDED, LEASE, job, 1) == "running"
        user.execute(closing)  # type: ignore[call-overload]
        assert one(db, ENDED, LEASE, job, 1) == expected


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("closing", ["commit", "rollback"])
def test_two_ends_of_one_attempt_meet(db: Connection, connect: Connect, level: str, closing: str) -> None:
    """P5: at every isolation level an end waits for another uncommitted one; exactly one of the two is accepted."""
    (job,) = claimed(db)
    first, second = connect(), connect()
    first.execute("begin")
    assert one(first, "select tallybook.fail(%s, %s, 1, '{}')", LEASE, job) == "scheduled"
    second.execute(f"begin isolation level {level}")  # type: ignore[call-overload]
    said: list[Any] = []

    def complete() -> None:
        try:
            said.append(one(second, COMPLETE, LEASE, job))
            second.execute("commit")
        except psycopg.errors.SerializationFailure:
            said.append(False)

    waiting = threading.Thread(target=complete)
    waiting.start()
    wait_until(
        lambda: one(db, "select pg_blocking_pids(%s)", second.info.backend_pid) == [first.info.backend_pid],
        "the second waits for the first",
    )
    first.execute(closing)  # type: ignore[call-overload]
    waiting.join(60)
    assert said == [closing == "rollback"]
    assert one(db, ENDED, LEASE, job, 1) == ("failed" if closing == "commit" else "completed")


def test_the_mark_of_an_atomic_tasks_transaction(db: Connection) -> None:
    """P4: the mark ends with its transaction, does not count as a query, and limits the idle time to 10 s."""
    assert one(db, "select tallybook._atomic()") is False
    for left in (
        "commit",
        "rollback",
        "commit; begin",
        "rollback; begin; set transaction isolation level serializable",
    ):
        db.execute("begin; set local tallybook.atomic = on; set transaction isolation level repeatable read")
        assert one(db, "select tallybook._atomic()") is True
        assert one(db, "show idle_in_transaction_session_timeout") == "10s"
        db.execute("savepoint s; select 1; rollback to s")
        assert one(db, "select tallybook._atomic()") is True
        db.execute(left)  # type: ignore[call-overload]
        assert one(db, "select tallybook._atomic()") is False
        assert one(db, "show idle_in_transaction_session_timeout") == "0"
        db.execute("rollback")


# --- results -------------------------------------------------------------------------------------------------------


def result(db: Connection, job: int) -> tuple[Any, ...] | None:
    return db.execute("select state, result, error from tallybook.result(%s)", (job,)).fetchone()


def test_a_result_is_kept_with_the_outcome(db: Connection, hands: Hands) -> None:
    """S4-17: a handler's result is stored with the outcome; if it returned nothing, nothing is stored."""
    put(db), put(db)
    first, second = hands.start()
    assert end(hands, "complete", first, result={"sum": 3}) is True
    hands.complete(second)
    assert result(db, first.id) == ("completed", {"sum": 3}, None)
    assert result(db, second.id) == ("completed", None, None)
    assert result(db, 2**50) is None


def test_complete_said_twice_is_accepted(db: Connection, hands: Hands) -> None:
    """A repeated complete_many is accepted, with results and without, and the first result stays. P5"""
    jobs = [put(db) for _ in range(3)]
    started = hands.start()
    params = ([j.lease for j in started], jobs, [1, 1, 1])
    for results in ([json.dumps(1), None, "!too strange"], [json.dumps(2), None, None], None):
        assert hands.one("select tallybook.complete_many(%s, %s, %s, %s)", *params, results) == []
    assert [result(db, job) for job in jobs] == [
        ("completed", 1, None),
        ("completed", None, None),
        ("completed", None, {"message": "its result was not kept: too strange"}),
    ]


def test_a_refused_completion_keeps_no_result(db: Connection, hands: Hands) -> None:
    """A caller that lost the right to end an attempt gets its id back; the other attempts of the call complete. P5"""
    jobs = [put(db), put(db)]
    started = hands.start()
    hands.say("cancel_running", started[0])
    said = hands.one(
        "select tallybook.complete_many(%s, %s, %s, '{1,2}')",
        [j.lease for j in started],
        jobs,
        [j.attempt for j in started],
    )
    assert said == [jobs[0]]
    assert [result(db, job) for job in jobs] == [("cancelled", None, {"message": None}), ("completed", 2, None)]


def test_a_result_that_is_too_large_is_not_kept(db: Connection, hands: Hands) -> None:
    """A job with a result that is too large completes without it, and the outcome reports the size."""
    job = put(db)
    (started,) = hands.start()
    hands.one("select tallybook.complete(%s, %s, 1, %s)", started.lease, job, Jsonb("x" * 1_000_000))
    state, value, error = result(db, job) or ()
    assert (state, value) == ("completed", None)
    assert "1000002 bytes" in error["message"]


def test_result_of_what_has_not_completed(db: Connection, hands: Hands) -> None:
    """result has no state while a job is open; a dead or cancelled job has its error, even after drop_dead."""
    goes_on, dies, cancelled, waits = put(db), put(db), put(db), put(db, order_key="k")
    put(db, order_key="k", task="before")
    hands.one("select tallybook.cancel(%s, 'no more')", cancelled)
    started = {job.id: job for job in hands.start()}
    hands.fail(started[goes_on], "1 h")
    hands.fail(started[dies], final=True)
    assert result(db, goes_on) == (None, None, None)
    assert result(db, waits) == (None, None, None)
    state, _, error = result(db, dies) or ()
    assert (state, error["message"]) == ("dead", "no luck")
    assert result(db, cancelled) == ("cancelled", None, {"message": "no more"})
    assert hands.one("select tallybook.drop_dead(%s)", dies) is True
    state, _, error = result(db, dies) or ()
    assert (state, error["message"]) == ("dead", "no luck")


# --- expiry --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["in line", "promoted", "second attempt", "rescued"])
def test_no_attempt_starts_after_expires_at(db: Connection, hands: Hands, way: str) -> None:
    """Whichever path a job took, past expires_at its claim is marked expired, and it is dead with that reason."""
    if way == "promoted":
        job = put(db, expires_at=clock(db, "-1 s"), run_at=clock(db, "1 h"))
        assert hands.one("select promoted from tallybook.promote(at => clock_timestamp() + interval '2 h')") == 1
    elif way == "in line":
        job = put(db, expires_at=clock(db, "-1 s"))
    else:
        job = put(db, expires_at=clock(db, "1 h"))
        (started,) = hands.start()
        if way == "rescued":
            hands.rescued()
            hands = Hands(db)
        else:
            hands.fail(started)
        # The hour has passed.
        db.execute("update tallybook.entry set expires_at = clock_timestamp() where job_id = %s", (job,))
    (claimed,) = hands.claim()
    assert claimed.blocked_by == "expired"
    assert hands.say("expire", claimed) == "dead"
    assert hands.say("expire", claimed) == "refused"
    said = db.execute("select state, reason, failures from tallybook.job where id = %s", (job,)).fetchone()
    assert said == ("dead", "expired", 1 if way == "second attempt" else 0)
    state, _, error = result(db, job) or ()
    assert (state, error["type"]) == ("dead", "Expired")


def test_a_persons_retry_runs_an_expired_job(db: Connection, hands: Hands) -> None:
    """A retry by a person runs an expired job."""
    job = put(db, expires_at=clock(db, "-1 s"))
    assert hands.start() == []
    hands.one("select tallybook.retry(%s)", job)
    assert [j.id for j in hands.start()] == [job]


# --- on_dead -------------------------------------------------------------------------------------------------------


@pytest.fixture
def catalogue(db: Connection) -> None:
    tasks = [
        {"name": "fetch", "app": "shop", "on_dead_task": "tell", "on_dead_queue": "mails", "aliases": ["old_fetch"]},
        {"name": "tell", "app": "shop", "on_dead_task": "tell_more"},
        {"name": "tell_more", "app": "shop", "on_dead_task": "tell"},
    ]
    db.execute("select tallybook.worker_start('knows', '{q,mails}', catalogue => %s)", (Jsonb(tasks),))


def told(db: Connection) -> list[tuple[Any, ...]]:
    return db.execute(
        "select task, queue, args -> 'job', args #>> '{error,reason}' from tallybook.job"
        " where task like 'tell%' order by id"
    ).fetchall()  # type: ignore[arg-type]


@pytest.mark.usefixtures("catalogue")
@pytest.mark.parametrize("death", ["failed", "crashed", "expired"])
def test_a_death_enqueues_on_dead_once(db: Connection, hands: Hands, death: str) -> None:
    """S1-25: each death enqueues exactly one job, with the dead job, its args and its last error."""
    more = {"expires_at": clock(db, "-1 s")} if death == "expired" else {}
    job = put(db, task="old_fetch", args={"asset": 7}, headers=Jsonb({"trace": "x"}), **more)
    (claimed,) = hands.claim()
    if death == "expired":
        hands.say("expire", claimed)
    elif death == "crashed":
        db.execute("update tallybook.worker set seen_at = '-infinity'")
        db.execute("select tallybook.rescue(max_crashes => 1)")
    else:
        assert hands.fail(claimed, final=True) == "dead"
        assert hands.fail(claimed, final=True) == "refused"
    assert told(db) == [("tell", "mails", job, death)]
    args, headers = db.execute("select args, headers from tallybook.job where task = 'tell'").fetchone() or ({}, {})
    assert (args["task"], args["args"], headers) == ("old_fetch", {"asset": 7}, {"trace": "x"})


@pytest.mark.usefixtures("catalogue")
def test_a_death_that_is_rolled_back_tells_nobody(db: Connection, hands: Hands, connect: Connect) -> None:
    """S1-25: a dead letter and its on_dead job belong to one transaction."""
    put(db, task="fetch")
    (claimed,) = hands.claim()
    other = connect(autocommit=False)
    other.execute("select tallybook.fail(%s, %s, 1, '{}', final => true)", (claimed.lease, claimed.id))
    assert told(db) == []
    other.rollback()
    assert told(db) == []
    assert states(db, claimed.id) == ["running"]


@pytest.mark.usefixtures("catalogue")
def test_no_chain_of_deaths_is_endless(db: Connection) -> None:
    """S1-25: the death of an on_dead job enqueues no other job, even if its own task names one."""
    hands = Hands(db, "q", "mails", "default")
    put(db, task="fetch")
    for _ in range(5):
        for job in hands.start():
            hands.fail(job, final=True)
    assert [task for task, *_ in told(db)] == ["tell"]
    assert hands.one("select count(*) from tallybook.dead") == 2


def test_an_on_dead_that_no_job_can_have_is_refused_at_the_start(db: Connection) -> None:
    """An on_dead that no job can have raises TB005 when the worker registers, not when a job dies."""
    for bad in ({"on_dead_task": ""}, {"on_dead_task": "t", "on_dead_queue": "x" * 65}):
        catalogue = [{"name": "fetch", "app": "shop", **bad}]
        with pytest.raises(psycopg.Error) as caught:
            db.execute("select tallybook.worker_start('knows', '{q}', catalogue => %s)", (Jsonb(catalogue),))
        assert caught.value.sqlstate == "TB005"


# --- dead letters --------------------------------------------------------------------------------------------------


def value(db: Connection, call: str, filters: str) -> tuple[Any, ...]:
    """Return the row of one verb with these filters, which are constants of this file."""
    (row,) = db.execute(f"select {call.replace('...', filters)}")  # type: ignore[arg-type]
    return row


def letters(db: Connection, n: int, **more: Any) -> list[int]:
    """Enqueue n jobs that all die at one instant, and return them."""
    hands = Hands(db)
    jobs = [put(db, args={"n": i % 3}, **more) for i in range(n)]
    with db.transaction():
        for job in hands.start():
            end(hands, "fail", job, error={"type": "Broken", "message": "No Luck"}, final=True, at="2026-01-01")
    return jobs


def test_pages_of_dead_letters_leave_out_none(db: Connection) -> None:
    """S2-08: pages of dead letters skip none, even if many died at one instant, as after a crash of a worker."""
    jobs = letters(db, 25)
    found: list[int] = []
    last: tuple[Any, Any] = (None, None)
    while True:
        query = "select job_id, died_at from tallybook.dead_letters(before => %s, before_id => %s, max_jobs => 10)"
        page = db.execute(query, last).fetchall()
        if not page:
            break
        found += [job for job, _ in page]
        last = (page[-1][1], page[-1][0])
    assert found == jobs[::-1]


@pytest.mark.parametrize(
    ("where", "n"),
    [
        ("queue => 'q'", 6),
        ("queue => 'p'", 0),
        ("task => 't'", 6),
        ("reason => 'failed'", 6),
        ("reason => 'crashed'", 0),
        ("text => 'no luck'", 6),
        ("text => 'BROKEN no'", 6),
        ("text => '%'", 0),
        ("args => '{\"n\": 1}'", 2),
        ("since => '2026-01-01'", 6),
        ("before => '2026-01-01'", 0),
        ("max_jobs => 4", 4),
    ],
)
def test_dead_letter_verbs_mean_the_same_filters(db: Connection, where: str, n: int) -> None:
    """S2-08: the same filters list, retry and drop the same dead letters."""
    letters(db, 6)

    assert value(db, "count(*) from tallybook.dead_letters(...)", where) == (n,)
    with db.transaction(force_rollback=True):
        assert value(db, "tallybook.drop_dead_many(...)", where) == (n,)
        assert value(db, "count(*) from tallybook.dead", "") == (6 - n,)
    assert value(db, "retried from tallybook.retry_dead(...)", where) == (n,)
    assert value(db, "count(*) from tallybook.dead", "") == (6 - n,)
    assert len(Hands(db).start()) == n


def test_thousands_of_dead_letters_are_retried_by_one_call(db: Connection) -> None:
    """S2-08: one call retries 3,000 dead letters with under 10 advisory locks; taken keys are counted, not raised."""
    db.execute(
        "insert into tallybook.dead (job_id, died_at, enqueued_at, lane_id, attempt, failures, crashes, reason, task,"
        " args) select nextval('tallybook.job_id'), now(), now(), l.lane_id, 1, 1, 0, 'failed', 't', '{}'"
        " from tallybook._lane('q', 2, '') l, generate_series(1, 3000)"
    )
    taken = letters(db, 1, unique_key="u")
    put(db, unique_key="u")
    with db.transaction():
        assert db.execute("select * from tallybook.retry_dead()").fetchone() == (3000, 1)
        locks = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        assert one(db, locks) < 10
    assert states(db, *taken) == ["dead"]


# --- cancel_many ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("queue => 'q'", "running waiting scheduled available"),
        ("queue => 'q', states => '{waiting,available}'", "waiting available"),
        ("queue => 'p'", "other"),
        ("task => 't'", "running waiting scheduled other"),
        ("unique_key => 'a'", "running available"),
        ("unique_key => 'a', task => 'u'", "available"),
        ("unique_key => 'a', states => '{running}'", "running"),
        ("queue => 'r', states => '{scheduled}'", ""),
        ("queue => 'r', states => '{retrying}'", "retrying"),
        ("order_key => 'r', states => '{retrying}'", "retrying"),
        ("unique_key => 'nobody'", ""),
        ("order_key => 'o'", "running waiting scheduled available"),
        ("order_key => 'o', args => '{\"x\": 1}'", "running waiting"),
        ("order_key => 'o', unique_key => 'b'", "waiting"),
        ("args => '{\"x\": 1}'", "running waiting"),
        ("queue => 'q', max_jobs => 1", "running"),
    ],
)
def test_cancel_many_takes_what_matches(db: Connection, hands: Hands, where: str, found: str) -> None:
    """F45: cancel_many cancels open jobs that match, and asks running ones to stop; a second call finds none."""

    def crowd(db: Connection, hands: Hands) -> dict[str, int]:
        """Create one job in each state, with keys."""
        jobs = {"ended": put(db, unique_key="a", order_key="o", args={"x": 1})}
        hands.complete(*hands.start())
        jobs["running"] = put(db, unique_key="a", order_key="o", args={"x": 1})
        jobs["waiting"] = put(db, unique_key="b", order_key="o", args={"x": 1})
        assert [job.id for job in hands.start()] == [jobs["running"]]
        jobs["scheduled"] = put(db, unique_key="c", order_key="o", run_at="2999-01-01")
        jobs["available"] = put(db, task="u", unique_key="a", order_key="o")
        jobs["other"] = put(db, queue="p", unique_key="d")
        jobs["retrying"] = put(db, queue="r", task="v", order_key="r")
        other = Hands(db, "r")
        other.fail(*other.start(), retry_in="1 h")
        assert states(db, *jobs.values())[:5] == ["completed", "running", "waiting", "scheduled", "available"]
        return jobs

    jobs = crowd(db, hands)
    meant = {jobs[name] for name in found.split()}
    row = value(db, "cancelled, cancelling from tallybook.cancel_many(...)", where)
    assert row == (len(meant - {jobs["running"]}), int(jobs["running"] in meant))
    cancelled = db.execute("select job_id from tallybook.tombstone where cancelled").fetchall()
    assert {job for (job,) in cancelled} == meant
    if "max_jobs" not in where:
        assert value(db, "cancelled, cancelling from tallybook.cancel_many(...)", where) == (0, 0)


def test_cancel_many_finds_what_commits_late(db: Connection, hands: Hands, connect: Connect) -> None:
    """cancel_many finds a job that committed after later claims, and matches its current args."""
    late = connect(autocommit=False)
    job = put(late, unique_key="k", args={"n": 1})
    put(db)
    hands.complete(*hands.start())
    put(db)
    hands.complete(*hands.start())
    late.commit()
    put(db, unique_key="k", args={"n": 2}, on_conflict="replace_args")
    assert db.execute("select * from tallybook.cancel_many(queue => 'q', args => '{\"n\": 1}')").fetchone() == (0, 0)
    assert db.execute("select * from tallybook.cancel_many(queue => 'q', args => '{\"n\": 2}')").fetchone() == (1, 0)
    assert states(db, job) == ["cancelled"]


def test_cancel_many_needs_a_filter(db: Connection) -> None:
    """cancel_many raises TB005 without a filter, and for the state of an ended job."""
    for bad in ("", "queue => 'q', states => '{completed}'"):
        with pytest.raises(psycopg.Error) as caught:
            value(db, "tallybook.cancel_many(...)", bad)
        assert caught.value.sqlstate == "TB005"


def test_cancel_races_with_complete(db: Connection, hands: Hands) -> None:
    """F45: the second of cancel and complete learns what the first one did."""
    jobs: list[Job] = [job for _ in range(2) if put(db) for job in hands.start()]
    hands.complete(jobs[0])
    assert hands.one("select tallybook.cancel(%s)", jobs[0].id) == "completed"
    assert hands.one("select tallybook.cancel(%s)", jobs[1].id) == "cancelling"
    hands.complete(jobs[1])
    assert hands.say("cancel_running", jobs[1]) == "refused"
    assert states(db, *(job.id for job in jobs)) == ["completed", "completed"]
