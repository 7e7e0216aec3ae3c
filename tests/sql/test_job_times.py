"""updated_at and last_attempt_at of the view job: when its state began, and when it was last started."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from support.database import Connection, one
from support.hands import Hands, Job, put
from support.subjects import clock, promote


def times(db: Connection, job: int) -> tuple[Any, ...]:
    """The state, updated_at and last_attempt_at."""
    (row,) = db.execute("select state, updated_at, last_attempt_at from tallybook.job where id = %s", [job]).fetchall()
    return row


def started(db: Connection, job: int) -> datetime:
    """Return the time of the job's newest claim, even if that started nothing."""
    return one(db, "select max(started_at) from tallybook.attempt where job_id = %s", job)


def ended(db: Connection, job: int) -> datetime:
    return one(db, "select max(ended_at) from tallybook.attempt where job_id = %s", job)


def test_from_line_to_end(db: Connection, hands: Hands) -> None:
    """S1-02: updated_at is the time of the enqueue, then the claim, then the end; last_attempt_at is the claim's."""
    job = put(db)
    enqueued_at = one(db, "select enqueued_at from tallybook.job where id = %s", job)
    assert times(db, job) == ("available", enqueued_at, None)
    (attempt,) = hands.start()
    claimed_at = started(db, job)
    assert times(db, job) == ("running", claimed_at, claimed_at)
    hands.complete(attempt)
    assert times(db, job) == ("completed", ended(db, job), claimed_at)


def test_through_a_failure(db: Connection, hands: Hands) -> None:
    """updated_at is the failure, then the due time, then the death; last_attempt_at is the newest start."""
    job = put(db)
    hands.fail(hands.start()[0], "1 h")
    first, failed_at = started(db, job), ended(db, job)
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
