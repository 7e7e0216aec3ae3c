"""Cancels of dead letters by a person: the job ends as cancelled, is recorded and shown so, and is not dead."""

from typing import Any

import pytest

from support.database import Connect, Connection, miscounted
from support.hands import Hands, Job, cancel, put, states
from support.sessions import behind, is_blocked
from support.waiting import wait_until

pytestmark = pytest.mark.direct("holds transactions open beside one another and watches which waits")


def died(db: Connection, hands: Hands, death: str = "failed", **more: Any) -> Job:
    """Return the last attempt of a job that has died for this reason."""
    if death == "expired":
        more["expires_at"] = hands.one("select clock_timestamp() - interval '1 s'")
    if death == "killed":
        db.execute("select tallybook.subject_push('q', 't', 'a')")
    else:
        put(db, **more)
    (job,) = hands.claim()
    if death == "crashed":
        db.execute("update tallybook.worker set seen_at = '-infinity'")
        assert hands.one("select lost from tallybook.rescue(max_crashes => 1)") == 1
        hands.worker = Hands(db).worker
    else:
        {"failed": lambda: hands.fail(job, final=True), "expired": lambda: hands.say("expire", job),
         "killed": lambda: hands.say("subject_kill", job)}[death]()  # fmt: skip
    assert hands.one("select reason from tallybook.dead where job_id = %s", job.id) == death
    return job


@pytest.mark.parametrize("death", ("failed", "crashed", "expired", "killed"))
def test_a_dead_letter_ends_as_cancelled(db: Connection, hands: Hands, death: str) -> None:
    """S4-14: the cancel of a dead job is recorded with its reason; the job keeps its errors and is no dead letter."""
    columns = (
        "select attempts, failures, crashes, args, errors, last_error, enqueued_at from tallybook.job where id = %s"
    )
    job = died(db, hands, death).id
    before = db.execute(columns, [job]).fetchone()
    assert cancel(db, job, "not wanted") == "cancelled"
    found = db.execute("select state, reason, ended_at is not null from tallybook.job where id = %s", [job]).fetchall()
    assert found == [("cancelled", "not wanted", True)]
    after = db.execute(columns, [job]).fetchone()
    assert before is not None and after is not None and after[1:] == before[1:]
    assert after[0] == 1  # the view shows 0 attempts of an expired job only while it is dead
    assert db.execute("select count(*) from tallybook.dead_letters()").fetchone() == (0,)
    assert db.execute("select state from tallybook.result(%s)", [job]).fetchone() == ("cancelled",)
    assert cancel(db, job) == "cancelled"
    assert db.execute("select count(*) from tallybook.attempt where job_id = %s", [job]).fetchone() == (2,)
    assert miscounted(db) == []
    counts = db.execute("select available, dead, cancelled from tallybook.counts() where queue = 'q'").fetchall()
    assert [sum(numbers) for numbers in zip(*counts, strict=True)] == [0, 0, 1]
    events = db.execute("select event, attempt, details ->> 'reason' from tallybook.trace(job => %s)", [job]).fetchall()
    assert events[-1] == ("cancelled", 2, "not wanted") and "retried" not in [event for event, *_ in events]
    assert [row[0] for row in db.execute("select reason from tallybook.why(%s)", [job])] == ["cancelled"]
    assert hands.claim() == []  # the cursor passes it and removes the tombstone
    assert db.execute("select count(*) from tallybook.tombstone").fetchone() == (0,)
    assert miscounted(db) == []


def test_a_person_retries_it(db: Connection, hands: Hands) -> None:
    """A cancelled dead letter is retried like any cancelled job: it runs, and attempts count each start."""
    job = died(db, hands, unique_key="k", order_key="o").id
    cancel(db, job)
    assert hands.one("select tallybook.retry(%s)", job) == 3
    (again,) = hands.start()
    assert (again.id, states(db, job)) == (job, ["running"])
    hands.complete(again)
    found = db.execute("select attempts, failures, jsonb_array_length(errors) from tallybook.job where id = %s", [job])
    assert found.fetchone() == (2, 0, 1)
    assert miscounted(db) == []


def test_its_keys_are_free(db: Connection, hands: Hands) -> None:
    """A cancel frees the unique key, the line of the order key and the name of a subject."""
    job = died(db, hands, unique_key="k", order_key="o").id
    cancel(db, job)
    assert put(db, unique_key="k", order_key="o") != job
    hands.complete(*hands.start())
    subject = died(db, hands, "killed").id
    cancel(db, subject)
    row = db.execute("select job_id, created from tallybook.subject_push('q', 't', 'a')").fetchone()
    assert row is not None and row[0] != subject and row[1] is True


@pytest.mark.parametrize("death", ["failed", "crashed"])
def test_one_that_was_dropped_stays_dead(db: Connection, hands: Hands, death: str) -> None:
    """A dropped dead letter can no longer be cancelled: cancel returns dead at once."""
    job = died(db, hands, death).id
    assert hands.one("select tallybook.drop_dead(%s)", job)
    db.execute("set statement_timeout = '20 s'")
    assert cancel(db, job) == "dead"
    assert db.execute("select count(*) from tallybook.tombstone").fetchone() == (0,)


def test_a_rollback_leaves_it_dead_and_an_open_cancel_holds_up_no_claim(
    db: Connection, hands: Hands, connect: Connect
) -> None:
    """An open transaction that cancelled a dead letter delays no claim; after a rollback the job is dead again."""
    job = died(db, hands).id
    with connect(autocommit=False) as person:
        assert cancel(person, job) == "cancelled"
        other = put(db)
        db.execute("set lock_timeout = '1 s'")
        assert [started.id for started in hands.start()] == [other]
        person.rollback()
    assert states(db, job) == ["dead"]
    assert miscounted(db) == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_it_waits_for_who_retries_it(db: Connection, hands: Hands, connect: Connect, end: str) -> None:
    """A cancel waits for an open retry of the same dead letter, and cancels the job whether that commits or not."""
    job = died(db, hands).id
    person, other = connect(autocommit=False), connect()
    person.execute("select tallybook.retry(%s)", [job])
    with behind(person, other) as pool:
        waiting = pool.submit(cancel, other, job)
        wait_until(lambda: is_blocked(db, other), "it waits")
        getattr(person, end)()
        assert waiting.result(30) == "cancelled"
    assert states(db, job) == ["cancelled"]
    assert hands.claim() == []
    assert miscounted(db) == []


def test_many_by_their_ids(db: Connection, hands: Hands) -> None:
    """cancel_jobs cancels dead letters and other jobs, and reports each."""
    dead, stands = died(db, hands).id, put(db)
    found = db.execute("select job_id, done from tallybook.cancel_jobs(%s)", [[dead, stands]]).fetchall()
    assert found == [(dead, "cancelled"), (stands, "cancelled")]
    assert states(db, dead, stands) == ["cancelled", "cancelled"]


def test_one_whose_history_has_gone(db: Connection, hands: Hands) -> None:
    """A dead letter that has outlived its history is cancelled like any other."""
    job = died(db, hands, args={"n": 1}).id
    for table in ("entry", "outcome", "claim"):
        db.execute(f"truncate tallybook.{table}".encode())
    db.execute("select tallybook.recount()")
    assert cancel(db, job) == "cancelled"
    found = db.execute("select state, args, last_error from tallybook.job where id = %s", [job]).fetchall()
    assert found == [("cancelled", {"n": 1}, "no luck")]
    assert miscounted(db) == []
