"""Order keys: jobs with one key run one at a time, in the order in which they came into line."""

import threading
import time
from typing import Any

import psycopg
import pytest

from support.broken import without
from support.database import Connect, Connection
from support.hands import Hands, put, put_many, states
from support.waiting import wait_until

pytestmark = pytest.mark.direct("holds transactions open beside one another and watches which waits")

LOOK = "select tallybook.rescue()"


def test_one_at_a_time_in_their_order(db: Connection, hands: Hands) -> None:
    """Jobs with one key start one after the other, in the order of their enqueue."""
    jobs = [put(db, order_key="k") for _ in range(4)]
    for job in jobs:
        (started,) = hands.start()
        assert started.id == job
        assert states(db, *jobs)[jobs.index(job) + 1 :] == ["waiting"] * (3 - jobs.index(job))
        assert hands.start() == []
        hands.complete(started)
    assert states(db, *jobs) == ["completed"] * 4
    assert db.execute("select count(*) from tallybook.waiting").fetchone() == (0,)
    assert db.execute("select count(*) from tallybook.order_line").fetchone() == (0,)


def test_whatever_queue_priority_and_task(db: Connection) -> None:
    """A key's line spans queues, priorities and tasks; jobs of another key or of none do not wait for it."""
    hands = Hands(db, "a", "b")
    jobs = [
        put(db, queue="a", task="x", priority=5, order_key="k"),
        put(db, queue="b", task="y", priority=1, order_key="k"),
        put(db, queue="a", task="z", priority=0, order_key="k"),
    ]
    others = {put(db, queue="a", order_key="other"), put(db, queue="b")}
    first = [job for _ in range(6) for job in hands.start()]
    assert {job.id for job in first} == {jobs[0], *others}
    hands.complete(*first)
    assert hands.run_all() == jobs[1:]


def test_a_batch_keeps_its_order(db: Connection, hands: Hands) -> None:
    """enqueue_many lines its jobs up in the given order, with unique keys or without."""
    jobs = put_many(db, 4, unique_keys=["z", None, "a", None], order_keys=["k"] * 4)
    assert hands.run_all() == sorted(jobs)


def test_a_scheduled_job_comes_into_line_when_it_is_promoted(db: Connection, hands: Hands) -> None:
    """A scheduled job delays no other until it is due; then it is the last in line."""
    late = put(db, order_key="k", run_at=hands.one("select clock_timestamp() + interval '1 h'"))
    first, second = (put(db, order_key="k") for _ in range(2))
    (started,) = hands.start()
    assert started.id == first
    db.execute("update tallybook.scheduled set run_at = clock_timestamp()")
    assert hands.one("select promoted from tallybook.promote()") == 1
    third = put(db, order_key="k")
    hands.complete(started)
    assert hands.run_all() == [second, late, third]


def test_the_first_scheduled_jobs_of_a_key_keep_their_order(db: Connection, hands: Hands) -> None:
    """Two jobs of a key without any turn yet, promoted and claimed by two workers: the second waits for the first."""
    run_at = hands.one("select clock_timestamp() + interval '1 h'")
    first, second = (put(db, order_key="k", run_at=run_at, priority=priority) for priority in (1, 2))
    db.execute("update tallybook.scheduled set run_at = clock_timestamp()")
    assert hands.one("select promoted from tallybook.promote()") == 2
    assert db.execute("select job_id from tallybook.order_line order by seq").fetchall() == [(first,), (second,)]
    (early,), (late,) = hands.claim(), Hands(db).claim()
    assert (early.id, late.id) == (first, second)
    assert hands.turn([late]) == ([], [])
    assert (hands.turn([early]), states(db, second)) == (([first], []), ["waiting"])


@pytest.mark.parametrize("end", ["fail", "snooze", "rescue"])
def test_it_holds_its_line_until_it_has_ended_for_good(db: Connection, hands: Hands, end: str) -> None:
    """A job in backoff, snoozed or rescued stays first: no other of its key starts before it."""
    first, second = (put(db, order_key="k") for _ in range(2))
    (started,) = hands.start()
    if end == "fail":
        assert hands.fail(started, "1 min") == "scheduled"
    elif end == "snooze":
        assert hands.say("snooze", started, "1 min") == "scheduled"
    else:
        hands.rescued()
        hands = Hands(db)
    db.execute(LOOK)
    if end != "rescue":
        assert hands.start() == []
        db.execute("select tallybook.promote(at => now() + '1 h')")
    (again,) = hands.start()
    assert (again.id, states(db, second)) == (first, ["waiting"])
    hands.complete(again)
    assert hands.run_all() == [second]


@pytest.mark.parametrize("end", ["dead", "crashed", "expired", "cancelled"])
def test_every_end_for_good_frees_the_line(db: Connection, hands: Hands, end: str) -> None:
    """Once the first job is dead, crashed too often, expired or cancelled while it ran, the next one starts."""
    first, second = (put(db, order_key="k") for _ in range(2))
    (started,) = hands.start()
    if end == "dead":
        assert hands.fail(started, final=True) == "dead"
    elif end == "crashed":
        db.execute("update tallybook.worker set seen_at = '-infinity'")
        db.execute("select tallybook.rescue(max_crashes => 1)")
        hands = Hands(db)
    elif end == "expired":
        assert hands.say("expire", started) == "dead"
    else:
        assert hands.one("select tallybook.cancel(%s)", first) == "cancelling"
        assert hands.start() == []  # it is still running
        assert hands.say("cancel_running", started) == "cancelled"
    assert hands.run_all() == [second]


@pytest.mark.parametrize("where", ["in line", "waiting", "in backoff", "back in line", "claimed"])
def test_a_cancelled_job_never_blocks(db: Connection, hands: Hands, where: str) -> None:
    """Wherever a job is when it is cancelled, the others continue, and it ends as cancelled. F45."""
    first, second, third = (put(db, order_key="k") for _ in range(3))
    victim, left = first, [second, third]
    if where == "waiting":
        (started,) = hands.start()
        victim, left = second, [third]
        hands.one("select tallybook.cancel(%s)", victim)
        hands.complete(started)
    elif where in ("in backoff", "back in line"):
        (started,) = hands.start()
        hands.fail(started, "0" if where == "back in line" else "1 h")
        hands.one("select tallybook.cancel(%s)", victim)
        db.execute("select tallybook.promote()")
    elif where == "claimed":
        claimed = hands.claim()
        hands.one("select tallybook.cancel(%s)", victim)
        ready, _ = hands.turn(claimed[1:])
        assert ready == []  # its lease is out, so it may still start
        assert hands.say("cancel_running", claimed[0]) == "cancelled"
    else:
        hands.one("select tallybook.cancel(%s)", victim)
    order = hands.run_all()
    if order != left:  # rescue finds what a claim has met and ended
        db.execute(LOOK)
        order += hands.run_all()
    assert order == left
    db.execute("select tallybook.promote(at => now() + '1 day')")
    db.execute(LOOK)
    assert hands.run_all() == []
    assert states(db, victim) == ["cancelled"]
    assert db.execute("select count(*) from tallybook.waiting").fetchone() == (0,)


def test_what_was_cancelled_in_backoff_lets_go_at_once(db: Connection, hands: Hands) -> None:
    """The next promote frees the line of a job that was cancelled in backoff, without rescue."""
    first, second = (put(db, order_key="k") for _ in range(2))
    (started,) = hands.start()
    assert hands.start() == []
    hands.fail(started, "1 h")
    assert hands.one("select tallybook.cancel(%s)", first) == "cancelled"
    assert hands.start() == []
    db.execute("select tallybook.promote()")
    assert [job.id for job in hands.start()] == [second]


@pytest.mark.parametrize("where", ["dead", "cancelled while waiting"])
def test_a_retried_job_lines_up_again(db: Connection, hands: Hands, where: str) -> None:
    """A retry by a person gives a job a new place, the last one."""
    first, second, third = (put(db, order_key="k") for _ in range(3))
    (started,) = hands.start()
    victim, order = (first, [second, third, first]) if where == "dead" else (second, [third, second])
    if where == "dead":
        hands.fail(started, final=True)
        (started,) = hands.start()
        order = order[1:]
    else:
        hands.one("select tallybook.cancel(%s)", second)
    hands.one("select tallybook.retry(%s)", victim)
    hands.complete(started)
    found = hands.run_all()
    db.execute(LOOK)
    assert found + hands.run_all() == order


def test_a_retry_while_the_next_takes_the_turn_leaves_nobody_stuck(
    db: Connection, hands: Hands, connect: Connect
) -> None:
    """A retried job whose turn the next job has taken is set aside, and has its turn later."""
    first, second = (put(db, order_key="k") for _ in range(2))
    (started,) = hands.start()
    hands.fail(started, final=True)
    person = connect(autocommit=False)
    person.execute("select tallybook.retry(%s)", (first,))
    (other,) = hands.start()
    assert other.id == second
    person.commit()
    assert hands.start() == []
    assert states(db, first, second) == ["waiting", "running"]
    hands.complete(other)
    assert hands.run_all() == [first]


def test_a_job_that_lost_its_place_is_not_stuck(db: Connection, hands: Hands) -> None:
    """rescue finds a job that has lost its place in line and waits while no job has the turn."""
    put(db, order_key="k")
    lost = put(db, order_key="k")
    (started,) = hands.start()
    db.execute("delete from tallybook.order_line")
    # An end without a release: its outcome alone.
    db.execute(
        "insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state) select e.xid, e.seq, now(),"
        " e.retention, 'completed' from tallybook.entry e where e.job_id = %s",
        (started.id,),
    )
    assert hands.start() == []
    db.execute(LOOK)
    assert [job.id for job in hands.start()] == [lost]


def test_an_attempt_that_was_rescued_is_not_ready(db: Connection, hands: Hands) -> None:
    """A worker that was rescued between its claim and its order_admit gets nothing: the job is another's. P5"""
    job = put(db, order_key="k")
    claimed = hands.claim()
    assert hands.turn(claimed) == hands.turn(claimed) == ([job], [])  # the same when repeated
    hands.rescued()
    assert hands.turn(claimed) == ([], [])
    (again,) = Hands(db).start()
    assert (again.id, again.attempt) == (job, 2)


# --- open transactions of users ------------------------------------------------------------------------------------


def test_no_producer_waits_for_another(db: Connection, connect: Connect) -> None:
    """Two open transactions can enqueue jobs with one key, which come into line in the order of their ids."""
    one, two = connect(autocommit=False), connect(autocommit=False)
    two.execute("set lock_timeout = '100ms'")
    jobs = [put(conn, order_key="k") for conn in (one, two)]
    two.commit()
    one.commit()
    assert Hands(db).run_all() == jobs


def test_an_open_transaction_that_completed_a_job_stops_no_worker(
    db: Connection, hands: Hands, connect: Connect
) -> None:
    """An open transaction of a handler that has completed its job stops no worker.

    The jobs behind it are set aside after a while and hold no slot, ends of other jobs do not wait, and other keys
    continue. After the commit the line continues.
    """
    jobs = [put(db, order_key="k") for _ in range(4)]
    cancelled, dead, left = jobs[1:]
    claimed = hands.claim()
    (running, *others) = claimed
    assert hands.turn([running])[0] == [jobs[0]]
    handler = connect(autocommit=False)
    handler.execute("select tallybook.complete(%s, %s, 1)", (running.lease, running.id))
    assert hands.turn(others) == ([], jobs[1:])
    db.execute("set statement_timeout = '20s'")  # a wait would last until the handler's transaction ends
    hands.one("select tallybook.cancel(%s)", cancelled)
    assert hands.say("cancel_running", others[0]) == "cancelled"
    assert hands.say("expire", others[1]) == "dead"
    assert hands.turn(others[2:], patient=False) == ([], [])
    assert states(db, cancelled, dead, left) == ["cancelled", "dead", "waiting"]
    put(db, order_key="another")
    assert len(hands.start()) == 1
    db.execute(LOOK)
    assert hands.start() == []
    handler.commit()
    db.execute(LOOK)
    assert [job.id for job in hands.start()] == [left]


def test_control_with_a_release_that_waits_a_worker_would_be_stopped(
    db: Connection, hands: Hands, connect: Connect
) -> None:
    """Negative control: with a plain lock the end of another job of the key waits for the user's commit."""
    without(
        db, "_release", "while not pg_try_advisory_xact_lock(1413565448, hashtext(p_key)) loop",
        "perform pg_advisory_xact_lock(1413565448, hashtext(p_key)); while false loop",
    )  # fmt: skip
    put(db, order_key="k")
    put(db, order_key="k")
    first, second = hands.claim()
    hands.turn([first])
    handler = connect(autocommit=False)
    handler.execute("select tallybook.complete(%s, %s, 1)", (first.lease, first.id))
    db.execute("set statement_timeout = '500ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        hands.say("cancel_running", second)


def test_a_release_that_could_not_be_is_mended_by_rescue(db: Connection, hands: Hands, connect: Connect) -> None:
    """If a key is locked while its job ends, the end succeeds all the same, and rescue continues the line."""
    first, second = (put(db, order_key="k") for _ in range(2))
    (started,) = hands.start()
    somebody = connect(autocommit=False)
    somebody.execute("select pg_advisory_xact_lock(1413565448, hashtext('k'))")
    assert started.id == first
    hands.complete(started)
    somebody.rollback()
    assert hands.start() == []
    db.execute(LOOK)
    assert [job.id for job in hands.start()] == [second]


def test_an_end_in_a_repeatable_read_transaction_releases_at_the_latest_with_rescue(
    db: Connection, hands: Hands, connect: Connect
) -> None:
    """A REPEATABLE READ end does not see jobs that came into line since; the next one starts after rescue."""
    put(db, order_key="k")
    (started,) = hands.start()
    handler = connect(autocommit=False)
    handler.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    handler.execute("select 1 from tallybook.installation")
    second = put(db, order_key="k")
    assert hands.start() == []
    assert handler.execute("select tallybook.complete(%s, %s, 1)", (started.lease, started.id)).fetchone() == (True,)
    handler.commit()
    db.execute(LOOK)
    assert [job.id for job in hands.start()] == [second]


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_a_hot_key_holds_up_nobody_else(db: Connection, hands: Hands) -> None:
    """F49: behind 3,000 jobs of one key, another job starts once each of these was set aside once."""
    n = 3000
    put_many(db, n, order_keys=["hot"] * n)
    other = put(db)
    began, started = time.monotonic(), hands.start(1000)
    while not any(job.id == other for job in started):
        started += hands.start(1000)
    assert len(started) == 2
    hands.complete(*started)
    # From here on a claim costs the same however many wait: 20 jobs take their turns.
    for _ in range(20):
        (job,) = hands.start()
        hands.complete(job)
    assert time.monotonic() - began < 60


def test_the_locks_of_thousands_of_keys_fit(db: Connection, hands: Hands) -> None:
    """One rescue after hundreds of missed releases takes the locks of a hundred keys at most."""
    keys = [f"k{n}" for n in range(300)]
    for _ in range(2):
        put_many(db, 300, order_keys=keys)
    for _ in range(3):
        hands.start(200)
    db.execute("truncate tallybook.order_turn")  # as if all of them had ended
    db.autocommit = False
    db.execute(LOOK)
    held = hands.one(
        "select count(*) from pg_locks where locktype = 'advisory' and classid = 1413565448 and pid = pg_backend_pid()"
    )
    back = hands.one("select count(*) from tallybook.waiting")
    db.commit()
    assert (held, back) == (100, 200)


def test_two_flushes_that_end_jobs_of_the_same_keys_do_not_deadlock(db: Connection, connect: Connect) -> None:
    """F18: two transactions of several ends, of the same keys in opposite orders, do not deadlock."""
    one, two = Hands(connect()), Hands(connect(), "p")
    for key in ("a", "b"):
        put(db, order_key=key)
    first = one.start()
    for key in ("b", "a"):
        put(db, queue="p", order_key=key)
    second = two.claim()
    said: list[Any] = []

    def flush(hands: Hands, jobs: list[Any], barrier: threading.Barrier) -> None:
        with hands.db.transaction():
            for job in jobs:
                said.append(hands.say("cancel_running", job))
                barrier.wait(60)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=flush, args=(h, jobs, barrier)) for h, jobs in ((one, first), (two, second))]
    for thread in threads:
        thread.start()
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "both have ended")
    assert said == ["cancelled"] * 4
    assert db.execute("select deadlocks from pg_stat_database where datname = current_database()").fetchone() == (0,)
