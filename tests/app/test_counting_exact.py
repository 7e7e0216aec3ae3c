"""The counters are exact while processes commit, roll back, crash and cancel: a recount agrees at every moment."""

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from support.broken import without
from support.crowd import SEED, Crowd
from support.database import Connection

pytestmark = [pytest.mark.servers, pytest.mark.direct("kills processes and waits for the end of their sessions")]


def differences(
    dsn: str, crowd: Crowd, also: Callable[[Connection], None] = lambda conn: None
) -> tuple[int, list[Any]]:
    """Run the crowd while folding and verifying; return the number of checks and the differences."""
    ended = threading.Event()
    found: list[Any] = []
    looks = 0

    def look() -> None:
        nonlocal looks
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not ended.is_set() or looks < 3:
                found.extend(conn.execute("select * from tallybook.verify()").fetchall())
                conn.execute("select tallybook.fold()")
                also(conn)
                looks += 1
            found.extend(conn.execute("select * from tallybook.verify()").fetchall())

    looker = threading.Thread(target=look)
    looker.start()
    try:
        crowd.run()
    finally:
        ended.set()
        looker.join()
    return looks, found


@pytest.mark.slow
def test_a_recount_agrees_with_the_counters_at_every_moment(dsn: str, db: Connection) -> None:
    """S3-17: counters change in the counted transaction: crashes, rollbacks, late commits, cancels leave no error."""
    looks, found = differences(dsn, Crowd(dsn, SEED, seconds=2.0))
    print(looks)
    assert found == []
    (completed,) = db.execute("select sum(completed) from tallybook.counts()").fetchone() or (0,)
    assert (
        completed
        == (db.execute("select count(*) from tallybook.outcome where state = 'completed'").fetchone() or (0,))[0]
    )


@pytest.mark.slow
def test_a_recount_sets_the_counters_right_beside_producers_and_workers(dsn: str) -> None:
    """S3-33: an exact recount is possible at any time, beside producers and workers."""
    looks, found = differences(
        dsn, Crowd(dsn, SEED + 1, seconds=2.0), lambda conn: conn.execute("select tallybook.recount()").close()
    )
    print(looks)
    assert found == []


@pytest.mark.slow
def test_control_a_fold_that_ignores_holes_counts_too_little(dsn: str, db: Connection) -> None:
    """Negative control: if a fold ignores holes, late commits are never counted."""
    without(db, "fold", "values (f.number + 1, at, v_hi, v_holes,", "values (f.number + 1, at, v_hi, '{}',")
    _, found = differences(dsn, Crowd(dsn, SEED, seconds=1.0))
    assert found


@pytest.mark.slow
def test_control_ends_that_tell_nobody_are_found(dsn: str, db: Connection) -> None:
    """Negative control: if two ends are counted as one, verify reports the difference."""
    without(
        db, "_complete_held", "count(*), sum(k.attempt), 'completed'", "(count(*) + 1) / 2, sum(k.attempt), 'completed'"
    )
    _, found = differences(dsn, Crowd(dsn, SEED, seconds=0.5, producers=1, claimers=2))
    assert {"running", "completed"} <= {row[2] for row in found}
