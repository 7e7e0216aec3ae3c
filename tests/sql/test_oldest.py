"""The time since which a queue's oldest job could run, for pages and metrics."""

from datetime import UTC, datetime, timedelta

import pytest

from support.broken import without
from support.database import Connect, Connection, call
from support.hands import Hands

T = datetime(2026, 1, 31, 9, tzinfo=UTC)
OF = "select queue, oldest from tallybook._oldest_of(%s) order by queue"


def put(conn: Connection, queue: str, minutes: int, priority: int = 2) -> None:
    call(conn, "enqueue", queue=queue, task="noop", priority=priority, at=T + timedelta(minutes=minutes))


def oldest(db: Connection, *queues: str) -> dict[str, int]:
    """Return the minutes after T, by queue; check that the view agrees."""
    found = {queue: round((at - T).total_seconds() / 60) for queue, at in db.execute(OF, [list(queues)]).fetchall()}
    view = db.execute("select queue, oldest from tallybook.queue_stats where oldest is not null").fetchall()
    assert found == {queue: round((at - T).total_seconds() / 60) for queue, at in view if queue in queues}
    return found


@pytest.mark.direct("holds transactions open beside others")
@pytest.mark.parametrize("open_ones", [0, 2])
def test_the_oldest_of_a_queue_is_the_next_of_its_lines(db: Connection, connect: Connect, open_ones: int) -> None:
    """S3-36: the oldest job is never a claimed one, even of a transaction that is claimed in part, or uncommitted.

    With other transactions open, it is found in another way, with the same result.
    """
    put(db, "a", 1)
    Hands(db, "a").claim()  # so that all go to one lane
    others = [connect(autocommit=False) for _ in range(open_ones)]
    for n, other in enumerate(others):
        put(other, "a", n)  # older than all, and not committed
    with db.transaction():
        for minutes in range(10, 20):
            put(db, "a", minutes)
    put(db, "a", 30, priority=1)
    put(db, "b", 40)
    put(db, "done", 5)
    assert oldest(db, "a", "b", "done", "never") == {"a": 10, "b": 40, "done": 5}
    Hands(db, "done").claim()
    assert oldest(db, "a", "b", "done") == {"a": 10, "b": 40}
    hands = Hands(db, "a")
    hands.claim(1)  # of the lane that goes first
    assert oldest(db, "a") == {"a": 10}
    hands.claim(3)
    assert oldest(db, "a", "b") == {"a": 13, "b": 40}
    hands.claim(7)
    assert oldest(db, "a", "b") == {"b": 40}
    for n, other in enumerate(others):  # the claims have passed them, and they are there now
        other.commit()
        assert oldest(db, "a") == {"a": 0}, n
    put(db, "a", 50)
    assert oldest(db, "a") == {"a": 50}  # a claim takes the late jobs after this one


@pytest.mark.direct("holds transactions open beside others")
def test_control_an_open_transaction_is_asked_about(db: Connection, connect: Connect) -> None:
    """Control of the quick way: if it is taken with a hole in the line, the late job is not found."""
    hands, other = Hands(db, "a"), connect(autocommit=False)
    put(db, "a", 5)  # so that both go to one lane
    put(other, "a", 0)
    put(db, "a", 10)
    assert len(hands.claim()) == 2
    other.commit()
    assert oldest(db, "a") == {"a": 0}
    without(db, "_oldest_of", "h.holes = '{}' and h.closed = '{}'", "true")
    # Another test's transaction in the same cluster would send it the other way.
    without(db, "_oldest_of", "pg_snapshot_xmin(v_snap) >= pg_snapshot_xmax(v_snap)", "true")
    assert db.execute(OF, [["a"]]).fetchall() == []
