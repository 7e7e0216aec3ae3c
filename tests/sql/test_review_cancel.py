"""Findings of a hostile review of the SQL, each by its number: cancel, retry and unique keys.

All others are in test_review.py.
"""

from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest

from support.database import Connection, Row, one
from support.hands import Hands, cancel, put, retry, states
from support.sessions import LANE_LOCK, behind, enqueue, is_blocked, start_worker
from support.subjects import clock, promote
from support.waiting import wait_until


def claim(db: Connection, worker: int, n: int = 100) -> tuple[UUID, list[Row]]:
    """Claim; return the lease and the attempts that may start, without jobs that were cancelled meanwhile."""
    lease = uuid4()
    db.execute("select tallybook.claim(%s, '{q}', array[%s::int], %s)", [worker, n, lease])
    query = "select job_id, attempt from tallybook.claimed_jobs(%s) where blocked_by is distinct from 'cancelled'"
    return lease, db.execute(query, [lease]).fetchall()


def claim_job(db: Connection, worker: int, job: int) -> UUID | None:
    lease = uuid4()
    return lease if one(db, "select tallybook.claim_job(%s, %s, %s)", worker, job, lease) else None


def drain(db: Connection) -> list[Row]:
    """Promote, claim and complete all jobs; return the attempts in the order of their starts."""
    hands, started = Hands(db), []
    promote(db, "1 day")
    while jobs := hands.claim():
        alive = [job for job in jobs if not job.cancelled]
        hands.complete(*alive)
        started += [(job.id, job.attempt) for job in alive]
    return started


def sqlstate(db: Connection, query: LiteralString, *params: object) -> str | None:
    """Return the SQLSTATE that a statement raises; only the statement's effects are rolled back."""
    with pytest.raises(psycopg.Error) as raised, db.transaction():
        db.execute(query, params)
    return raised.value.sqlstate


# --- 5: a job that was taken by its id -----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_job_taken_by_id_and_retried_has_one_attempt(db: Connection, end: str) -> None:
    """Review 5, S4-08: the attempt that was claimed by id stays out of the line when the job is retried."""
    worker, (before, job) = start_worker(db), enqueue(db, n=2)
    lease = claim_job(db, worker, job)
    if end == "failed":
        assert one(db, "select tallybook.fail(%s, %s, 1, '{}', final => true)", lease, job) == "dead"
    else:
        assert cancel(db, job) == "cancelling"
        assert one(db, "select tallybook.cancel_running(%s, %s, 1)", lease, job) == "cancelled"
    assert retry(db, job) == 2
    assert drain(db) == [(before, 1), (job, 2)]
    assert states(db, job) == ["completed"]


@pytest.mark.direct("watches which session waits for which")
def test_a_cancel_that_meets_the_end_of_a_job_taken_by_id(db: Connection, connect: Any) -> None:
    """Review 5, S4-08: a cancel that comes too late for a job claimed by id does not put it back in line."""
    worker, (before, job) = start_worker(db), enqueue(db, n=2)
    lease = claim_job(db, worker, job)
    first, second = connect(autocommit=False), connect()
    assert cancel(first, job) == "cancelling"
    with behind(second) as pool:
        waiting = pool.submit(cancel, second, job)
        wait_until(lambda: is_blocked(db, second), "the second cancel to wait for the first")
        assert one(db, "select tallybook.complete(%s, %s, 1)", lease, job)
        first.rollback()
        assert waiting.result(timeout=20) == "completed"
    assert drain(db) == [(before, 1)]


@pytest.mark.direct("watches which session waits for which")
@pytest.mark.parametrize("later", [False, True])
def test_a_cancel_that_waited_for_a_claim_by_id_is_kept(db: Connection, connect: Any, later: bool) -> None:
    """Review 5b: a cancel that meets a claim by id, of an available job or a due one, is never lost."""
    worker, by_id, business = start_worker(db), connect(autocommit=False), connect()
    (job,) = enqueue(db, **({"run_at": clock(db, "1 hour")} if later else {}))
    lease, query = uuid4(), "select tallybook.claim_job(%s, %s, %s, clock_timestamp() + interval '2 hours')"
    assert one(by_id, query, worker, job, lease)
    with behind(business) as pool:
        waiting = pool.submit(cancel, business, job)
        wait_until(lambda: is_blocked(db, business), "the cancel to wait for the claim")
        by_id.commit()
        assert waiting.result(timeout=20) == "cancelling"
    assert one(db, "select blocked_by = 'cancelled' from tallybook.claimed_jobs(%s)", lease)


@pytest.mark.direct("watches which session waits for which")
def test_a_cancel_whose_tombstone_goes_while_it_looks_is_kept(db: Connection, connect: Any) -> None:
    """Review 5c: a cancel of a job claimed by id is kept even if the cursor passes it at the same moment."""
    worker, (job,) = start_worker(db), enqueue(db)
    lease, business, holder = claim_job(db, worker, job), connect(), connect()
    # Stop cancel between two statements, after it has inserted its tombstone: no lock of the product does that.
    db.execute("""
    create function public.stop() returns trigger language plpgsql as $$ begin
      perform pg_advisory_lock_shared(1, 1), pg_advisory_unlock_shared(1, 1); return null; end $$;
    create trigger stop after insert on tallybook.tombstone for each statement execute function public.stop()""")
    holder.execute("select pg_advisory_lock(1, 1)")
    with behind(business) as pool:
        waiting = pool.submit(cancel, business, job)
        wait_until(lambda: is_blocked(db, business), "the cancel to stop")
        assert claim(db, worker)[1] == []
        assert one(db, "select not exists (select from tallybook.tombstone)")
        holder.execute("select pg_advisory_unlock(1, 1)")
        assert waiting.result(timeout=20) == "cancelling"
    assert one(db, "select reason is null from tallybook.renew(%s, 0, %s)", worker, [job])
    assert one(db, "select blocked_by = 'cancelled' from tallybook.claimed_jobs(%s)", lease)


# --- 6: a cancel holds for later attempts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        "fail(%(lease)s, %(job)s, 1, '{}', '0')",
        "fail(%(lease)s, %(job)s, 1, '{}', '1 hour')",
        "snooze(%(lease)s, %(job)s, 1, '0')",
        "snooze(%(lease)s, %(job)s, 1, '1 hour')",
        "move(%(lease)s, %(job)s, 1)",
        "worker_stop(%(worker)s)",
    ],
    ids=["fail", "fail, later", "snooze", "snooze, later", "move", "rescue"],
)
def test_a_cancelled_job_does_not_start_again(db: Connection, end: str) -> None:
    """Review 6: however a cancelled attempt ends, the job is cancelled, does not start again, and its key is free."""
    worker, (job,) = start_worker(db), enqueue(db, unique_key="k")
    lease, _ = claim(db, worker)
    assert cancel(db, job) == "cancelling"
    assert enqueue(db, unique_key="k") == [job]
    db.execute(f"select tallybook.{end}", {"lease": lease, "job": job, "worker": worker})
    assert states(db, job) == ["cancelled"]
    (heir,) = enqueue(db, unique_key="k")
    assert heir != job
    assert sqlstate(db, "select tallybook.retry(%s)", job) == "TB005"
    live = (
        "select count(*) from tallybook.job where unique_key = 'k' and state not in ('completed', 'cancelled', 'dead')"
    )
    assert one(db, live) == 1
    assert drain(db) == [(heir, 1)]
    db.execute("update tallybook.worker set parts = '{task:work}'")  # where move put it
    claim(db, one(db, "select max(id) from tallybook.worker where ended_at is null"))
    assert states(db, job, heir) == ["cancelled", "completed"]
    assert one(db, "select attempts from tallybook.job where id = %s", job) == (0 if end.startswith("move") else 1)
    assert (
        one(db, "select state from tallybook.outcome where job_id = %s order by ended_at desc limit 1", job)
        == "cancelled"
    )


# --- 7: unique keys ------------------------------------------------------------------------------------------------


def test_cancel_and_enqueue_with_its_key_in_one_transaction(db: Connection, connect: Any) -> None:
    """Review 7: until a cancel has committed the job may start, so its key is not free: TB005; afterwards it is."""
    (job,) = enqueue(db, unique_key="k")
    business = connect(autocommit=False)
    assert cancel(business, job) == "cancelled"
    assert sqlstate(business, "select tallybook.enqueue('q', 'work', unique_key => 'k')") == "TB005"
    business.commit()
    (heir,) = enqueue(business, unique_key="k")
    business.commit()
    assert heir != job
    assert drain(db) == [(heir, 1)]


@pytest.mark.parametrize("cancels", ["itself", "another", "nobody"])
def test_an_old_snapshot_takes_no_key_of_a_running_job(db: Connection, connect: Any, cancels: str) -> None:
    """Review 7: a REPEATABLE READ producer that does not see that a job was started does not take its key."""
    (job,), business = enqueue(db, unique_key="k"), connect(autocommit=False)
    business.execute("set transaction isolation level repeatable read")
    business.execute("select from tallybook.lane")
    lease, _ = claim(db, start_worker(db))
    if cancels == "another":
        assert cancel(db, job) == "cancelling"
    if cancels == "itself":
        assert cancel(business, job) == "cancelling"
        assert sqlstate(business, "select tallybook.enqueue('q', 'work', unique_key => 'k')") == "TB005"
    else:
        assert enqueue(business, unique_key="k") == [job]
    business.commit()
    assert one(db, "select tallybook.complete(%s, %s, 1)", lease, job)
    assert drain(db) == []


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("later", [False, True])
def test_the_key_of_a_cancelled_job_is_free_at_any_level(
    db: Connection, connect: Any, later: bool, level: LiteralString
) -> None:
    """Review 7b: once a cancel has committed, no enqueue returns the id of the cancelled job, at any level."""
    options = {"run_at": clock(db, "1 hour")} if later else {}
    (job,) = enqueue(db, unique_key="k", **options)
    assert cancel(db, job) == "cancelled"
    business = connect(autocommit=False)
    business.execute("set transaction isolation level " + level)
    (heir,) = enqueue(business, unique_key="k")
    business.commit()
    assert heir != job
    assert drain(db) == [(heir, 1)]


# --- 8: transactions that stay open --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.direct("watches which session waits for which")
def test_a_claim_by_id_that_waits_for_a_cancel_gives_up(db: Connection, quick: Any, connect: Any) -> None:
    """Review 8: claim_job waits two seconds for an open cancel, holds no lane meanwhile, and returns false."""
    business, other, by_id = quick(autocommit=False), quick(), connect()
    worker, its_worker, jobs = start_worker(db), start_worker(db), enqueue(db, n=3)
    assert cancel(business, jobs[2]) == "cancelled"
    with behind(by_id) as pool:
        waiting = pool.submit(claim_job, by_id, its_worker, jobs[2])
        wait_until(lambda: is_blocked(db, by_id), "the claim by id to wait")
        locks = (
            "select count(*) from pg_locks where locktype = 'advisory' and classid = %s"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        assert one(db, locks, LANE_LOCK) == 0
        assert claim(other, worker, n=2)[1] == [(jobs[0], 1), (jobs[1], 1)]
        assert waiting.result(timeout=20) is None
    business.rollback()
    assert drain(db) == [(jobs[2], 1)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_open_cancel_of_a_job_taken_by_id_holds_up_no_claim(db: Connection, quick: Any, end: str) -> None:
    """Review 8: the cursor passes a job claimed by id while its cancel is open; that cancel reaches the worker."""
    business, other, worker, jobs = quick(autocommit=False), quick(), start_worker(db), enqueue(db, n=2)
    lease = claim_job(db, worker, jobs[0])
    assert cancel(business, jobs[0]) == "cancelling"
    assert claim(other, worker)[1] == [(jobs[1], 1)]
    business.commit() if end == "commit" else business.rollback()
    assert one(db, "select count(*) from tallybook.renew(%s, 0, %s)", worker, [jobs[0]]) == (end == "commit")
    assert one(db, "select tallybook.complete(%s, %s, 1)", lease, jobs[0])
    assert drain(db) == []


def test_an_open_retry_of_a_cancelled_job_holds_up_no_claim(db: Connection, quick: Any) -> None:
    """Review 8b: an open transaction that undoes a cancel delays no claim of its lane."""
    business, other, worker, jobs = quick(autocommit=False), quick(), start_worker(db), enqueue(db, n=2)
    assert cancel(db, jobs[1]) == "cancelled"
    retry(business, jobs[1])
    assert claim(other, worker, n=1)[1] == [(jobs[0], 1)]
    business.commit()
    assert len(drain(db)) == 1


# --- 9, 11: dead letters and rescue --------------------------------------------------------------------------------


def test_a_cancel_of_a_crashed_job_comes_to_an_end(db: Connection) -> None:
    """Review 9: cancel of a job that crashed too often finds its dead letter at once, and ends it as cancelled."""
    worker, (job,) = start_worker(db), enqueue(db)
    claim(db, worker)
    db.execute("update tallybook.worker set seen_at = '-infinity'")
    assert one(db, "select lost from tallybook.rescue(max_crashes => 1)") == 1
    assert one(db, "select reason from tallybook.dead where job_id = %s", job) == "crashed"
    db.execute("set statement_timeout = '20s'")
    assert cancel(db, job) == "cancelled"
    assert one(db, "select not exists (select from tallybook.tombstone where cancelled)")


def test_an_open_retry_does_not_fail_the_rescue_of_others(db: Connection, quick: Any) -> None:
    """Review 11, S1-11: dead workers' jobs are rescued while a transaction that retried a cancelled job is open."""
    business, other, worker, (job,) = quick(autocommit=False), quick(), start_worker(db), enqueue(db)
    lease, _ = claim(db, worker)
    assert cancel(db, job) == "cancelling"
    assert one(db, "select tallybook.cancel_running(%s, %s, 1)", lease, job) == "cancelled"
    dead, (lost,) = start_worker(db), enqueue(db)
    claim(db, dead)
    db.execute("update tallybook.worker set seen_at = '-infinity' where id = %s", [dead])
    assert retry(business, job) == 2
    assert one(other, "select lost from tallybook.rescue(at => clock_timestamp() + interval '2 min')") == 1
    business.rollback()
    assert drain(db) == [(lost, 2)]


# --- 16: a cancel is taken back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_cancel_that_nobody_has_met_is_taken_back(db: Connection, later: bool, key: str | None) -> None:
    """Review 16, S4-14: retry makes a cancelled job live again, with its key, before any claim has met it."""
    options = {"run_at": clock(db, "1 hour")} if later else {}
    (job,) = enqueue(db, unique_key=key, **options)
    assert cancel(db, job) == "cancelled"
    assert states(db, job) == ["cancelled"]
    attempt = retry(db, job)
    assert states(db, job) == ["scheduled" if later else "available"]
    if key:
        assert enqueue(db, unique_key=key) == [job]
    assert drain(db) == [(job, attempt)]
    assert states(db, job) == ["completed"]


@pytest.mark.direct("watches which session waits for which")
def test_a_cancel_of_a_job_that_promote_is_moving_is_taken_back(db: Connection, connect: Any) -> None:
    """A retry that waits for promote looks again: the cancelled job has come into line, and gets another attempt."""
    (job,) = enqueue(db, run_at=clock(db, "1 s"))
    cancel(db, job)
    promoter, person = connect(autocommit=False), connect()
    promoter.execute("select tallybook.promote(at => clock_timestamp() + interval '1 min')")
    with behind(person) as pool:
        retried = pool.submit(retry, person, job)
        wait_until(lambda: is_blocked(db, person), "the retry to wait")
        promoter.commit()
        assert retried.result(timeout=20) == 2
    assert drain(db) == [(job, 2)]


@pytest.mark.parametrize("later", [False, True])
def test_a_cancel_is_not_taken_back_where_another_job_has_the_key(db: Connection, later: bool) -> None:
    """Review 16: retry of a cancelled job whose key another live job has raises TB005 and changes nothing."""
    options = {"run_at": clock(db, "1 hour")} if later else {}
    (job,) = enqueue(db, unique_key="k", **options)
    cancel(db, job)
    (heir,) = enqueue(db, unique_key="k")
    assert sqlstate(db, "select tallybook.retry(%s)", job) == "TB005"
    assert states(db, job, heir) == ["cancelled", "available"]
    assert drain(db) == [(heir, 1)]
    assert states(db, job) == ["cancelled"]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_cancel_is_taken_back_in_its_own_transaction(db: Connection, later: bool, key: str | None) -> None:
    """Review 16b: cancel and retry of one job in one transaction leave it as it was, even if it has a key."""
    options = {"run_at": clock(db, "1 hour")} if later else {}
    (job,) = enqueue(db, unique_key=key, **options)
    with db.transaction():
        assert cancel(db, job) == "cancelled"
        attempt = retry(db, job)
    assert drain(db) == [(job, attempt)]


def test_a_retry_is_not_undone_by_the_cancel_of_an_earlier_attempt(db: Connection) -> None:
    """F45: a retry after a cancel of a running job that was lost: the heartbeat does not cancel the new attempt."""
    first = start_worker(db)
    (job,) = enqueue(db)
    claim(db, first)
    assert one(db, "select tallybook.cancel(%s)", job) == "cancelling"
    # It dies: attempt 2 is in line, cancelled by the intent for attempt 1.
    db.execute("select tallybook.worker_stop(%s)", [first])
    attempt = one(db, "select tallybook.retry(%s)", job)
    second = start_worker(db)
    for _ in range(2):  # the first claim may meet only the cancelled attempt
        claim(db, second)
    assert one(db, "select state from tallybook.job where id = %s", job) == "running"
    told = db.execute("select job_id, attempt from tallybook.renew(%s, 0, %s)", [second, [job]]).fetchall()
    assert [row for row in told if row[1] in (None, attempt)] == []


@pytest.mark.servers
def test_a_cancelled_attempt_in_another_lane_does_not_run(db: Connection) -> None:
    """S4-14: a job that is set aside, cancelled, retried into another lane and cancelled again runs in neither lane."""
    hands = Hands(db)
    job = put(db, options={"fair_key": "a"})
    one(db, "select tallybook.fair_release()")
    (taken,) = hands.start()
    hands.say("move", taken)  # attempt 2 is in the lane for workers that know the task
    cancel(db, job)
    retry(db, job)
    one(db, "select tallybook.fair_release()")  # attempt 3 is in the lane of fair keys
    cancel(db, job)
    assert hands.start() == []  # meets attempt 3
    assert db.execute("select state, attempt from tallybook.job where id = %s", (job,)).fetchall() == [("cancelled", 3)]
    hands.worker = one(db, "select tallybook.worker_start('knows', '{q}', '{t}')")
    assert hands.start() == []
    assert db.execute("select state from tallybook.job where id = %s", (job,)).fetchall() == [("cancelled",)]
    assert db.execute("select from tallybook.tombstone").fetchall() == []
