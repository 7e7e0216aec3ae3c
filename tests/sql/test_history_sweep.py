"""The sweep of small tables that grow with history: old rows go in batches, and rows in use stay."""

from datetime import datetime, timedelta

import psycopg
import pytest

from support.broken import without
from support.database import Connect, Connection, one
from support.hands import Hands
from support.sessions import enqueue

DAY = timedelta(days=1)
SWEEP = "select swept, more from tallybook._sweep(%s)"


def sweep(db: Connection, at: datetime) -> int:
    return one(db, SWEEP, at)


def forget(db: Connection) -> None:
    """Drop the history; dead letters and scheduled jobs stay."""
    db.execute("truncate tallybook.entry, tallybook.claim, tallybook.outcome")


def make_dead(db: Connection, hands: Hands) -> int:
    (job,) = enqueue(db)
    hands.fail(*hands.claim(), final=True)
    return job


def test_dead_letters_go_after_their_time(db: Connection, now: datetime) -> None:
    """S3-21: a dead letter is kept for 30 days or the installation's own retention; younger ones stay."""
    make_dead(db, Hands(db))
    assert sweep(db, now + 29 * DAY) == 0
    db.execute("select tallybook.retention_set('dead', '60 days')")
    assert sweep(db, now + 31 * DAY) == 0
    db.execute("select tallybook.retention_set('dead', '30 days')")
    assert sweep(db, now + 31 * DAY) == 1
    assert one(db, "select count(*) from tallybook.dead") == 0


def test_a_dead_letter_that_somebody_has_is_left(db: Connection, connect: Connect, now: datetime) -> None:
    """A sweep skips a locked row without waiting and deletes it later."""
    make_dead(db, Hands(db))
    other = connect(autocommit=False)
    other.execute("select from tallybook.dead for update")
    db.execute("set lock_timeout = '1ms'")
    assert sweep(db, now + 31 * DAY) == 0
    other.rollback()
    assert sweep(db, now + 31 * DAY) == 1


def test_a_batch_is_at_most_a_thousand_rows(db: Connection, now: datetime) -> None:
    """S3-31: one sweep deletes at most 1000 rows of a table, and reports whether there are more."""
    db.execute(
        "insert into tallybook.fire (schedule, tick, fired_at, what)"
        " select 's', %s - make_interval(secs => n), %s, 'enqueued'"
        " from generate_series(1, 1500) n",
        [now, now],
    )
    assert db.execute(SWEEP, [now + 91 * DAY]).fetchone() == (1000, True)
    assert db.execute(SWEEP, [now + 91 * DAY]).fetchone() == (500, False)


def test_ticks_go_after_ninety_days(db: Connection, now: datetime) -> None:
    """S3-21: the outcome of a tick is kept for 90 days, for each schedule."""
    for name, days in (("a", 89), ("b", 91), ("c", 92), ("c", 1)):
        db.execute(
            "insert into tallybook.fire (schedule, tick, fired_at, what) values (%s, %s, %s, 'enqueued')",
            [name, now - days * DAY, now],
        )
    assert sweep(db, now) == 2
    assert db.execute("select schedule from tallybook.fire order by 1").fetchall() == [("a",), ("c",)]


def test_calls_stay_as_long_as_their_window(db: Connection, now: datetime) -> None:
    """S3-21: calls of a rate limit leave with the history of class default, but not before the rule's window ends."""
    db.execute("select tallybook.rate_limit_set('week', 5, '10 days'), tallybook.rate_limit_set('second', 5, '1 s')")
    for name, days in (("week", 9), ("week", 11), ("second", 6), ("second", 9)):
        db.execute(
            "insert into tallybook.rate_state (name, next_at, front_at, granted) values (%s, now(), now(), 1)"
            " on conflict do nothing",
            [name],
        )
        db.execute("insert into tallybook.rate_call values (%s, 1, 1, %s)", [now - days * DAY, name])
    assert sweep(db, now) == 2
    left = db.execute("select name, %s - called_at from tallybook.rate_call order by 1", [now]).fetchall()
    assert left == [("second", 6 * DAY), ("week", 9 * DAY)]


def test_workers_go_when_no_claim_names_them(db: Connection, now: datetime) -> None:
    """S3-21: a worker that ended longer ago than the longest retention is deleted; a live worker never is."""
    gone, lives = Hands(db), Hands(db)
    db.execute("select tallybook.worker_stop(%s)", [gone.worker])
    assert sweep(db, now + 89 * DAY) == 0
    assert sweep(db, now + 91 * DAY) == 1
    assert db.execute("select id from tallybook.worker").fetchall() == [(lives.worker,)]


def test_progress_goes_with_its_job(db: Connection, now: datetime) -> None:
    """S3-21: progress stays while its job exists, even dead or scheduled, and goes once the job has left."""
    hands = Hands(db)
    dead = make_dead(db, hands)
    later = one(db, "select tallybook.enqueue('q', 'work', run_at => %s)", now + DAY)
    left = one(db, "select tallybook.enqueue('q', 'work')")
    db.execute(
        "insert into tallybook.progress (job_id, attempt, updated_at) select j, 1, now() from unnest(%s::bigint[]) j",
        [[dead, later, left]],
    )
    assert sweep(db, now) == 0
    forget(db)
    assert sweep(db, now) == 1
    assert {row[0] for row in db.execute("select job_id from tallybook.progress").fetchall()} == {dead, later}


def _generations(db: Connection) -> list[int]:
    return one(db, "select array_agg(generation order by generation) from tallybook.unique_key where key = 'k'")


def _taken(db: Connection, hands: Hands, times: int) -> None:
    for _ in range(times):
        enqueue(db, unique_key="k")
        hands.complete(*hands.claim())


def test_old_generations_of_a_key_go(db: Connection, now: datetime) -> None:
    """S3-21: once the jobs of a unique key have left, only its newest generation stays, and the key still works."""
    hands = Hands(db)
    _taken(db, hands, 5)
    assert sweep(db, now) == 0, "their jobs are there"
    forget(db)
    assert sweep(db, now) == 4
    assert _generations(db) == [5]
    first, again = (one(db, "select tallybook.enqueue('q', 'work', unique_key => 'k')") for _ in range(2))
    assert first == again
    assert _generations(db) == [5, 6]


def test_generations_go_without_a_gap(db: Connection, now: datetime) -> None:
    """S3-21: a generation whose job exists keeps all later ones: a gap would let an old snapshot take the key."""
    _taken(db, Hands(db), 5)
    second = one(db, "select job_id from tallybook.unique_key where generation = 2")
    forget(db)
    db.execute(
        "insert into tallybook.dead (job_id, died_at, enqueued_at, lane_id, attempt, failures, crashes, reason, task,"
        " args) values (%s, %s, %s, 1, 1, 1, 0, 'failed', 'work', '{}')",
        [second, now, now],
    )
    assert sweep(db, now) == 1
    assert _generations(db) == [2, 3, 4, 5]


@pytest.mark.direct("a transaction that stays open")
@pytest.mark.parametrize("guard", [True, False], ids=["guard", "control"])
def test_a_producer_with_an_old_snapshot_is_not_fooled(
    db: Connection, connect: Connect, now: datetime, guard: bool
) -> None:
    """S3-21: a producer whose old snapshot shows an older generation as the newest gets 40001 and no second job.

    Control: without the lock on the generation that it saw, it gets a second job.
    """
    if not guard:
        without(db, "_claim_key", "for key share")
    hands = Hands(db)
    _taken(db, hands, 1)
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read")
    old.execute("select count(*) from tallybook.unique_key")
    _taken(db, hands, 2)
    forget(db)
    db.execute("select tallybook.enqueue('q', 'work', unique_key => 'k')")
    assert sweep(db, now) == 3
    if not guard:
        assert one(old, "select tallybook.enqueue('q', 'work', unique_key => 'k')") is not None
        old.commit()
        assert len(hands.claim()) == 2
        return
    with pytest.raises(psycopg.errors.SerializationFailure):
        old.execute("select tallybook.enqueue('q', 'work', unique_key => 'k')")
    old.rollback()
    assert _generations(db) == [4]


def test_turns_go_with_their_jobs(db: Connection, connect: Connect, now: datetime) -> None:
    """S3-21: older turns of an order key go, the newest once its job has left; none goes while the line is locked."""
    hands = Hands(db)
    for _ in range(3):
        enqueue(db, order_key="k")
        hands.complete(*hands.start())
    assert one(db, "select count(*) from tallybook.order_turn") == 3
    other = connect(autocommit=False)
    other.execute("select pg_advisory_xact_lock(1413565448, hashtext('k'))")
    assert sweep(db, now) == 0
    other.rollback()
    assert sweep(db, now) == 2
    forget(db)
    assert sweep(db, now) == 1
    db.execute("select tallybook.enqueue('q', 'work', order_key => 'k')")
    assert len(hands.start()) == 1
