"""Exactness of the claim, with real processes: every committed job ends once, a rolled-back one is never seen."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from support.broken import without
from support.crowd import SEED, Crowd
from support.database import Connection, one
from support.waiting import wait_until

pytestmark = pytest.mark.servers
CLAIM = "select jobs from tallybook.claim(%s, '{mail}', '{9}', gen_random_uuid())"


@pytest.mark.direct("kills processes and waits for the end of their sessions")
def test_every_committed_job_ends_exactly_once(dsn: str) -> None:
    """S1-10: no committed job is lost or ends twice.

    Transactions commit, roll back, stay open or are prepared at random, with savepoints, cancels and SIGKILL.
    """
    findings, counts = Crowd(dsn, SEED).run()
    print(counts)
    assert findings == []
    assert counts["kills"] > 0
    assert counts["claims_of_holes"] > 0
    assert counts["zombie_attempts"] > 0


@pytest.mark.direct("kills processes and waits for the end of their sessions")
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_committed_job_ends_exactly_once_for_long(dsn: str) -> None:
    """S1-10: the same with more processes for half a minute."""
    findings, counts = Crowd(dsn, SEED + 1, seconds=30.0, producers=6, claimers=6).run()
    print(counts)
    assert findings == []


@pytest.mark.slow
@pytest.mark.direct("kills processes and waits for the end of their sessions")
def test_control_a_claim_that_ignores_holes_loses_jobs(dsn: str, db: Connection) -> None:
    """Negative control: with the holes emptied, a shorter run finds lost jobs."""
    without(db, "_window", "h.lo := v_old_hi;", "h.holes := '{}'; h.closed := '{}'; h.lo := v_old_hi;")
    findings, _ = Crowd(dsn, SEED, seconds=0.5, producers=1, claimers=2).run()
    assert {finding.split(": ")[0] for finding in findings} >= {"lost", "an attempt without outcome"}


@pytest.mark.slow
@pytest.mark.direct("kills processes and waits for the end of their sessions")
def test_control_an_end_without_the_fence_ends_twice(dsn: str, db: Connection) -> None:
    """Negative control: with the outcome's unique index dropped, a shorter run finds attempts that ended twice."""
    for name in ("brief", "default", "long"):
        db.execute(f'drop index tallybook."an attempt of {name} ends once"')
    for function in ("_end", "_rescue_attempts", "_skip"):
        without(db, function, "on conflict do nothing", "")
    findings, _ = Crowd(dsn, SEED, seconds=0.5, producers=1, claimers=2).run()
    assert "an attempt with two outcomes" in {finding.split(": ")[0] for finding in findings}


def test_control_an_end_by_a_lease_that_is_not_on_record(db: Connection) -> None:
    """Negative control: if `_lease_entries` ignores the lease, a rolled-back claim ends a job of another claim."""

    def end_by_a_forgotten_lease(db: Connection) -> bool:
        """Return whether the lease of a rolled-back claim can complete a job that another lease has."""
        job = one(db, "select tallybook.enqueue('mail', 'send')")
        worker = one(db, "select tallybook.worker_start('w', array['mail'])")
        forgotten = "00000000-0000-0000-0000-000000000001"
        claim = "select jobs from tallybook.claim(%s, array['mail'], array[1], %s)"
        db.execute("begin")
        assert one(db, claim, worker, forgotten) == 1
        db.execute("rollback")
        assert one(db, claim, worker, one(db, "select gen_random_uuid()")) == 1
        return bool(one(db, "select tallybook.complete(%s, %s, 1)", forgotten, job))

    assert end_by_a_forgotten_lease(db) is False
    without(
        db,
        "_lease_entries",
        "from tallybook.claim k where k.lease = d.lease limit 1",
        "from tallybook.claim k where k.jobs > 0 order by k.id desc limit 1",
    )
    assert end_by_a_forgotten_lease(db) is True


def test_no_producer_waits_for_another(db: Connection, connect: Callable[..., Connection]) -> None:
    """S5-01: while a transaction that enqueued is open, others enqueue to its queues and claim without lock waits."""
    first, second, worker = connect(), connect(), connect()
    one(db, "select tallybook.enqueue('old', 'send')")
    me = one(worker, "select tallybook.worker_start('w', array['old', 'new', 'bulk'])")
    first.execute("begin")
    late = [
        one(first, "select tallybook.enqueue('old', 'send')"),
        one(first, "select tallybook.enqueue('new', 'send')"),  # this transaction creates the queue
        one(first, "select tallybook.enqueue('old', 'send', run_at => now() + interval '1 h')"),
        *one(
            first,
            "select job_ids from tallybook.enqueue_many(array['bulk', 'old'], array['a', 'b'], array['{}', '{}'])",
        ),
    ]
    one(first, "select tallybook.cancel(%s)", one(db, "select tallybook.enqueue('old', 'send')"))

    many = (
        "select job_ids from tallybook.enqueue_many(array_fill(%s::text, '{9}'), array_fill('send'::text, '{9}'),"
        " array_fill('{}'::text, '{9}'))"
    )
    for queue in ("old", "new", "bulk"):
        for statement in (
            "select tallybook.enqueue(%s, 'send')",
            "select tallybook.enqueue(%s, 'send', priority => 1)",
            "select tallybook.enqueue(%s, 'send', unique_key => 'k' || %s)",
            many,
        ):
            assert without_waiting(db, second, statement, [queue] * statement.count("%s"))
        for _ in range(3):  # one of each lane, and of twin lanes
            claim = "select jobs from tallybook.claim(%s, array[%s], array[4], gen_random_uuid())"
            assert without_waiting(db, worker, claim, [me, queue]) > 0
    assert one(db, "select count(*) from tallybook.job where id = any (%s)", late) == 0

    first.execute("commit")
    while one(worker, "select jobs from tallybook.claim(%s, '{old,new,bulk}', '{99,99,99}', gen_random_uuid())", me):
        pass
    states = db.execute("select state from tallybook.job where id = any (%s) order by id", [late]).fetchall()
    assert [state for (state,) in states] == ["running", "running", "scheduled", "running", "running"]


@pytest.mark.direct("watches which session waits for which")
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_same_unique_key_waits_for_its_holder(db: Connection, connect: Callable[..., Connection], end: str) -> None:
    """S1-05: a second producer of a unique key waits for the first; it gets its id, or a new one after a rollback."""
    first, second = connect(), connect()
    enqueue = "select tallybook.enqueue('mail', 'send', unique_key => 'k')"
    first.execute("begin")
    held = one(first, enqueue)
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(one(second, enqueue)))
    waiting.start()
    wait_until(
        lambda: one(db, "select pg_blocking_pids(%s)", second.info.backend_pid) == [first.info.backend_pid],
        "the second waits for the first",
    )
    first.execute(end)
    waiting.join(10)
    assert (got == [held]) if end == "commit" else (got and got != [held])
    assert one(db, "select array_agg(id) from tallybook.job") == got


def test_another_unique_key_waits_for_nobody(db: Connection, connect: Callable[..., Connection]) -> None:
    """S1-05: a unique key in an open transaction delays no other key and no other task."""
    first, second = connect(), connect()
    first.execute("begin")
    one(first, "select tallybook.enqueue('mail', 'send', unique_key => 'k')")
    assert without_waiting(db, second, "select tallybook.enqueue('mail', 'send', unique_key => 'l')", [])
    assert without_waiting(db, second, "select tallybook.enqueue('mail', 'pack', unique_key => 'k')", [])
    first.execute("rollback")


def test_an_open_cancel_holds_up_no_claim(db: Connection, connect: Callable[..., Connection]) -> None:
    """Trap 4: a claim takes a job that an open transaction has cancelled, without waiting."""
    user, worker = connect(), connect()
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    me = one(worker, "select tallybook.worker_start('w', array['mail'])")
    user.execute("begin")
    assert one(user, "select tallybook.cancel(%s)", job) == "cancelled"
    assert without_waiting(db, worker, CLAIM, [me]) == 1
    user.execute("rollback")
    assert one(db, "select state from tallybook.job where id = %s", job) == "running"


def test_an_open_cancel_of_a_job_taken_by_id_holds_up_no_claim(
    db: Connection, connect: Callable[..., Connection]
) -> None:
    """Trap 4: the same if the job was claimed by its id and the lane's cursor has not passed it yet."""
    user, worker = connect(), connect()
    by_id, other = (one(db, "select tallybook.enqueue('mail', 'send')") for _ in range(2))
    me = one(worker, "select tallybook.worker_start('w', array['mail'])")
    assert one(worker, "select tallybook.claim_job(%s, %s, gen_random_uuid())", me, by_id) is True
    user.execute("begin")
    assert one(user, "select tallybook.cancel(%s)", by_id) == "cancelling"
    assert without_waiting(db, worker, CLAIM, [me]) == 1
    user.execute("rollback")
    assert one(db, "select state from tallybook.job where id = %s", other) == "running"


def without_waiting(watch: Connection, conn: Connection, statement: str, params: list[Any]) -> Any:
    """Return the statement's value; fail if its session waits for a lock, briefly or until the timeout."""
    conn.execute("set lock_timeout = '5 s'")  # so that a wait for an open transaction ends with an error
    locks = "select format('%%s lock, %%s', locktype, mode) from pg_locks where pid = %s and not granted"
    waits: set[str] = set()
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(one, conn, statement, *params)
        while not said.done():
            waits |= {row[0] for row in watch.execute(locks, [conn.info.backend_pid])}
            wait([said], 0.002)
    assert not waits, f"{statement} {params} waited for: {waits}"
    return said.result()
