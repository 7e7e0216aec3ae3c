"""Jobs that wait for parents: when they start, when they are cancelled, and what they receive."""

from typing import Any

import pytest
from psycopg import errors as pg

from support.database import Connect, Connection
from support.hands import Hands, child, put, resolve, states


def job(db: Connection, job_id: int, columns: str = "state, reason") -> Any:
    query = f"select {columns} from tallybook.job where id = %s"  # noqa: S608
    return db.execute(query, (job_id,)).fetchone()  # type: ignore[arg-type]


@pytest.mark.servers
def test_a_job_waits_until_all_its_parents_have_completed(db: Connection, hands: Hands) -> None:
    """S4-22: a job with parents waits and names the open ones; it is available when the last of them has completed."""
    one, two = put(db), put(db)
    last = child(db, one, two)
    assert job(db, last) == ("waiting", f"2 of its 2 parents have not ended: {one}, {two}")
    assert resolve(db) == (0, 0, 0, 0)
    first, second = hands.start()
    hands.complete(first)
    assert resolve(db) == (1, 0, 0, 0)
    assert job(db, last) == ("waiting", f"1 of its 2 parents have not ended: {two}")
    hands.complete(second)
    assert resolve(db) == (1, 1, 0, 0)
    assert job(db, last) == ("available", None)
    assert hands.run_all() == [last]
    assert db.execute("select count(*) from tallybook.parent").fetchone() == (0,)


def test_backoff_snooze_and_rescue_are_no_ends(db: Connection, hands: Hands) -> None:
    """A parent that fails, is snoozed or loses its worker has not ended, so its child continues to wait."""
    parent = put(db)
    waiter = child(db, parent)
    for end in ("fail", "snooze", "lost"):
        (attempt,) = hands.start()
        if end == "fail":
            assert hands.fail(attempt) == "available"
        elif end == "snooze":
            assert hands.say("snooze", attempt, "1 hour") == "scheduled"
            assert resolve(db) == (0, 0, 0, 0)
            db.execute("select tallybook.promote(at => clock_timestamp() + interval '2 h')")
        else:
            hands.rescued()
            hands = Hands(db)
        assert resolve(db) == (0, 0, 0, 0)
        assert states(db, waiter) == ["waiting"]
    hands.complete(*hands.start())
    assert resolve(db) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    "end", ["dead", "cancelled in line", "cancelled while it ran", "dropped", "cancelled while scheduled"]
)
def test_a_parent_that_does_not_complete_cancels_its_children(db: Connection, hands: Hands, end: str) -> None:
    """A dead or cancelled parent cancels its children, and theirs, with that reason, even if another parent is open."""
    other = put(db, queue="elsewhere")
    parent = put(db, run_at="2100-01-01") if end.endswith("scheduled") else put(db)
    waiter = child(db, parent, other)
    below = child(db, waiter)
    any_way = child(db, parent, on_parent="any", failed_as="failed")
    if end.startswith("dead") or end == "dropped":
        hands.fail(*hands.start(), final=True)
        if end == "dropped":
            assert db.execute("select tallybook.drop_dead(%s)", (parent,)).fetchone() == (True,)
        what = "dead: no luck"
    elif end == "cancelled while it ran":
        (running,) = hands.start()
        db.execute("select tallybook.cancel(%s, 'why')", (parent,))
        assert resolve(db) == (0, 0, 0, 0)  # it may still complete
        assert hands.say("cancel_running", running, "why") == "cancelled"
        what = "cancelled: why"
    else:
        db.execute("select tallybook.cancel(%s, 'why')", (parent,))
        what = "cancelled: why"
    assert resolve(db) == (3, 1, 2, 0)
    reason = f"its parent {parent} (t) is {what}"
    assert job(db, waiter, "state, reason, attempts") == ("cancelled", reason, 0)
    assert job(db, below) == ("cancelled", f"its parent {waiter} (child) is cancelled: {reason}"[:200])
    assert hands.run_all() == [any_way]
    state, why = what.split(": ")
    (told,) = job(db, any_way, "args -> 'failed'")
    assert told == [
        {"job": parent, "task": "t", "state": state, "reason": "failed" if end == "dead" else None, "message": why}
    ]
    assert job(db, any_way, "options -> 'parents'") == ({"ended": 1, "failed": 1},)


def test_who_needs_no_success_waits_for_all(db: Connection, hands: Hands) -> None:
    """With on_parent any, a job runs once all parents have ended, and gets the failed ones in their order."""
    jobs = [put(db) for _ in range(4)]
    last = child(db, *reversed(jobs), on_parent="any", failed_as="failed", args='{"x": 1}')
    a, b, c, d = hands.start()
    hands.complete(a)
    hands.fail(b, final=True)
    hands.complete(c)
    assert resolve(db) == (3, 0, 0, 0)
    assert states(db, last) == ["waiting"]
    hands.fail(d, final=True)
    assert resolve(db) == (1, 1, 0, 0)
    (args,) = job(db, last, "args")
    assert (args["x"], [failed["job"] for failed in args["failed"]]) == (1, [jobs[3], jobs[1]])


def test_a_parent_that_has_ended_already(db: Connection, hands: Hands) -> None:
    """A child that is enqueued after its parent has ended waits for one parents_resolve."""
    parent = put(db)
    assert hands.run_all() == [parent]
    with db.transaction():
        waiter = child(db, parent)
        assert states(db, waiter) == ["waiting"]
    assert resolve(db) == (1, 1, 0, 0)


def test_parents_that_are_not_on_record_are_refused(db: Connection, connect: Connect) -> None:
    """A parent that does not exist raises TB002; an uncommitted one is refused until it commits."""
    other = connect()
    with pytest.raises(pg.DatabaseError) as refused:
        child(db, 12345)
    assert refused.value.sqlstate == "TB002"
    with other.transaction():
        late = put(other)
        with pytest.raises(pg.DatabaseError):
            child(db, late)
    assert states(db, child(db, late)) == ["waiting"]


@pytest.mark.slow
def test_chains_and_diamonds(db: Connection, hands: Hands) -> None:
    """A chain of 300 jobs runs in order; the end of a diamond runs once, after both its sides."""
    top = put(db)
    left, right = child(db, top), child(db, top)
    bottom = child(db, left, right)
    chain = [bottom]
    for _ in range(300):
        chain.append(child(db, chain[-1]))
    order: list[int] = []
    while started := hands.start():
        for one in started:
            order.append(one.id)
            hands.complete(one)
        resolve(db)
    assert order == [top, *sorted([left, right]), *chain]


def test_a_dead_parent_ends_a_whole_chain_by_one_call(db: Connection, hands: Hands) -> None:
    """One parents_resolve cancels everything that waits below a dead job, however deep."""
    chain = [put(db)]
    for _ in range(300):
        chain.append(child(db, chain[-1]))
    hands.fail(*hands.start(), final=True)
    assert resolve(db)[2] == 300
    assert set(states(db, *chain[1:])) == {"cancelled"}
    assert hands.claim() == []
    assert db.execute("select count(*) from tallybook.waiting").fetchone() == (0,)


@pytest.mark.slow
def test_thousands_of_parents(db: Connection, hands: Hands) -> None:
    """A follow-up of 3,000 jobs is released with the first 1,000 failures and the number of all failures."""
    n = 3000
    row = db.execute(
        "select job_ids from tallybook.fan_out(array_fill('q'::text, array[%(n)s + 1]),"
        " array_fill('t'::text, array[%(n)s + 1]), array_fill('{}'::text, array[%(n)s + 1]),"
        " on_parents => array_fill('any'::text, array[%(n)s + 1]),"
        " failed_as => array_fill('failed'::text, array[%(n)s + 1]),"
        " afters => array_fill(null::text, array[%(n)s])"
        " || (select array_agg(-i)::text from generate_series(1, %(n)s) i))",
        {"n": n},
    ).fetchone()
    assert row is not None
    *parents, last = row[0]
    while started := hands.start(500):
        for one in started:
            if one.id % 2:
                hands.fail(one, final=True)
            else:
                hands.complete(one)
    odd = sum(parent % 2 for parent in parents)
    after, ended = None, 0
    for _ in range(n // 500 + 1):
        found = db.execute("select ended, last from tallybook.parents_resolve(after => %s)", (after,)).fetchone()
        assert found is not None
        ended, after = ended + found[0], found[1]
    assert (ended, after) == (n, None)
    assert job(db, last, "state, jsonb_array_length(args -> 'failed'), options -> 'parents'") == (
        "available", 1000, {"ended": n, "failed": odd},
    )  # fmt: skip


def test_cancel_and_retry_of_a_waiting_child(db: Connection, hands: Hands) -> None:
    """A cancelled child cancels its own; a retry while its parents are open undoes the cancel, a later one runs it."""
    parent = put(db)
    waiter, below = child(db, parent), 0
    assert db.execute("select tallybook.cancel(%s, 'no')", (waiter,)).fetchone() == ("cancelled",)
    assert job(db, waiter) == ("cancelled", "no")
    db.execute("select tallybook.rescue()")
    assert db.execute("select tallybook.retry(%s)", (waiter,)).fetchone() == (1,)
    assert states(db, waiter) == ["waiting"]
    below = child(db, waiter)
    db.execute("select tallybook.cancel_many(task => 'child', args => '{}', states => array['waiting'], max_jobs => 1)")
    assert states(db, waiter, below) == ["cancelled", "waiting"]
    assert resolve(db) == (1, 0, 1, 0)
    assert states(db, below) == ["cancelled"]
    hands.complete(*hands.start())
    assert resolve(db) == (1, 1, 0, 0)  # it enters its lane, where the claim ends it
    assert states(db, waiter) == ["cancelled"]
    assert hands.start() == []
    assert db.execute("select tallybook.retry(%s)", (waiter,)).fetchone() == (2,)
    assert hands.run_all() == [waiter]
    assert db.execute("select tallybook.retry(%s)", (below,)).fetchone() == (2,)
    assert hands.run_all() == [below]


def test_a_dead_parent_that_is_retried(db: Connection, hands: Hands) -> None:
    """A dead parent that is retried before parents_resolve runs has not ended; after it, the child stays cancelled.

    If the child is retried as well, it runs without waiting for its parents.
    """
    parent = put(db)
    waiter = child(db, parent)
    hands.fail(*hands.start(), final=True)
    db.execute("select tallybook.retry(%s)", (parent,))
    assert resolve(db) == (0, 0, 0, 0)
    hands.fail(*hands.start(), final=True)
    assert resolve(db) == (1, 0, 1, 0)
    db.execute("select tallybook.retry(%s)", (parent,))
    started = hands.start()
    assert ([one.id for one in started], states(db, waiter)) == ([parent], ["cancelled"])
    assert db.execute("select tallybook.retry(%s)", (waiter,)).fetchone() == (2,)
    assert hands.run_all() == [waiter]
    hands.complete(*started)
    assert states(db, parent, waiter) == ["completed", "completed"]


def test_time_order_key_and_expiry_hold_afterwards(db: Connection, hands: Hands) -> None:
    """A child's run_at, order key and expires_at apply once its parents have ended."""
    parent = put(db)
    later = child(db, parent, run_at="2100-01-01")
    lined = child(db, parent, order_key="k")
    behind = put(db, order_key="k")
    expired = child(db, parent, expires_at="2001-01-01")
    assert job(db, lined, "state, order_key") == ("waiting", "k")
    assert db.execute("select cancelled from tallybook.cancel_many(order_key => 'none')").fetchone() == (0,)
    started = hands.start()
    assert {one.id for one in started} == {parent, behind}
    hands.complete(*[one for one in started if one.id == parent])
    db.execute("select tallybook.rescue(), tallybook._release('k')")
    assert states(db, lined) == ["waiting"]
    assert resolve(db) == (3, 3, 0, 0)
    assert states(db, later, lined, expired) == ["scheduled", "available", "available"]
    assert hands.start() == []
    assert states(db, lined, expired) == ["waiting", "dead"]
    hands.complete(*[one for one in started if one.id == behind])
    assert hands.run_all() == [lined]


def test_cancel_many_by_order_key_finds_waiting_children(db: Connection) -> None:
    """cancel_many by an order key also finds a child that waits for its parents."""
    waiter = child(db, put(db), order_key="k")
    assert db.execute("select cancelled from tallybook.cancel_many(order_key => 'k')").fetchone() == (1,)
    assert states(db, waiter) == ["cancelled"]


def test_a_circle_is_refused(db: Connection) -> None:
    """A unique key whose job would wait for itself, directly or not, raises TB005; a batch is refused, too."""
    first = child(db, put(db), unique_key="k")
    between = child(db, first)
    assert child(db, put(db), unique_key="k") == first  # the existing job, whose parents stay the same
    for after in (first, between):
        with pytest.raises(pg.DatabaseError, match=f"job {first} would wait for itself") as refused:
            child(db, after, unique_key="k")
        assert refused.value.sqlstate == "TB005"
    for after in ("{-1}", "{-2}", "{0}", "{null}"):
        with pytest.raises(pg.DatabaseError, match="job 1 of the batch waits for"):
            db.execute(
                "select tallybook.fan_out('{q,q}', '{t,t}', array['{}', '{}'], afters => array[%s, null])", (after,)
            )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"on_parent": "sometimes"}, "on_parent"),
        ({"failed_as": ""}, "failed_as"),
        ({"options": '{"parents": {}}'}, "options have no parents"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"args": "[]"}, "args"),
        ({"task": ""}, "task name"),
        ({"queue": ""}, "queue"),
        ({"after": None}, "after is null"),
    ],
)
def test_bad_input(db: Connection, more: dict[str, Any], says: str) -> None:
    """Invalid arguments raise TB005, and nothing is enqueued."""
    parent = put(db)
    with pytest.raises(pg.DatabaseError, match=says) as refused:
        child(db, parent, **more)
    assert refused.value.sqlstate == "TB005"
    assert db.execute("select count(*) from tallybook.job").fetchone() == (1,)


def test_no_parents_is_an_ordinary_job(db: Connection, hands: Hands) -> None:
    """With an empty list of parents a job is an ordinary one."""
    waiter = child(db)
    assert hands.run_all() == [waiter]
