"""The traps of design/ledger.md, "Traps already found", each by its number: no old fault comes back."""

import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors, sql

from support.broken import without
from support.database import Connection, one
from support.hands import drain, states
from support.sessions import LANE_LOCK, behind, claimed_jobs, enqueue, is_blocked, pages, start_worker
from support.waiting import wait_until

WORKER_GATE, ASLEEP = 1413565442, 1413565444


def claim(db: Connection, worker: int, queues: str | list[str] = "q", n: int = 100) -> UUID | None:
    """Claim and return the lease, or None if there was nothing; if all claimed jobs were cancelled, claim again."""
    names = [queues] if isinstance(queues, str) else queues
    query = "select jobs from tallybook.claim(%s, %s, %s, %s) where claim_id is not null"
    while row := db.execute(query, [worker, names, [n] * len(names), lease := uuid4()]).fetchone():
        if row[0]:
            return lease
    return None


def complete(db: Connection, lease: UUID | None, jobs: list[int]) -> list[int]:
    """Complete the jobs and return those that were refused."""
    n = len(jobs)
    return list(one(db, "select tallybook.complete_many(%s, %s, %s)", [lease] * n, jobs, [1] * n))


def rescue(db: Connection) -> None:
    """Rescue the work of all workers, as after a day without heartbeat and another day as suspects."""
    db.execute("select tallybook.rescue(at => clock_timestamp() + interval '1 day')")
    db.execute("select tallybook.rescue(at => clock_timestamp() + interval '2 days')")


def advisory_locks(db: Connection, conn: Connection, classid: int | None = None) -> int:
    """Return how many advisory locks a session holds."""
    query = """
    select count(*) from pg_locks where locktype = 'advisory' and granted and pid = %s
       and (%s::bigint is null or classid = %s)"""
    return int(one(db, query, conn.info.backend_pid, classid, classid))


def arm(conn: Connection, *, held: bool = False) -> tuple[Any, ...] | None:
    """Return whether the session sleeps now, and whether it cannot have missed anything."""
    return conn.execute("select armed, clear from tallybook.listen_begin('{q}', %s)", [held]).fetchone()


def test_enqueue_claim_enqueue_in_one_transaction(db: Connection) -> None:
    """Trap 1: a claimer whose own transaction enqueues before and after its claim loses none of its jobs."""
    worker = start_worker(db)
    before = enqueue(db)
    with db.transaction():
        mine = enqueue(db)
        taken = claimed_jobs(db, claim(db, worker))
        mine += enqueue(db)
    assert taken == before
    assert drain(db) == mine


def test_two_claims_and_an_enqueue_in_one_transaction(db: Connection) -> None:
    """Trap 1: two claims and an enqueue in one transaction lose no job and hand none out twice."""
    worker = start_worker(db)
    before = enqueue(db, n=3)
    with db.transaction():
        taken = claimed_jobs(db, claim(db, worker, n=2))
        taken += claimed_jobs(db, claim(db, worker, n=2))
        mine = enqueue(db)
        assert claim(db, worker) is None
    assert taken == before
    assert drain(db) == mine


def test_two_claims_around_other_producers(db: Connection, connect: Any) -> None:
    """Trap 1: jobs that others commit between the claims of one long transaction are taken once."""
    worker, other = start_worker(db), connect()
    jobs = enqueue(db)
    taken: list[int] = []
    with db.transaction():
        for _ in range(4):
            taken += claimed_jobs(db, claim(db, worker))
            jobs += enqueue(db) + enqueue(other)
    taken += drain(db)
    assert sorted(taken) == sorted(jobs)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_claim_at_another_isolation_level_is_refused(db: Connection, level: str) -> None:
    """Trap 1: a claim at REPEATABLE READ or SERIALIZABLE, which would read an old cursor, raises TB003."""
    worker, job = start_worker(db), enqueue(db)[0]
    for query in (
        "select tallybook.claim(%(worker)s, '{q}', '{1}', gen_random_uuid())",
        "select tallybook.claim_job(%(worker)s, %(job)s, gen_random_uuid())",
    ):
        db.execute(sql.SQL("begin isolation level {}").format(sql.SQL(level)))
        with pytest.raises(psycopg.Error) as refused:
            db.execute(query, {"worker": worker, "job": job})
        assert refused.value.sqlstate == "TB003"
        db.execute("rollback")
    assert drain(db) == [job]


def test_claim_returns_no_args(db: Connection) -> None:
    """Trap 2: a claim returns a row of one size whatever it takes: no ids, no args."""
    worker = start_worker(db)
    enqueue(db, n=50)
    row = db.execute("select * from tallybook.claim(%s, '{q}', '{50}', gen_random_uuid())", [worker]).fetchone()
    assert row is not None
    assert row[1:] == ("q", 50)
    assert len(row) == 3


@pytest.mark.direct("watches which session waits for which")
def test_a_frozen_client_holds_up_no_claim(db: Connection, quick: Any) -> None:
    """Trap 2: a client that stops reading while its jobs are sent to it does not hold the lane."""
    frozen, other, worker = quick(), quick(), start_worker(db)
    db.execute(
        "select tallybook.enqueue('q', 'work', jsonb_build_object('text', repeat('x', 19000)))"
        " from generate_series(1, 450)"
    )
    lease = claim(frozen, worker, n=450)
    late = enqueue(db)
    frozen.pgconn.send_query_params(b"select * from tallybook.claimed_jobs($1)", [str(lease).encode()])
    wait_until(
        lambda: one(
            db, "select wait_event = 'ClientWrite' from pg_stat_activity where pid = %s", frozen.info.backend_pid
        ),
        "the server to wait for the frozen client",
    )
    assert advisory_locks(db, frozen) == 0
    assert claimed_jobs(other, claim(other, worker)) == late
    frozen.pgconn.finish()


@pytest.mark.direct("watches which session waits for which")
@pytest.mark.parametrize("control", [False, True], ids=["guard", "control"])
def test_two_lanes_in_opposite_order(db: Connection, connect: Any, control: bool) -> None:
    """Trap 3: two claimers that reach two lanes in opposite order do not deadlock."""
    if control:  # a claim waits for every lane, not only for its first
        without(db, "claim", "if turn = 1 then", "if turn > 0 then")
    # Two claimers each hold an empty lane and see work in the lane of the other.
    producer, first, second, left, right = (connect() for _ in range(5))
    workers = [start_worker(db, "a", "b") for _ in range(4)]
    for conn in (producer, first, second):
        conn.execute("set lock_timeout = '5s'")
    for conn in (left, right):
        conn.execute("set deadlock_timeout = '50ms'")
    enqueue(db, "a")
    enqueue(db, "b")
    drain(db, "a")
    drain(db, "b")
    deadlock = pytest.raises(errors.DeadlockDetected) if control else nullcontext()
    with deadlock, behind(left, right) as pool:
        producer.execute("begin")
        enqueue(producer, "b")  # the older transaction, so b goes before a for a claimer that sees both
        enqueue(db, "a")
        first.execute("begin")
        claim(first, workers[0], "a")
        left.execute("begin")
        one_way = pool.submit(claim, left, workers[2], ["a", "b"])
        wait_until(lambda: is_blocked(db, left), "the left claimer to wait for lane a")
        producer.execute("commit")
        second.execute("begin")
        claim(second, workers[1], "b")
        right.execute("begin")
        other_way = pool.submit(claim, right, workers[3], ["a", "b"])
        wait_until(lambda: is_blocked(db, right), "the right claimer to wait for lane b")
        first.execute("commit")
        both_wait = (
            "select count(*) = 2 from pg_locks where not granted and classid = %s and database = "
            "(select oid from pg_database where datname = current_database())"
        )
        wait_until(lambda: one_way.done() or one(db, both_wait, LANE_LOCK), "the left claimer to come to lane b")
        enqueue(db, "a")
        second.execute("commit")
        for waiting in (one_way, other_way):
            waiting.result(timeout=20)
    if control:
        return
    left.execute("commit")
    right.execute("commit")
    assert len(drain(db, "a")) + len(drain(db, "b")) <= 1


def test_claimers_over_two_queues_do_not_deadlock(db: Connection, connect: Any) -> None:
    """Trap 3, S3-10: workers over two queues in opposite order drain both without a deadlock."""
    jobs = [*enqueue(db, "a", n=150), *enqueue(db, "b", n=150)]
    found: list[int] = []

    def work(conn: Connection, queues: list[str]) -> None:
        worker = start_worker(conn, *queues)
        while lease := claim(conn, worker, queues, 3):
            batch = claimed_jobs(conn, lease)
            assert complete(conn, lease, batch) == []
            found.extend(batch)

    orders = [["a", "b"], ["b", "a"]] * 2
    with ThreadPoolExecutor(4) as pool:
        for waiting in [pool.submit(work, connect(), queues) for queues in orders]:
            waiting.result(timeout=60)
    assert sorted([*found, *drain(db, "a"), *drain(db, "b")]) == sorted(jobs)


@pytest.mark.direct("counts the locks of one session")
def test_idle_lanes_take_no_lock(db: Connection, connect: Any) -> None:
    """Trap 3: of 60 lanes a claim locks only the one that it takes from, and none if all are idle."""
    claimer = connect()
    db.execute("select tallybook.enqueue('q', 'work', priority => p) from generate_series(1, 60) p")
    worker = start_worker(db)
    while claim(db, worker):
        pass
    with claimer.transaction():
        assert claim(claimer, worker) is None
        assert advisory_locks(db, claimer, LANE_LOCK) == 0
        assert advisory_locks(db, claimer) == advisory_locks(db, claimer, WORKER_GATE) == 1
    enqueue(db, priority=50)
    with claimer.transaction():
        assert claim(claimer, worker) is not None
        assert advisory_locks(db, claimer, LANE_LOCK) == 1


def test_an_open_cancel_of_an_available_job_holds_up_nobody(db: Connection, quick: Any) -> None:
    """Trap 4: a transaction that cancelled a job and stays open delays neither claim nor complete nor fail."""
    business, other, worker = quick(), quick(), start_worker(db)
    jobs = enqueue(db, n=3)
    business.execute("begin")
    assert one(business, "select tallybook.cancel(%s)", jobs[0]) == "cancelled"
    lease = claim(other, worker)
    assert claimed_jobs(other, lease) == jobs
    assert complete(other, lease, jobs[:2]) == []
    assert one(other, "select tallybook.fail(%s, %s, 1, '{}')", lease, jobs[2]) == "scheduled"
    business.execute("commit")
    assert states(db, *jobs) == ["completed", "completed", "retrying"]


def test_a_prepared_cancel_holds_up_nobody(db: Connection, quick: Any) -> None:
    """Trap 4: a transaction that cancelled two jobs and is prepared delays neither complete nor claim."""
    business, other, worker = quick(), quick(), start_worker(db)
    jobs = enqueue(db, n=2)
    lease = claim(db, worker, n=1)
    business.execute("set tallybook.notify = off")
    business.execute("begin")
    assert one(business, "select tallybook.cancel(%s)", jobs[0]) == "cancelling"
    assert one(business, "select tallybook.cancel(%s)", jobs[1]) == "cancelled"
    business.execute("prepare transaction 'cancels'")
    assert complete(other, lease, jobs[:1]) == []
    assert claimed_jobs(other, claim(other, worker)) == jobs[1:]
    business.execute("commit prepared 'cancels'")


def test_an_open_cancel_holds_up_no_rescue(db: Connection, quick: Any) -> None:
    """Trap 4: a dead worker's jobs are rescued while a transaction that cancelled one of them is open."""
    business, other, worker = quick(), quick(), start_worker(db)
    jobs = enqueue(db, n=2)
    claim(db, worker)
    business.execute("begin")
    business.execute("select tallybook.cancel(%s)", [jobs[0]])
    rescue(other)
    business.execute("rollback")
    assert states(db, *jobs) == ["available", "available"]


@pytest.mark.direct("watches which session waits for which")
def test_an_open_cancel_of_a_job_that_is_claimed_by_id_holds_up_no_claim(db: Connection, quick: Any) -> None:
    """Trap 4: a claim by id of a job that an open transaction cancels does not delay the claims of its lane."""
    business, by_id, other, worker = quick(), quick(), quick(), start_worker(db)
    its_worker = start_worker(db)
    jobs = enqueue(db, n=3)
    business.execute("begin")
    business.execute("select tallybook.cancel(%s)", [jobs[2]])
    with behind(by_id) as pool:
        by_id.execute("set lock_timeout = 0")
        waiting = pool.submit(
            by_id.execute, "select tallybook.claim_job(%s, %s, gen_random_uuid())", [its_worker, jobs[2]]
        )
        wait_until(lambda: waiting.done() or is_blocked(db, by_id), "the claim by id to end, or to wait")
        try:
            assert claimed_jobs(other, claim(other, worker, n=2)) == jobs[:2]
        finally:
            business.execute("rollback")
            waiting.result(timeout=20)


def test_an_open_cancel_of_a_job_that_was_claimed_by_id_holds_up_no_claim(db: Connection, quick: Any) -> None:
    """Trap 4: the cursor passes a job claimed by its id, even if an open transaction has cancelled that job."""
    business, other, worker = quick(), quick(), start_worker(db)
    jobs = enqueue(db, n=3)
    assert one(db, "select tallybook.claim_job(%s, %s, gen_random_uuid())", worker, jobs[0])
    business.execute("begin")
    assert one(business, "select tallybook.cancel(%s)", jobs[0]) == "cancelling"
    assert claimed_jobs(other, claim(other, worker)) == jobs[1:]
    business.execute("commit")


def test_an_open_transaction_that_clears_a_tombstone_holds_up_no_rescue(db: Connection, quick: Any) -> None:
    """Trap 4: an open transaction that retried a cancelled job does not make rescue fail for all others."""
    business, other, worker = quick(), quick(), start_worker(db)
    jobs = enqueue(db, n=2)
    lease = claim(db, worker)
    db.execute("select tallybook.cancel(%s)", [jobs[0]])
    assert one(db, "select tallybook.cancel_running(%s, %s, 1)", lease, jobs[0]) == "cancelled"
    business.execute("begin")
    business.execute("select tallybook.retry(%s)", [jobs[0]])
    rescue(other)
    business.execute("rollback")
    assert states(db, *jobs) == ["cancelled", "available"]


def test_two_producers_of_a_new_lane_do_not_wait(db: Connection, quick: Any) -> None:
    """Trap 5: two open transactions that are the first of a queue both enqueue without waiting; all jobs run."""
    first, second = quick(), quick()
    first.execute("begin")
    second.execute("begin")
    jobs = [*enqueue(first), *enqueue(second), *enqueue(first)]
    second.execute("commit")
    first.execute("commit")
    assert sorted(drain(db)) == jobs
    assert one(db, "select count(*) from tallybook.lane where queue = 'q'") == 2


def test_two_new_lanes_in_opposite_order_do_not_deadlock(db: Connection, quick: Any) -> None:
    """Trap 5: two open transactions that create two lanes in opposite order do not wait for each other."""
    first, second = quick(), quick()
    first.execute("begin")
    second.execute("begin")
    a = [*enqueue(first, "a"), *enqueue(second, "b")]
    b = [*enqueue(first, "b"), *enqueue(second, "a")]
    first.execute("commit")
    second.execute("commit")
    assert sorted(drain(db, "a") + drain(db, "b")) == sorted(a + b)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_producer_older_than_the_lane(db: Connection, quick: Any, level: str) -> None:
    """Trap 5: a REPEATABLE READ or SERIALIZABLE producer that began before the lane was created can enqueue."""
    old = quick()
    old.execute(sql.SQL("begin isolation level {}").format(sql.SQL(level)))
    old.execute("select 1")
    jobs = enqueue(db)
    jobs += enqueue(old)
    old.execute("commit")
    jobs += enqueue(db)
    assert sorted(drain(db)) == jobs


def test_a_transaction_older_than_its_lane_is_not_passed_over(db: Connection, quick: Any) -> None:
    """Trap 5: jobs of a transaction whose id is older than its lane, which was drained since, run too."""
    old = quick()
    old.execute("begin")
    old.execute("select pg_current_xact_id()")
    assert len(drain(db)) == 0
    enqueue(db)
    assert len(drain(db)) == 1
    late = enqueue(old)
    old.execute("commit")
    assert drain(db) == late


def test_a_twin_lane_does_not_starve(db: Connection, quick: Any) -> None:
    """Trap 5: jobs in the second of twin lanes run although the first is never empty."""
    first, second, worker = quick(), quick(), start_worker(db)
    first.execute("begin")
    second.execute("begin")
    enqueue(first)
    twin = enqueue(second)[0]
    first.execute("commit")
    second.execute("commit")
    taken: list[int] = []
    for _ in range(4):
        enqueue(db, n=3)
        taken += claimed_jobs(db, claim(db, worker, n=1))
    assert twin in taken


def test_rescue_waits_for_a_claim_in_flight(db: Connection, quick: Any) -> None:
    """Trap 6: rescue skips a worker whose claim has not committed, and rescues its jobs the next time."""
    dying, worker, jobs = quick(), start_worker(db), enqueue(db, n=3)
    dying.execute("begin")
    assert claim(dying, worker) is not None
    rescue(db)
    assert one(db, "select ended_at is null from tallybook.worker where id = %s", worker)
    dying.execute("commit")
    rescue(db)
    assert not one(db, "select ended_at is null from tallybook.worker where id = %s", worker)
    assert states(db, *jobs) == ["available"] * 3
    assert sorted(drain(db)) == jobs


def test_a_worker_that_was_given_up_is_refused(db: Connection) -> None:
    """Trap 6: a zombie's claim and heartbeat raise TB006, and its ends are refused; the new attempt counts."""
    worker, jobs = start_worker(db), enqueue(db, n=2)
    lease = claim(db, worker)
    rescue(db)
    for query in ("select tallybook.renew(%s, 0)", "select tallybook.claim(%s, '{q}', '{1}', gen_random_uuid())"):
        with pytest.raises(psycopg.Error) as refused:
            db.execute(query, [worker])
        assert refused.value.sqlstate == "TB006"
    assert complete(db, lease, jobs) == jobs
    assert one(db, "select tallybook.fail(%s, %s, 1, '{}')", lease, jobs[0]) == "refused"
    assert one(db, "select tallybook.snooze(%s, %s, 1, '1 s')", lease, jobs[0]) == "refused"
    assert states(db, *jobs) == ["available"] * 2
    assert sorted(drain(db)) == jobs


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_zombies_open_end_does_not_hold_up_the_others(db: Connection, quick: Any, end: LiteralString) -> None:
    """Trap 6: an end that a zombie has not committed delays the rescue of that job only."""
    zombie, worker, jobs = quick(), start_worker(db), enqueue(db, n=5)
    lease = claim(db, worker)
    zombie.execute("begin")
    assert complete(zombie, lease, jobs[1:2]) == []
    rescue(db)
    assert states(db, *jobs) == ["available", "running", "available", "available", "available"]
    assert one(db, "select ended_at is null from tallybook.worker where id = %s", worker)
    zombie.execute(end)
    rescue(db)
    assert states(db, *jobs)[1] == ("completed" if end == "commit" else "available")
    assert not one(db, "select ended_at is null from tallybook.worker where id = %s", worker)
    rest = drain(db)
    assert sorted(rest) == sorted(set(jobs) - (set(jobs[1:2]) if end == "commit" else set()))


def test_a_job_that_a_zombie_held_was_not_alone(db: Connection, quick: Any) -> None:
    """F24: a job that is rescued later than the others, because a zombie's end held it, was not alone with its worker.

    Lost alone afterwards, it is dead.
    """
    zombie, worker, jobs = quick(), start_worker(db), enqueue(db, n=2)
    query = "select lost from tallybook.rescue(at => clock_timestamp() + interval '10 min', max_crashes => 1)"
    lease = claim(db, worker)
    zombie.execute("begin")
    assert complete(zombie, lease, jobs[:1]) == []
    db.execute("update tallybook.worker set seen_at = '-infinity'")
    assert (one(db, query), states(db, *jobs)) == (1, ["running", "available"])
    zombie.execute("rollback")
    assert (one(db, query), states(db, *jobs)) == (1, ["available", "available"])
    assert one(db, "select tallybook.claim_job(%s, %s, gen_random_uuid())", start_worker(db), jobs[0])
    db.execute("update tallybook.worker set seen_at = '-infinity'")
    assert (one(db, query), states(db, *jobs)) == (1, ["dead", "available"])


def test_rescue_reads_from_the_watermark_on(db: Connection) -> None:
    """Trap 6: rescue of a worker that has ended thousands of jobs reads only those that may be open."""
    worker = start_worker(db)
    for _ in range(30):
        jobs = enqueue(db, n=100)
        lease = claim(db, worker)
        assert complete(db, lease, jobs) == []
    last = enqueue(db, n=2)
    lease = claim(db, worker)
    number = one(db, "select id from tallybook.claim where lease = %s", lease)
    db.execute("select tallybook.renew(%s, %s)", [worker, number])
    query = "select * from tallybook._open_attempts(%s, %s)"
    from_start, from_watermark = pages(db, query, worker, 0), pages(db, query, worker, number)
    assert from_watermark < 100 < from_start / 10
    rescue(db)
    assert states(db, *last) == ["available"] * 2


@pytest.mark.direct("watches which session waits for which")
def test_ends_go_in_the_order_of_job_ids(db: Connection, connect: Any) -> None:
    """Trap 7: a batch of ends in any order is carried out by job id, so that two batches cannot deadlock."""
    blocker, batch, other = (connect() for _ in range(3))
    worker, jobs = start_worker(db), enqueue(db, n=3)
    lease = claim(db, worker)
    blocker.execute("begin")
    assert complete(blocker, lease, jobs[1:2]) == []
    with behind(batch) as pool:
        waiting: Future[list[int]] = pool.submit(complete, batch, lease, jobs[::-1])
        wait_until(lambda: is_blocked(db, batch), "the batch to wait for its second job")
        other.execute("set lock_timeout = '5s'")
        # The batch holds the first job and has not reached the third, which is the first of its arguments.
        assert one(other, "select tallybook.fail(%s, %s, 1, '{}', '1 h')", lease, jobs[2]) == "scheduled"
        blocker.execute("rollback")
        assert waiting.result(timeout=20) == jobs[2:]
    assert states(db, *jobs) == ["completed", "completed", "retrying"]


def test_finish_and_rescue_do_not_deadlock(db: Connection, connect: Any) -> None:
    """Trap 7: batches of ends in random order and rescue at the same moment end every attempt once."""
    source = random.Random(7)
    finisher, rescuer = connect(), connect()
    for _ in range(25):
        worker, jobs = start_worker(db), enqueue(db, n=40)
        lease = claim(db, worker)
        shuffled = source.sample(jobs, len(jobs))
        together = threading.Barrier(2)

        def finish(
            lease: UUID | None = lease, jobs: list[int] = shuffled, together: threading.Barrier = together
        ) -> list[int]:
            together.wait()
            return complete(finisher, lease, jobs)

        def save(together: threading.Barrier = together) -> None:
            together.wait()
            rescue(rescuer)

        with ThreadPoolExecutor(2) as pool:
            ending, saving = pool.submit(finish), pool.submit(save)
            refused = ending.result(timeout=30)
            saving.result(timeout=30)
        rescue(db)
        assert sorted(drain(db)) == sorted(refused)


def test_a_cancel_that_meets_a_failing_attempt_is_kept(db: Connection, quick: Any) -> None:
    """Trap 8: a cancel that is accepted while the attempt fails ends the job: it does not run again."""
    failing, worker, jobs = quick(), start_worker(db), enqueue(db)
    lease = claim(db, worker)
    failing.execute("begin")
    assert one(failing, "select tallybook.fail(%s, %s, 1, '{}', '1 s')", lease, jobs[0]) == "scheduled"
    assert one(db, "select tallybook.cancel(%s)", jobs[0]) == "cancelling"
    failing.execute("commit")
    db.execute("select tallybook.promote(at => clock_timestamp() + interval '1 day')")
    assert drain(db) == []
    assert states(db, *jobs) == ["cancelled"]


@pytest.mark.parametrize("how", ["fail", "snooze", "rescue"])
def test_a_cancel_outlives_the_attempt_that_it_met(db: Connection, how: str) -> None:
    """Trap 8: a running job that was cancelled and then fails, snoozes or loses its worker does not run again."""
    worker, jobs = start_worker(db), enqueue(db)
    lease = claim(db, worker)
    assert one(db, "select tallybook.cancel(%s)", jobs[0]) == "cancelling"
    if how == "fail":
        db.execute("select tallybook.fail(%s, %s, 1, '{}', '1 s')", [lease, jobs[0]])
    elif how == "snooze":
        db.execute("select tallybook.snooze(%s, %s, 1, '1 s')", [lease, jobs[0]])
    else:
        rescue(db)
    db.execute("select tallybook.promote(at => clock_timestamp() + interval '1 day')")
    assert drain(db) == []
    assert states(db, *jobs) == ["cancelled"]


@pytest.mark.direct("watches which session waits for which")
def test_a_cancel_that_meets_a_claim_by_id_is_kept(db: Connection, quick: Any) -> None:
    """Trap 8: a cancel that waited for a claim by id checks again: the job runs, and a heartbeat reports the cancel."""
    by_id, business, worker, jobs = quick(), quick(), start_worker(db), enqueue(db)
    by_id.execute("begin")
    assert one(by_id, "select tallybook.claim_job(%s, %s, gen_random_uuid())", worker, jobs[0])
    with behind(business) as pool:
        waiting = pool.submit(one, business, "select tallybook.cancel(%s)", jobs[0])
        wait_until(lambda: waiting.done() or is_blocked(db, business), "the cancel to end, or to wait")
        by_id.execute("commit")
        assert waiting.result(timeout=20) == "cancelling"
    told = db.execute("select job_id from tallybook.renew(%s, 0, %s)", [worker, jobs]).fetchall()
    assert told == [(jobs[0],)]


def test_a_cancel_after_a_failure_looks_again(db: Connection) -> None:
    """Trap 8: a cancel of a job in backoff is accepted; after a committed completion, cancel returns completed."""
    worker, jobs = start_worker(db), enqueue(db, n=2)
    lease = claim(db, worker)
    db.execute("select tallybook.fail(%s, %s, 1, '{}', '1 s')", [lease, jobs[0]])
    assert complete(db, lease, jobs[1:]) == []
    assert one(db, "select tallybook.cancel(%s)", jobs[0]) == "cancelled"
    assert one(db, "select tallybook.cancel(%s)", jobs[1]) == "completed"
    db.execute("select tallybook.promote(at => clock_timestamp() + interval '1 day')")
    assert drain(db) == []
    assert states(db, *jobs) == ["cancelled", "completed"]


@pytest.mark.direct("a sleeping worker holds a session")
def test_a_producer_that_looked_before_the_sleeper_lay_down(db: Connection, quick: Any) -> None:
    """Trap 8: listen_begin is not clear until a producer that looked before it, and wakes nobody, has ended."""
    producer, sleeper = quick(), quick()
    enqueue(db)
    producer.execute("begin")
    enqueue(producer)
    assert arm(sleeper) == (True, False)
    assert arm(sleeper, held=True) == (True, False)
    assert advisory_locks(db, sleeper, ASLEEP) == 1
    producer.execute("commit")
    assert arm(sleeper, held=True) == (True, True)
    sleeper.execute("select tallybook.listen_end('{q}')")
    assert advisory_locks(db, sleeper) == 0


@pytest.mark.direct("a sleeping worker holds a session")
def test_arming_during_a_probe_holds_nothing(db: Connection, quick: Any) -> None:
    """Trap 8: a listen_begin that meets a producer's probe releases what it took, so that it can be tried again."""
    probing, sleeper = quick(), quick()
    probing.execute("select pg_advisory_lock(%s, hashtext('b'))", [ASLEEP])
    query = "select armed, clear from tallybook.listen_begin('{a,b,c}')"
    assert sleeper.execute(query).fetchone() == (False, False)
    assert advisory_locks(db, sleeper) == 0
    probing.execute("select pg_advisory_unlock(%s, hashtext('b'))", [ASLEEP])
    assert sleeper.execute(query).fetchone() == (True, True)
    assert advisory_locks(db, sleeper, ASLEEP) == 3


@pytest.mark.direct("a sleeping worker holds a session")
def test_only_a_sleeper_is_woken(db: Connection, quick: Any) -> None:
    """Trap 8: a producer that finds a sleeper notifies at its commit; one that finds none sends nothing."""
    sleeper, producer = quick(), quick()
    sleeper.execute("listen tallybook")
    enqueue(producer)
    assert list(sleeper.notifies(timeout=0)) == []
    assert arm(sleeper) == (True, True)
    enqueue(producer)
    assert [note.payload for note in sleeper.notifies(timeout=10, stop_after=1)] == ["q"]
    producer.execute("begin")
    enqueue(producer)
    producer.execute("rollback")
    sleeper.execute("select tallybook.listen_end('{q}')")
    enqueue(producer)
    sleeper.execute("select 1")
    assert list(sleeper.notifies(timeout=0)) == []


def test_a_probe_leaves_no_lock(db: Connection, quick: Any) -> None:
    """Trap 8: looking for sleepers leaves no session lock behind, neither before nor after the rollback."""
    producer = quick()
    producer.execute("begin")
    enqueue(producer, "a")
    enqueue(producer, "b")
    assert advisory_locks(db, producer, ASLEEP) == 0
    producer.execute("rollback")
    assert advisory_locks(db, producer) == 0


@pytest.mark.direct("a sleeping worker holds a session")
def test_notify_off_can_be_prepared(db: Connection, quick: Any) -> None:
    """Trap 8: with notifications off, a transaction that enqueued beside a sleeper can be prepared."""
    sleeper, producer = quick(), quick()
    assert arm(sleeper) == (True, True)
    producer.execute("begin")
    enqueue(producer)
    with pytest.raises(errors.FeatureNotSupported):
        producer.execute("prepare transaction 'notified'")
    producer.execute("set tallybook.notify = off")
    producer.execute("begin")
    jobs = enqueue(producer)
    producer.execute("prepare transaction 'silent'")
    assert drain(db) == []
    producer.execute("commit prepared 'silent'")
    assert drain(db) == jobs


def test_an_attempt_has_one_end_across_partitions(db: Connection) -> None:
    """Trap 9: an attempt whose entry, claim and ends are transactions apart accepts one end, beside its entry."""

    def split(db: Connection, bounds: list[int]) -> None:
        """Split the ledgers of the default class into smaller partitions, with their rows."""
        edges = [sql.SQL("minvalue"), *(sql.Literal(str(bound)) for bound in bounds), sql.SQL("maxvalue")]
        for table in ("entry", "claim", "outcome"):
            parent = f"{table}_default"
            kept = sql.Identifier(f"kept_{table}")
            db.execute(sql.SQL("create temp table {} as table {}").format(kept, sql.Identifier("tallybook", parent)))
            db.execute(sql.SQL("drop table {}").format(sql.Identifier("tallybook", f"{parent}_1")))
            for n, (low, high) in enumerate(pairwise(edges)):
                db.execute(
                    sql.SQL("create table {} partition of {} for values from ({}) to ({})").format(
                        sql.Identifier("tallybook", f"{parent}_{n}"), sql.Identifier("tallybook", parent), low, high
                    )
                )
            db.execute(sql.SQL("insert into {} table {}").format(sql.Identifier("tallybook", parent), kept))

    jobs: list[int] = []
    leases: dict[int, UUID | None] = {}
    worker = start_worker(db)
    for _ in range(12):
        jobs += enqueue(db)
        if len(jobs) % 2 == 0:
            lease = claim(db, worker)
            leases.update(dict.fromkeys(claimed_jobs(db, lease), lease))
    xids = [int(xid) for (xid,) in db.execute("select xid from tallybook.entry order by xid").fetchall()]
    split(db, [xids[3], xids[6] + 1, xids[9]])
    for n, job in enumerate(jobs):
        verbs = [
            "select tallybook.complete(%s, %s, 1)",
            "select tallybook.fail(%s, %s, 1, '{}', '1 h') <> 'refused'",
            "select tallybook.cancel_running(%s, %s, 1) <> 'refused'",
            "select tallybook.snooze(%s, %s, 1, '1 h') <> 'refused'",
        ]
        accepted = [one(db, verb, leases[job], job) for verb in verbs[n % 4 :] + verbs[: n % 4]]
        assert accepted == [True, False, False, False]
    rescue(db)
    assert one(db, "select count(*) from tallybook.outcome") == len(jobs)
    assert one(db, "select count(distinct tableoid) from tallybook.outcome") == 4
    beside = """
    select bool_and(replace(e.tableoid::regclass::text, 'entry', 'outcome') = o.tableoid::regclass::text)
      from tallybook.entry e join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq"""
    assert one(db, beside)


def test_a_second_outcome_of_an_entry_violates_a_key(db: Connection) -> None:
    """Trap 9: the key that prevents a second end is in the table itself, in every retention class."""
    for retention in "bdl":
        row = f"('{10**6}', 7, now(), 'completed', '{retention}')"
        columns = "entry_xid, entry_seq, ended_at, state, retention"
        insert = f"insert into tallybook.outcome ({columns}) values {row}"  # noqa: S608
        db.execute(insert)
        with pytest.raises(errors.UniqueViolation):
            db.execute(insert)


def test_there_is_a_partition_for_every_transaction_id(db: Connection) -> None:
    """Trap 10: the ranges of each ledger and class go from MINVALUE to MAXVALUE without a gap."""
    query = """
    select p.relname, pg_get_expr(c.relpartbound, c.oid)
      from pg_class p join pg_inherits i on i.inhparent = p.oid join pg_class c on c.oid = i.inhrelid
     where p.relnamespace = 'tallybook'::regnamespace and p.relname ~ '^(entry|claim|outcome)_(brief|default|long)$'
       and p.relkind = 'p' """
    ranges: dict[str, dict[str, str]] = {}
    for parent, bound in db.execute(query).fetchall():
        match = re.fullmatch(r"FOR VALUES FROM \('?(\w+)'?\) TO \('?(\w+)'?\)", bound)
        assert match
        ranges.setdefault(parent, {})[match[1]] = match[2]
    assert len(ranges) == 9
    for parent, steps in ranges.items():
        at, seen = "MINVALUE", 0
        while at != "MAXVALUE":
            assert at in steps, f"{parent} has no partition from {at} on"
            at, seen = steps[at], seen + 1
        assert seen == len(steps) <= 16


@pytest.mark.parametrize("xid", [3, 10**9, 2**32 + 5, 2**63, 2**64 - 1])
def test_an_entry_with_any_transaction_id_finds_its_place(db: Connection, xid: int) -> None:
    """Trap 10: an insert never lacks a partition, however high its transaction id."""
    for retention in "bdl":
        db.execute(
            "insert into tallybook.entry (xid, seq, job_id, enqueued_at, lane_id, attempt, failures, crashes,"
            " retention, task, args) values (%s, 1, 1, now(), 1, 1, 0, 0, %s, 'work', '{}')",
            [str(xid), retention],
        )
    assert one(db, "select count(*) from tallybook.entry where xid = %s", str(xid)) == 3


@pytest.mark.parametrize(
    "columns", [["xid", "lo", "hi", "from_xid", "pos_xid"], ["hi"]], ids=["the cursor", "only the end of its window"]
)
def test_a_cursor_of_another_cluster_raises(db: Connection, columns: list[str]) -> None:
    """Trap 11: a claim whose lane's cursor, or only the end of its window, is ahead of this cluster's ids raises TB004.

    A restore into a cluster with lower transaction ids puts the newest cursors into the future.
    """
    worker = start_worker(db)
    enqueue(db)
    drain(db)
    ahead = ", ".join(f"{name} = ({name}::text::bigint + 1000000000)::text::xid8" for name in columns)
    db.execute(f"update tallybook.claim set {ahead}")  # noqa: S608
    enqueue(db)
    with pytest.raises(psycopg.Error) as refused:
        claim(db, worker)
    assert refused.value.sqlstate == "TB004"


def test_a_job_is_looked_up_by_indexes_in_every_state(db: Connection) -> None:
    """Trap 12, S5-11: a look-up of one job by its id scans no table and reads few pages, whatever its state."""
    # Thousands of jobs, with one in each state among them, and no statistics.
    db.execute("alter table tallybook.entry_default_1 set (autovacuum_enabled = off)")
    worker = start_worker(db)
    for _ in range(4):
        jobs = enqueue(db, n=5000)
        assert complete(db, claim(db, worker, n=5000), jobs) == []
    found: dict[str, int] = {}

    def claimed(state: str, **options: int) -> tuple[UUID | None, int]:
        (found[state],) = enqueue(db, **options)
        return claim(db, worker), found[state]

    assert one(db, "select tallybook.complete(%s, %s, 1)", *claimed("completed"))
    assert one(db, "select tallybook.fail(%s, %s, 1, '{}')", *claimed("dead", max_attempts=1)) == "dead"
    assert one(db, "select tallybook.fail(%s, %s, 1, '{}', '1 h')", *claimed("retrying")) == "scheduled"
    assert one(db, "select tallybook.cancel_running(%s, %s, 1)", *claimed("cancelled")) == "cancelled"
    claimed("running")
    db.execute("select tallybook.enqueue('q', 'work', run_at => now() + interval '1 h') from generate_series(1, 3000)")
    found["scheduled"] = one(db, "select max(job_id) from tallybook.scheduled")
    (found["available"],) = enqueue(db)

    def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield plan
        for child in plan.get("Plans", []):
            yield from nodes(child)

    for state, job in found.items():
        assert states(db, job) == [state]
        cursor = db.execute("explain (analyze, buffers, format json) select * from tallybook.job where id = %s", [job])
        plan = cursor.fetchall()[0][0][0]["Plan"]
        scanned = [
            node["Relation Name"]
            for node in nodes(plan)
            if node["Node Type"] == "Seq Scan"
            and node["Actual Loops"]
            and node["Relation Name"] not in ("worker", "lane")
        ]
        assert scanned == [], f"{state}: {json.dumps(plan, indent=1)}"
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 250, state


def test_many_holes(db: Connection, connect: Any) -> None:
    """Trap 13: beside 20 open and prepared transactions claims continue, and each late job is taken once."""
    open_ones = [connect() for _ in range(20)]
    enqueue(db)
    for n, conn in enumerate(open_ones):
        conn.execute("set tallybook.notify = off")
        conn.execute("begin")
        enqueue(conn)
        if n < 8:
            conn.execute(sql.SQL("prepare transaction {}").format(sql.Literal(f"hole {n}")))
        enqueue(db)
    assert len(drain(db)) == 21
    assert one(db, "select cardinality(holes) from tallybook.claim order by number desc limit 1") >= 20
    taken: list[int] = []
    for n, conn in enumerate(open_ones):
        conn.execute(sql.SQL("commit prepared {}").format(sql.Literal(f"hole {n}")) if n < 8 else sql.SQL("commit"))
        if n % 3 == 0:
            enqueue(db)
            taken += drain(db)
    taken += drain(db)
    assert len(taken) == len(set(taken)) == 20 + 7
    assert one(db, "select count(*) = count(o.entry_seq) from tallybook.entry e"
                   " left join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq")  # fmt: skip


def test_a_unique_key_stays_flat_under_a_pinned_horizon(db: Connection, connect: Any) -> None:
    """Trap 14: after 800 uses while vacuum is held back, a unique key costs as many page reads as at first."""
    worker = start_worker(db)
    use = sql.SQL("""
        do $$ declare v_id bigint; v_lease uuid; begin
          for n in 1..{} loop
            v_id := tallybook.enqueue('q', 'work', unique_key => 'k'); commit;
            v_lease := gen_random_uuid(); perform tallybook.claim({}, '{{q}}', '{{1}}', v_lease); commit;
            perform tallybook.complete(v_lease, v_id, 1); commit;
          end loop;
        end $$""")
    query = "select tallybook.enqueue('q', 'work', unique_key => 'k')"
    connect().execute("begin isolation level repeatable read; select pg_current_xact_id()")  # it holds back vacuum
    db.execute(use.format(50, worker))
    first = pages(db, query)
    db.execute(use.format(800, worker))
    assert one(db, "select count(*) from tallybook.entry") == 850
    assert pages(db, query) < first * 1.5 + 10


def test_promote_stays_flat_under_a_pinned_horizon(db: Connection, connect: Any) -> None:
    """Trap 14: promote from its watermark does not read what it promoted while vacuum is held back."""
    query = "select * from tallybook.promote(after => %s, at => clock_timestamp() + interval '1 h')"
    connect().execute("begin isolation level repeatable read; select pg_current_xact_id()")  # it holds back vacuum
    last = None
    for turn in range(5):
        db.execute(
            "select tallybook.enqueue('q', 'work', run_at => now() + make_interval(mins => %s, secs => n / 100.0))"
            " from generate_series(1, 500) n",
            [5 * turn + 1],
        )
        _, last, _ = db.execute(query, [last]).fetchone() or (0, None, None)
    cost = pages(db, query, last)
    assert cost < 60
    assert pages(db, query, None) > cost
