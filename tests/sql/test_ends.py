"""Ends of attempts inside a user's transaction: `ended`, the mark of atomic tasks, isolation levels."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from support.database import Connect, Connection, one
from support.waiting import wait_until

pytestmark = pytest.mark.direct("looks at locks of single sessions")

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
    for end, expected in (("rollback", "running"), ("commit", "completed")):
        user.execute(f"begin isolation level {level}")  # type: ignore[call-overload]
        assert one(user, COMPLETE, LEASE, job) is True
        assert one(user, COMPLETE, LEASE, job) is True  # a repeated call
        assert one(db, ENDED, LEASE, job, 1) == "running"
        user.execute(end)  # type: ignore[call-overload]
        assert one(db, ENDED, LEASE, job, 1) == expected


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_ends_of_one_attempt_meet(db: Connection, connect: Connect, level: str, end: str) -> None:
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
    first.execute(end)  # type: ignore[call-overload]
    waiting.join(60)
    assert said == [end == "rollback"]
    assert one(db, ENDED, LEASE, job, 1) == ("failed" if end == "commit" else "completed")


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
