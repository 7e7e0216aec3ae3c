"""A claim of many lanes: its order, its exactness, and the lanes that it looks at."""

from collections.abc import Callable

import psycopg
import pytest

from support.broken import without
from support.database import Connect, Connection, one
from support.hands import Hands, put

MANY = 30
"""More than the 10 lanes that a claim looks at one by one before it reads the others in one statement."""


def _looks(db: Connection) -> Callable[[], int]:
    """Count from now on how often the claim looks at one lane."""
    db.execute("create sequence public.looks")
    without(db, "_next", "begin\n  select h.lo", "begin\n  perform nextval('public.looks');\n  select h.lo")

    def counted() -> int:
        found = one(db, "select last_value - (not is_called)::int from public.looks")
        db.execute("alter sequence public.looks restart")
        return found

    return counted


def test_a_claim_of_many_lanes_looks_at_the_first(db: Connection) -> None:
    """S1-08: 30 priorities are claimed in their order; a claim looks closely at the first only, or at 10 empty ones."""
    hands = Hands(db)
    jobs = [put(db, priority=priority) for priority in reversed(range(MANY))]
    looks = _looks(db)
    order = [job.id for job in hands.claim(1)]
    assert looks() == 1
    while claimed := hands.claim(1):
        order += [job.id for job in claimed]
    assert order == jobs[::-1]
    looks()
    assert hands.claim(1) == []
    assert looks() == 10


def test_the_idle_look_of_many_lanes_looks_at_none(db: Connection) -> None:
    """services_due, in place of an idle claim, reads the lanes as a claim does; it sees work and a foreign cursor."""
    hands = Hands(db)
    work = "select work from tallybook.services_due('{}', worker => %s, queues => '{q}')"
    for priority in range(MANY):
        put(db, priority=priority)
    looks = _looks(db)
    assert hands.one(work, hands.worker) is True
    assert looks() <= 2
    while hands.claim(1):
        pass
    looks()
    assert hands.one(work, hands.worker) is False
    assert looks() == 0
    db.execute("update tallybook.claim set hi = '9000000000' where id = (select max(id) from tallybook.claim)")
    assert hands.one(work, hands.worker) is True


def test_a_claim_looks_at_its_own_queues_alone(db: Connection) -> None:
    """A worker with two of many queues looks at the lanes of these two only, without any statistics."""
    hands = Hands(db, "q1", "q2")
    for n in range(100):
        put(db, queue=f"q{n}")
    looks = _looks(db)
    assert len(hands.claim(1)) == 1
    assert looks() <= 4


@pytest.mark.direct("holds a transaction open")
def test_many_lanes_are_drained_in_order_and_whole(db: Connection, connect: Connect) -> None:
    """Priorities go first, then the oldest of the queues; a job that commits behind its lane's cursor is taken."""
    names = [f"q{n}" for n in range(MANY)]
    hands = Hands(db, *names)
    line = [put(db, queue=name) for name in names[::-1]]
    urgent = put(db, queue="q7", priority=0)
    late = connect(autocommit=False)
    hole = put(late, queue="q3")
    taken = [job.id for _ in range(MANY + 1) for job in hands.claim(1)]
    assert taken == [urgent, *line]
    assert hands.claim(1) == []
    late.commit()
    assert [job.id for job in hands.claim(1)] == [hole]
    assert hands.claim(1) == []


def test_a_foreign_cursor_among_many_is_seen(db: Connection) -> None:
    """Among many lanes, too, a claim refuses the cursor of another cluster."""
    hands = Hands(db)
    for priority in range(MANY):
        put(db, priority=priority)
    while hands.claim(1):
        pass
    db.execute("update tallybook.claim set hi = '9000000000' where id = (select max(id) from tallybook.claim)")
    with pytest.raises(psycopg.errors.Error) as error:
        hands.claim(1)
    assert error.value.sqlstate == "TB004"
