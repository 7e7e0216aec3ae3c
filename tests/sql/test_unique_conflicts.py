"""Conflicts of unique keys: what the producer gets and what the key's job becomes, whatever transactions are open."""

from typing import Any, LiteralString

import psycopg
import pytest

from support.database import Connect, Connection
from support.hands import Hands, Job, put, states

pytestmark = pytest.mark.direct("holds transactions open beside one another and watches which waits")

REPLACE: dict[str, Any] = {"unique_key": "k", "on_conflict": "replace_args"}
QUEUED: dict[str, Any] = {"unique_key": "k", "unique_while": "queued"}
SOON: LiteralString = "select clock_timestamp() + interval '1 h'"


def again(hands: Hands, job: Job) -> Job:
    """Return what claimed_jobs returns for it now."""
    (now,) = hands.claimed_jobs(job.lease, job.id)
    return now


# --- the answer to the caller --------------------------------------------------------------------------------------


def test_raise_names_the_job(db: Connection) -> None:
    """on_conflict raise is TB008, and its detail is the other job's id."""
    job = put(db, unique_key="k")
    with pytest.raises(psycopg.Error) as caught:
        put(db, unique_key="k", on_conflict="raise")
    assert (caught.value.sqlstate, caught.value.diag.message_detail) == ("TB008", str(job))


@pytest.mark.parametrize(
    "bad",
    [
        {"unique_key": "k", "on_conflict": "explode"},
        {"unique_key": "k", "on_conflict": None},
        {"unique_key": "k", "unique_while": "sleeping"},
        {"unique_key": "k", "on_conflict": "push_run_at"},
        {"unique_key": ""},
        {"unique_key": "x" * 513},
        {"order_key": ""},
        {"order_key": "x" * 513},
        {"expires_at": "-infinity"},
    ],
)
def test_what_does_not_fit_is_refused(db: Connection, bad: dict[str, Any]) -> None:
    """Invalid arguments raise TB005, and nothing is enqueued."""
    with pytest.raises(psycopg.Error) as caught:
        put(db, **bad)
    assert caught.value.sqlstate == "TB005"
    assert db.execute("select count(*) from tallybook.job").fetchone() == (0,)


@pytest.mark.parametrize("priority", [-1, 32_768])
def test_a_priority_that_no_lane_has_is_refused_at_the_conflict(db: Connection, hands: Hands, priority: int) -> None:
    """An impossible priority raises TB005 to the producer; stored, it would stop promote and each end of the job."""
    job = put(db, unique_key="k")
    with pytest.raises(psycopg.Error, match="is out of range"):
        put(db, unique_key="k", on_conflict="raise_priority", priority=priority)
    db.execute("select tallybook.promote()")
    assert [one.id for one in hands.start()] == [job]


def test_a_claim_is_read_in_read_committed(db: Connection, hands: Hands, connect: Connect) -> None:
    """claimed_jobs raises TB003 for an older snapshot, which does not show that a job's args were replaced."""
    put(db, unique_key="k", args={"v": 1})
    reader = connect(autocommit=False)
    reader.execute("set transaction isolation level repeatable read")
    reader.execute("select count(*) from tallybook.job")
    put(db, **REPLACE, args={"v": 2})
    (job,) = hands.claim()
    with pytest.raises(psycopg.Error) as caught:
        reader.execute("select from tallybook.claimed_jobs(%s)", (job.lease,))
    assert (caught.value.sqlstate, job.args) == ("TB003", {"v": 2})


PLACES = ["available", "scheduled", "waiting"]
OTHER_ENDS: LiteralString = """
select tallybook.complete(c.lease, e.job_id, 1) from tallybook.entry e, tallybook.claim c
 where e.task = 'other' and c.lease is not null"""


def queued(db: Connection, hands: Hands, place: str) -> int:
    """Enqueue a job with the unique key k, priority 2 and args {"n": 1}, and bring it to this state."""
    more: dict[str, Any] = {"unique_key": "k", "args": {"n": 1}}
    if place == "scheduled":
        more["run_at"] = "2999-01-01"
    if place == "waiting":
        put(db, order_key="o", task="other")
        job = put(db, order_key="o", **more)
        assert len(hands.start()) == 1
    else:
        job = put(db, **more)
    assert states(db, job) == [place]
    return job


@pytest.mark.servers
@pytest.mark.parametrize("place", PLACES)
def test_replace_args_changes_a_queued_job(db: Connection, hands: Hands, place: str) -> None:
    """The last args count, in the view at once and in the run; the id is the first one's."""

    def run_of(db: Connection, hands: Hands, place: str, job: int) -> Job:
        """Let the job start and return it."""
        if place == "scheduled":
            db.execute("update tallybook.scheduled set run_at = now()")
            db.execute("select tallybook.promote()")
        if place == "waiting":
            db.execute(OTHER_ENDS)
        (started,) = hands.start()
        assert started.id == job
        return started

    job = queued(db, hands, place)
    assert [put(db, args={"n": n}, **REPLACE) for n in (2, 3)] == [job, job]
    assert hands.one("select args from tallybook.job where id = %s", job) == {"n": 3}
    assert run_of(db, hands, place, job).args == {"n": 3}


@pytest.mark.parametrize("place", PLACES)
def test_raise_priority_changes_a_queued_job(db: Connection, hands: Hands, place: str) -> None:
    """S1-07: a more urgent enqueue of a queued key moves the job before earlier ones; a less urgent one does not."""
    job = queued(db, hands, place)
    before = [put(db, unique_key=key) for key in ("firm", None)]
    for key, priority in (("k", 1), ("k", 3), ("firm", 3)):
        assert put(db, unique_key=key, priority=priority, on_conflict="raise_priority") in (job, before[0])
    db.execute("select tallybook.promote()")
    assert hands.one("select priority from tallybook.job where id = %s", job) == 1
    if place == "available":
        assert [j.id for j in hands.start() + hands.start()] == [job, *before]


@pytest.mark.parametrize("place", PLACES)
def test_push_run_at_moves_a_queued_job(db: Connection, hands: Hands, place: str) -> None:
    """A debounce: the job does not start before the last run_at, with or without a promote in between."""
    job = queued(db, hands, place)
    later = hands.one(SOON)
    assert put(db, unique_key="k", run_at=later, on_conflict="push_run_at") == job
    if place == "waiting":
        assert hands.start() == []
        db.execute(OTHER_ENDS)
    assert hands.start() == []
    assert states(db, job) == ["scheduled"]
    db.execute("select tallybook.promote()")
    assert hands.one("select run_at from tallybook.job where id = %s", job) == later


def test_pushing_to_the_past_leaves_it_where_it_is(db: Connection, hands: Hands) -> None:
    """A push to the past leaves an available job in its place, and brings back a job that was pushed before."""
    job, other = put(db, unique_key="k"), put(db)
    now = hands.one("select clock_timestamp()")
    put(db, unique_key="k", run_at=now, on_conflict="push_run_at")
    db.execute("select tallybook.promote()")
    assert hands.one("select attempt from tallybook.job where id = %s", job) == 1
    put(db, unique_key="k", run_at=hands.one(SOON), on_conflict="push_run_at")
    db.execute("select tallybook.promote()")
    assert states(db, job) == ["scheduled"]
    put(db, unique_key="k", run_at=now, on_conflict="push_run_at")
    db.execute("select tallybook.promote()")
    assert {j.id for j in hands.start()} == {job, other}


@pytest.mark.parametrize("how", ["replace_args", "raise_priority", "push_run_at"])
def test_what_runs_is_left_alone(db: Connection, hands: Hands, how: str) -> None:
    """A job that has started keeps its args, time and priority, even for its next attempts."""
    job = put(db, unique_key="k", args={"n": 1})
    (started,) = hands.start()
    assert put(db, unique_key="k", args={"n": 2}, on_conflict=how, priority=0, run_at=hands.one(SOON)) == job
    assert db.execute("select count(*) from tallybook.amendment").fetchone() == (0,)
    hands.fail(started)
    (second,) = hands.start()
    assert (second.args, second.blocked_by) == ({"n": 1}, None)


@pytest.mark.parametrize("end", ["fail", "snooze", "rescue", "move", "dead", "cancel_running", "cancelled in line"])
def test_changed_args_outlive_every_end(db: Connection, hands: Hands, end: str) -> None:
    """However an attempt ends, the next one has the changed args, even after a retry by a person."""
    job = put(db, unique_key="k", args={"n": 1})
    put(db, args={"n": 2}, **REPLACE)
    if end == "cancelled in line":
        hands.one("select tallybook.cancel(%s)", job)
        assert hands.start() == []
    else:
        (started,) = hands.start()
        assert started.args == {"n": 2}
        if end == "rescue":
            hands.rescued()
            hands = Hands(db)
        elif end in ("fail", "dead"):
            hands.fail(started, final=end == "dead")
        elif end == "snooze":
            hands.say("snooze", started, "0")
        else:
            hands.say(end, started)
    db.execute("select tallybook.rescue()")
    if end in ("dead", "cancel_running", "cancelled in line"):
        hands.one("select tallybook.retry(%s)", job)
    if end == "move":
        hands.worker = hands.one("select tallybook.worker_start('knows', '{q}', '{t}')")
    (second,) = hands.start()
    assert (second.id, second.args) == (job, {"n": 2})
    hands.complete(second)
    db.execute("select tallybook.rescue()")
    assert db.execute("select count(*) from tallybook.amendment").fetchone() == (0,)


@pytest.mark.parametrize("how", ["snooze", "rescue"])
def test_a_worker_that_stops_before_the_start_does_not_undo_a_push(db: Connection, hands: Hands, how: str) -> None:
    """A claimed job that was pushed to a later time does not run before it, even if it is given back or rescued."""
    job = put(db, unique_key="k")
    producer_relies = put(db, unique_key="k", run_at=hands.one(SOON), on_conflict="push_run_at")
    (claimed,) = hands.claim()
    assert (claimed.id, claimed.blocked_by) == (producer_relies, "postponed")
    if how == "snooze":
        hands.say("snooze", claimed, "0")
    else:
        hands.rescued()
        hands = Hands(db)
    assert hands.start() == []
    db.execute("select tallybook.promote()")
    assert states(db, job) == ["scheduled"]


def test_a_raised_priority_counts_for_the_next_attempt_at_the_latest(db: Connection, hands: Hands) -> None:
    """S1-07: a job claimed before its move has the raised priority when it returns; a push does not undo that."""
    job = put(db, unique_key="k", priority=5)
    put(db, unique_key="k", priority=1, on_conflict="raise_priority")
    put(db, unique_key="k", run_at=hands.one(SOON), on_conflict="push_run_at")
    (claimed,) = hands.claim()
    assert hands.say("postpone", claimed) == "scheduled"
    assert db.execute("select state, priority from tallybook.job where id = %s", (job,)).fetchone() == ("scheduled", 1)


# --- open transactions ---------------------------------------------------------------------------------------------


def test_a_claimed_job_waits_for_the_producer_that_changes_it(db: Connection, hands: Hands, connect: Connect) -> None:
    """A claimed job is changing until the producer commits, then has the new args; another job is not."""
    other, job = put(db, args={"n": 0}), put(db, unique_key="k", args={"n": 1})
    producer = connect(autocommit=False)
    assert put(producer, args={"n": 2}, **REPLACE) == job
    claimed = {j.id: j for j in hands.claim()}
    assert (claimed[other].changing, claimed[job].changing) == (False, True)
    producer.commit()
    now = again(hands, claimed[job])
    assert (now.id, now.changing, now.args) == (job, False, {"n": 2})


def test_a_rollback_changes_nothing(db: Connection, hands: Hands, connect: Connect) -> None:
    """A claimed job waits for the producer, and after the rollback starts with its old args."""
    put(db, unique_key="k", args={"n": 1})
    producer = connect(autocommit=False)
    put(producer, args={"n": 2}, **REPLACE)
    (claimed,) = hands.claim()
    assert claimed.changing
    producer.rollback()
    now = again(hands, claimed)
    assert (now.changing, now.args) == (False, {"n": 1})


@pytest.mark.parametrize("end", ["snooze", "rescue"])
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_worker_that_stops_while_a_producer_is_at_it(
    db: Connection, hands: Hands, connect: Connect, end: str, outcome: str
) -> None:
    """The change applies to the next attempt, but only if it is committed."""
    put(db, unique_key="k", args={"n": 1})
    producer = connect(autocommit=False)
    put(producer, args={"n": 2}, **REPLACE)
    (claimed,) = hands.claim()
    assert claimed.changing
    if end == "rescue":
        hands.rescued()
        hands = Hands(db)
    else:
        hands.say("snooze", claimed, "0")
    (second,) = hands.claim()
    assert second.changing
    getattr(producer, outcome)()
    assert again(hands, second).args == {"n": 2 if outcome == "commit" else 1}


@pytest.mark.parametrize("savepoint", [False, True])
def test_a_second_change_in_one_transaction_counts_though_the_job_was_claimed(
    db: Connection, hands: Hands, connect: Connect, savepoint: bool
) -> None:
    """A later change in the same transaction counts, because the claimed job waits for it; even in savepoints."""
    put(db, unique_key="k", args={"n": 1})
    producer = connect(autocommit=False)
    producer.execute("select")
    for n in (2, 3):
        if savepoint:
            with producer.transaction():
                put(producer, args={"n": n}, **REPLACE)
        else:
            put(producer, args={"n": n}, **REPLACE)
        if n == 2:
            (claimed,) = hands.claim()
    producer.commit()
    assert again(hands, claimed).args == {"n": 3}


def test_a_change_that_is_rolled_back_to_a_savepoint(db: Connection, hands: Hands, connect: Connect) -> None:
    """A change that is rolled back to a savepoint releases its lock: the job does not wait for the transaction."""
    put(db, unique_key="k", args={"n": 1})
    producer = connect(autocommit=False)
    producer.execute("select")
    with pytest.raises(ZeroDivisionError), producer.transaction():
        put(producer, args={"n": 2}, **REPLACE)
        raise ZeroDivisionError
    (claimed,) = hands.claim()
    assert (claimed.changing, claimed.args) == (False, {"n": 1})


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_prepared_transaction_is_waited_for(db: Connection, hands: Hands, connect: Connect, outcome: str) -> None:
    """Two-phase commit: the job waits for the second phase, even if the session has closed."""
    put(db, unique_key="k", args={"n": 1})
    producer = connect()
    producer.execute("begin; set local tallybook.notify = off")
    put(producer, args={"n": 2}, **REPLACE)
    producer.execute("prepare transaction 'change'")
    producer.close()
    (claimed,) = hands.claim()
    assert claimed.changing
    db.execute("commit prepared 'change'" if outcome == "commit" else "rollback prepared 'change'")
    now = again(hands, claimed)
    assert (now.changing, now.args) == (False, {"n": 2 if outcome == "commit" else 1})


def test_a_running_job_is_not_held_up_by_those_who_met_its_key(db: Connection, hands: Hands, connect: Connect) -> None:
    """A producer that found the job running leaves no lock behind: the job's next attempt waits for nobody."""
    put(db, unique_key="k", args={"n": 1})
    (started,) = hands.start()
    producer = connect(autocommit=False)
    put(producer, args={"n": 2}, **REPLACE)
    put(producer, **QUEUED)
    hands.fail(started)
    assert [(job.id, job.changing) for job in hands.claim()] == [(started.id, False)]


def test_a_move_does_not_wait_for_a_transaction_that_has_cancelled_the_job(db: Connection, connect: Connect) -> None:
    """promote skips an amended job whose cancel is not committed, without waiting, and moves the others."""
    jobs = [put(db, unique_key=key, priority=5) for key in "abc"]
    for key in "abc":
        put(db, unique_key=key, priority=1, on_conflict="raise_priority")
    person = connect(autocommit=False)
    person.execute("select tallybook.cancel(%s)", (jobs[1],))
    db.execute("set statement_timeout = '20s'")
    for _ in range(20):
        db.execute("select tallybook.promote()")
    row = db.execute(
        "select array_agg(priority order by id) from tallybook.job where id = any (%s)", (jobs,)
    ).fetchone()
    assert row == ([1, 5, 1],)
    person.rollback()
    db.execute("select tallybook.promote()")
    assert db.execute("select priority from tallybook.job where id = %s", (jobs[1],)).fetchone() == (1,)


def test_while_queued_one_runs_and_one_is_queued(db: Connection, hands: Hands) -> None:
    """The key is free once the job has started; at most one more job is queued, however many run."""
    first = put(db, **QUEUED)
    assert put(db, **QUEUED) == first
    (one,) = hands.start()
    second = put(db, **QUEUED)
    assert second != first
    assert put(db, **QUEUED) == second
    (two,) = hands.start()
    third = put(db, **QUEUED)
    assert len({first, second, third}) == 3
    assert put(db, **QUEUED) == third
    hands.complete(one, two)
    assert put(db, **QUEUED) == third
    # A call with the default unique_while meets the queued job.
    assert put(db, unique_key="k") == third


def test_what_was_written_before_a_skip_is_seen_by_the_run(db: Connection, hands: Hands, connect: Connect) -> None:
    """S1-07: a queued job that a producer relied on does not start before the producer's rows are committed."""
    db.execute("create table rows (n int)")
    job = put(db, **QUEUED)
    producer = connect(autocommit=False)
    producer.execute("insert into rows values (1)")
    assert put(producer, **QUEUED) == job
    (claimed,) = hands.claim()
    assert claimed.changing
    producer.commit()
    assert not again(hands, claimed).changing
    assert db.execute("select n from rows").fetchone() == (1,)


def test_an_older_snapshot_relies_on_nobody(db: Connection, connect: Connect) -> None:
    """At REPEATABLE READ a producer cannot know whether the other job has started, so it gets a job of its own."""
    job = put(db, **QUEUED)
    producer = connect(autocommit=False)
    producer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    own = put(producer, **QUEUED)
    producer.commit()
    assert own != job
    assert put(db, **QUEUED) == own


def test_a_change_at_repeatable_read_is_refused(db: Connection, connect: Connect) -> None:
    """TB003, because at this level a producer cannot know whether the job has started."""
    put(db, unique_key="k")
    producer = connect(autocommit=False)
    producer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.Error) as caught:
        put(producer, args={"n": 2}, **REPLACE)
    assert caught.value.sqlstate == "TB003"
