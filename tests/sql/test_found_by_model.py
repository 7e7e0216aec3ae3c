"""Faults in the SQL that the explicit-state model (tests/support/protocol_model.py) found, on the real server."""

from uuid import uuid4

import psycopg
import pytest

from support.database import Connection, one
from tallybook._db.migrate import migrate
from tallybook.embedded import temporary_server

pytestmark = pytest.mark.direct("kills the server and holds transactions open")

START = "select tallybook.worker_start(%s, '{q}', at => clock_timestamp())"


# The control is the former worker_start: the row alone, with the commit that its session has.
@pytest.mark.parametrize(
    ("start", "again"),
    [
        (START, False),
        (
            """
insert into tallybook.worker (name, queues, tasks, parts, session, started_at, seen_at)
values (%s, '{q}', '{}', '{}', false, clock_timestamp(), clock_timestamp()) returning id""",
            True,
        ),
    ],
    ids=["worker_start", "control"],
)
def test_a_crash_gives_a_workers_number_to_nobody_else(start: str, again: bool) -> None:
    """F5: the number of a worker that started in a session with asynchronous commit stays its own after a crash.

    The control, a row that is not committed durably, shows the same number given twice.
    """
    with temporary_server(settings={"wal_writer_delay": "10s", "synchronous_commit": "on"}) as server:
        dsn = server.create_database("crash")
        with psycopg.connect(dsn, autocommit=True) as db:
            migrate(db)
            db.execute("checkpoint")  # so that the next number is logged again
            db.execute("set synchronous_commit = off")
            before = one(db, start, "before")
            server.kill()
        server.start()
        with psycopg.connect(dsn, autocommit=True) as db:
            assert (one(db, start, "after") == before) is again


@pytest.mark.parametrize("cancel_first", [True, False])
def test_a_zombie_that_reads_late_does_not_start_what_was_cancelled(db: Connection, cancel_first: bool) -> None:
    """F8, I16: a worker that reads its jobs only after it was given up learns that a user has cancelled one.

    The cancel may have met its attempt or the next one. A job that nobody cancelled is read as usual.
    """
    worker, lease = one(db, START, "zombie"), uuid4()
    job, other = (one(db, "select tallybook.enqueue('q', 'work')") for _ in range(2))
    assert one(db, "select jobs from tallybook.claim(%s, '{q}', '{9}', %s)", worker, lease) == 2
    if cancel_first:
        assert one(db, "select tallybook.cancel(%s)", job) == "cancelling"
    assert one(db, "select tallybook.worker_stop(%s)", worker) == 2, "given up: both go back in line"
    if not cancel_first:
        assert one(db, "select tallybook.cancel(%s)", job) == "cancelled"
    read = db.execute(
        "select job_id, attempt, coalesce(blocked_by = 'cancelled', false) from tallybook.claimed_jobs(%s)", [lease]
    ).fetchall()
    assert read == [(job, 1, True), (other, 1, False)]
    assert one(db, "select tallybook.cancel_running(%s, %s, 1)", lease, job) == "refused", "another's attempt by now"


def test_a_cancel_that_was_undone_by_retry_does_not_reach_back(db: Connection) -> None:
    """A cancel that a retry has undone does not stop the next attempt, even if that is read late."""
    worker, lease = one(db, START, "late"), uuid4()
    job = one(db, "select tallybook.enqueue('q', 'work')")
    assert one(db, "select tallybook.cancel(%s)", job) == "cancelled"
    assert one(db, "select tallybook.retry(%s)", job) == 2
    assert one(db, "select jobs from tallybook.claim(%s, '{q}', '{9}', %s)", worker, lease) == 1
    read = db.execute(
        "select job_id, attempt, coalesce(blocked_by = 'cancelled', false) from tallybook.claimed_jobs(%s)", [lease]
    ).fetchall()
    assert read == [(job, 2, False)]
