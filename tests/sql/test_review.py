"""Findings of a hostile review of the SQL, each by its number: claims, heartbeats, rescue, promote, arguments.

Cancel, retry and unique keys are in test_review_cancel.py.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import Any, LiteralString, NamedTuple
from uuid import UUID, uuid4

import psycopg
import pytest

from support.askers import HOUR, S
from support.broken import source, without
from support.database import Connection, Row, call, one
from support.hands import drain, states
from support.sessions import LANE_LOCK, behind, claimed_jobs, enqueue, pages, start_worker
from support.subjects import clock
from support.waiting import wait_until
from tallybook._db.migrate import migrate
from tallybook.embedded import Server, temporary_server


class Claimed(NamedTuple):
    """The answer of one claim, and its lease."""

    lease: UUID
    claim_id: int | None
    jobs: int


def claim(db: Connection, worker: int, n: int = 100, lease: UUID | None = None) -> Claimed:
    lease = lease or uuid4()
    query = "select claim_id, jobs from tallybook.claim(%s, '{q}', array[%s::int], %s)"
    row = db.execute(query, [worker, n, lease]).fetchone()
    assert row is not None
    return Claimed(lease, *row)


def jobs_of(db: Connection, *claims: Claimed) -> list[int]:
    return [job for claimed in claims for job in claimed_jobs(db, claimed.lease)]


def rescue(db: Connection, at: datetime) -> Row:
    """Run rescue once at this time; return how many attempts were lost and how many workers are suspects."""
    (row,) = call(db, "rescue", "lost, suspects", at=at)
    return row


def lane(db: Connection) -> int:
    return int(one(db, "select min(lane_id) from tallybook.lane where queue = 'q'"))


def blocked_by(db: Connection, conn: Connection) -> list[int]:
    return list(one(db, "select pg_blocking_pids(%s)", conn.info.backend_pid))


@pytest.fixture(scope="module")
def quiet() -> Iterator[Server]:
    """A server without other tests: a claim looks once more for each transaction that runs anywhere on the server."""
    with temporary_server(int(os.environ.get("TALLYBOOK_TEST_PG") or 18)) as server:
        yield server


# --- 1: the look without the lock ----------------------------------------------------------------------------------


def claimed_around_a_claim_that_waited(
    db: Connection, connect: Any, *, later: bool, look: LiteralString | None = None
) -> tuple[list[int], list[int]]:
    """Let X, Y and T enqueue, and T claim while C has the lane; return the jobs put in and those handed out."""
    enqueue(db)
    drain(db)
    worker, other = start_worker(db), start_worker(db)
    if look:
        db.execute(look)
    x, y, t, c = (connect(autocommit=False) for _ in range(4))
    jobs = enqueue(x, n=2) + enqueue(y) + enqueue(t)
    if later:
        jobs += enqueue(db)
    c.execute("select pg_advisory_xact_lock(%s, %s)", [LANE_LOCK, lane(db)])
    with behind(t) as pool:
        waiting = pool.submit(claim, t, worker)
        wait_until(lambda: waiting.done() or blocked_by(db, t) == [c.info.backend_pid], "T's claim to end, or to wait")
        x.commit()
        first = claim(c, other, n=1)
        y.commit()
        c.commit()
        second = waiting.result(timeout=20)
        t.commit()
    assert first.jobs == 1
    db.execute(source("_next"))
    return jobs, jobs_of(db, first, second) + drain(db)


@pytest.mark.direct("watches which session waits for which")
@pytest.mark.parametrize("later", [False, True])
def test_a_claim_that_waited_for_its_lane_passes_over_nothing(db: Connection, connect: Any, later: bool) -> None:
    """Review 1, S1-10: a claim that waited for its lane does not skip jobs that came while it waited."""
    jobs, handed_out = claimed_around_a_claim_that_waited(db, connect, later=later)
    assert sorted(handed_out) == sorted(jobs)


@pytest.mark.direct("has a server of its own")
def test_control_a_claim_that_looks_at_its_own_entry(quiet: Server) -> None:
    """Review 1, control: if a claim trusts what it saw of its own entry, the other's second job is lost."""
    # A _next that sees the caller's own entries as well.
    naive_next = """
create or replace function tallybook._next(p_lane_id int, p_retention "char", p_born xid8) returns xid8
language sql as $$
  select e.xid from tallybook.entry e
   where e.lane_id = p_lane_id and e.retention = p_retention
     and e.xid > (select c.pos_xid from tallybook.claim c where c.lane_id = p_lane_id order by c.number desc limit 1)
   order by e.xid limit 1 $$"""
    # Elsewhere the job is not lost if another test's transaction with a higher id has just ended.
    with ExitStack() as stack:
        dsn = quiet.create_database("control")

        def connect(**options: Any) -> Connection:
            return stack.enter_context(psycopg.connect(dsn, **{"autocommit": True, **options}))

        db = connect()
        migrate(db)
        without(db, "_take", "and p_next is distinct from pg_current_xact_id_if_assigned() then", "then")

        def loses() -> bool:
            jobs, handed_out = claimed_around_a_claim_that_waited(db, connect, later=False, look=naive_next)
            return bool(set(jobs) - set(handed_out))

        assert any(loses() for _ in range(5))


# --- 2: a claim that is repeated -----------------------------------------------------------------------------------


@pytest.mark.direct("watches which session waits for which")
def test_a_lease_that_is_said_twice_is_one_claim(db: Connection, connect: Any) -> None:
    """Review 2: a claim that is repeated on a new connection waits for the first one and has its answer."""
    worker, jobs = start_worker(db), enqueue(db, n=4)
    holder, old, new, lease = connect(autocommit=False), connect(), connect(), uuid4()
    holder.execute("select pg_advisory_xact_lock(%s, %s)", [LANE_LOCK, lane(db)])
    with behind(old, new) as pool:
        first = pool.submit(claim, old, worker, n=2, lease=lease)
        wait_until(lambda: blocked_by(db, old) == [holder.info.backend_pid], "the first to wait for the lane")
        second = pool.submit(claim, new, worker, n=2, lease=lease)
        wait_until(lambda: blocked_by(db, new) == [old.info.backend_pid], "the second to wait for the first")
        holder.commit()
        assert first.result(timeout=20) == second.result(timeout=20)
    assert jobs_of(db, first.result()) == jobs[:2]
    assert one(db, "select sum(jobs) from tallybook.claim where lease = %s", lease) == 2
    assert drain(db) == jobs[2:]


def test_a_job_that_is_claimed_twice_by_one_lease(db: Connection) -> None:
    """Review 2: claim_job returns true again for the lease that has the job, and false for any other."""
    worker, (job,), lease = start_worker(db), enqueue(db), uuid4()
    query = "select tallybook.claim_job(%s, %s, %s)"
    assert one(db, query, worker, job, lease) is True
    assert one(db, query, worker, job, lease) is True
    assert one(db, query, worker, job, uuid4()) is False
    assert one(db, "select count(*) from tallybook.claim where lease = %s", lease) == 1


@pytest.mark.parametrize(
    "call", ["tallybook.claim(%(worker)s, '{q}', '{1}', null)", "tallybook.claim_job(%(worker)s, %(job)s, null)"]
)
def test_a_claim_without_a_lease_is_refused(db: Connection, call: LiteralString) -> None:
    """Review 2: a claim whose lease is null raises TB005 and takes nothing."""
    worker, (job,) = start_worker(db), enqueue(db)
    with pytest.raises(psycopg.Error) as raised:
        db.execute("select " + call, {"worker": worker, "job": job})
    assert raised.value.sqlstate == "TB005"
    assert drain(db) == [job]


@pytest.mark.direct("watches which session waits for which")
@pytest.mark.parametrize(
    ("verb", "look", "query", "said"),
    [
        ("claim_job", "exit when found", "select tallybook.claim_job(%(worker)s, %(job)s, gen_random_uuid())", True),
        ("retry", "if e.attempt is not", "select tallybook.retry(%(job)s)", 2),
        ("cancel", "select x.lane_id, x.retention", "select tallybook.cancel(%(job)s)", "cancelled"),
    ],
)
def test_a_job_that_moves_between_two_looks_is_found(
    db: Connection, connect: Any, verb: str, look: str, query: LiteralString, said: object
) -> None:
    """A verb that reads one table after another finds a job that moves between them meanwhile."""
    mover, gate, caller, worker = connect(), connect(), connect(), start_worker(db)
    if verb == "cancel":  # it runs, and moves from its lane to scheduled
        (job,) = enqueue(db)
        held = claim(db, worker)
        assert jobs_of(db, held) == [job]
        move: LiteralString = f"select tallybook.unclaim('{held.lease}', {job}, 1, '1 h')"
    else:
        (job,) = enqueue(db, run_at=clock(db) + HOUR)
        move = "select tallybook.promote(at => clock_timestamp() + interval '2 h')"
    if verb == "retry":
        assert one(db, "select tallybook.cancel(%s)", job) == "cancelled"
    without(db, verb, look, f"assert pg_advisory_lock(1) is not null and pg_advisory_unlock(1); {look}")
    gate.execute("select pg_advisory_lock(1)")
    with behind(caller) as pool:
        answer = pool.submit(one, caller, query.replace("%(worker)s", str(worker)).replace("%(job)s", str(job)))
        wait_until(lambda: blocked_by(db, caller) == [gate.info.backend_pid], "the verb to stand between its looks")
        mover.execute(move)
        gate.execute("select pg_advisory_unlock(1)")
        assert answer.result(timeout=20) == said


# --- 3, 4: rescue's view of claims ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("call", ["tallybook.rescue()", "tallybook.worker_stop(%(worker)s)"])
def test_rescue_with_an_old_snapshot_is_refused(
    db: Connection, connect: Any, call: LiteralString, level: LiteralString
) -> None:
    """Review 3, S1-11: rescue with a snapshot that misses new claims raises TB003 and gives up no worker."""
    worker, jobs = start_worker(db), enqueue(db)
    old = connect(autocommit=False)
    old.execute("set transaction isolation level " + level)
    old.execute("select from tallybook.lane")
    claim(db, worker)
    with pytest.raises(psycopg.Error) as raised:
        old.execute("select " + call, {"worker": worker})
    assert raised.value.sqlstate == "TB003"
    old.rollback()
    assert one(db, "select tallybook.worker_stop(%s)", worker) == 1
    assert drain(db) == jobs


@pytest.mark.parametrize("claims_before", [0, 1])
def test_a_watermark_from_the_future_hides_no_claim(db: Connection, claims_before: int) -> None:
    """Review 4, S1-11: a heartbeat that names a claim far ahead does not hide the next one from rescue."""
    worker = start_worker(db)
    enqueue(db, n=claims_before)
    assert len(drain(db)) == claims_before
    db.execute("select tallybook.renew(%s, 1000000)", [worker])
    jobs = enqueue(db)
    assert claim(db, worker).jobs == 1
    assert one(db, "select tallybook.worker_stop(%s)", worker) == 1
    assert drain(db) == jobs


# --- 10, 12: dead workers ------------------------------------------------------------------------------------------


def test_an_outage_longer_than_the_lease_robs_nobody(db: Connection) -> None:
    """Review 10, S1-11: after an outage the first rescue takes nothing; later ones only from workers still silent."""
    back, silent, start = start_worker(db), start_worker(db), clock(db)
    enqueue(db, n=2)
    mine, lost = claim(db, back, n=1), claim(db, silent, n=1)
    assert (mine.jobs, lost.jobs) == (1, 1)
    after = start + 40 * S
    assert rescue(db, after) == (0, 2)
    db.execute("select tallybook.renew(%s, 0, at => %s)", [back, after + S])
    assert rescue(db, after + 9 * S) == (0, 1)
    assert rescue(db, after + 11 * S) == (1, 0)
    assert states(db, *jobs_of(db, mine, lost)) == ["running", "available"]
    assert one(db, "select tallybook.complete(%s, %s, 1)", mine.lease, jobs_of(db, mine)[0])


@pytest.mark.parametrize("session", [False, True])
def test_a_suspicion_from_before_an_outage_proves_nothing_after_it(db: Connection, session: bool) -> None:
    """Review 10b: a worker that was a suspect before an outage of the server has its grace again after it."""
    worker = start_worker(db, session=session)
    enqueue(db)
    claim(db, worker)
    db.execute("""
    update tallybook.worker set seen_at = pg_postmaster_start_time() - interval '40 s',
                                gone_at = pg_postmaster_start_time() - interval '15 s'""")
    # Later than the lease that every worker has after a start of the server.
    back = one(db, "select greatest(clock_timestamp(), pg_postmaster_start_time() + interval '40 s')")
    grace = 10 if session else 30  # a lost session proves more than a silence that nobody has observed
    assert rescue(db, back) == (0, 1)
    assert rescue(db, back + (grace - 1) * S) == (0, 1)
    assert rescue(db, back + (grace + 1) * S) == (1, 0)


@pytest.mark.direct("a worker holds a lock of its session")
def test_a_session_that_comes_back_has_its_grace_again(db: Connection, connect: Any) -> None:
    """Review 12: a session that is back is no longer gone; when it is lost again, its grace starts again."""
    worker, start = start_worker(db, session=True), clock(db)
    enqueue(db)
    claim(db, worker)
    assert rescue(db, start) == (0, 1)
    heartbeat = connect()
    heartbeat.execute("select pg_advisory_lock_shared(1413565443, %s)", [worker])
    assert rescue(db, start + 2 * S) == (0, 0)
    assert one(db, "select gone_at is null from tallybook.worker where id = %s", worker)
    heartbeat.close()
    query = (
        "select not exists (select from pg_locks where locktype = 'advisory' and classid = 1413565443 and database = "
    )
    query += "(select oid from pg_database where datname = current_database()))"
    wait_until(lambda: one(db, query), "the session to be gone")
    assert rescue(db, start + 4 * S) == (0, 1)
    assert rescue(db, start + 4.5 * S) == (0, 1)
    assert rescue(db, start + 5.5 * S) == (1, 0)


@pytest.mark.direct("a worker holds a lock of its session")
@pytest.mark.parametrize("sessions", ["are there", "are gone", "are not looked for: control"])
def test_no_job_is_buried_for_a_worker_that_the_network_hides(db: Connection, connect: Any, sessions: str) -> None:
    """P8: a silent worker whose session is there may live: a job that it had alone is available after three crashes."""
    if "control" in sessions:
        without(db, "_rescue_attempts", "and v_died")
    (job,) = enqueue(db)
    for _ in range(3):
        worker, start = start_worker(db, session=True), clock(db)
        claim(db, worker)
        heartbeat = connect()
        if sessions != "are gone":
            heartbeat.execute("select pg_advisory_lock_shared(1413565443, %s)", [worker])
        assert rescue(db, start + 31 * S) == (0, 1)
        assert rescue(db, start + 45 * S) == (1, 0)
    ended = db.execute("select state, crashes from tallybook.job where id = %s", [job]).fetchone()
    assert ended == ("available" if sessions == "are there" else "dead", 3)


def test_a_session_that_comes_back_finds_its_lock_free(db: Connection, connect: Any) -> None:
    """Review 12: a rescue whose transaction is still open does not block a worker that comes back."""
    worker = start_worker(db, session=True)
    rescuer, heartbeat = connect(autocommit=False), connect()
    rescuer.execute("select tallybook.rescue()")
    assert one(heartbeat, "select pg_try_advisory_lock_shared(1413565443, %s)", worker)


# --- 13, 14, 15, 17: lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("analyzed", [False, True])
def test_promote_keeps_the_order(db: Connection, analyzed: bool) -> None:
    """Review 13, S3-03: jobs that are promoted together are in line by run_at, then by fewer failures."""
    db.execute("""
    select tallybook.enqueue_many(array_fill('q'::text, array[1500]), array_fill('work'::text, array[1500]),
      array_fill('{}'::text, array[1500]),
      (select array_agg(clock_timestamp() + make_interval(secs => 1 + n * 7 % 150) order by n)
         from generate_series(1, 1500) n),
      (select array_agg(n % 3 order by n) from generate_series(1, 1500) n))""")
    db.execute("update tallybook.scheduled set failures = job_id * 31 % 5")
    if analyzed:
        db.execute("analyze")
    look = "select promoted from tallybook.promote(600, null, clock_timestamp() + interval '1 hour')"
    assert [one(db, look) for _ in range(4)] == [600, 600, 300, 0]
    query = """
    select count(*) from (
      select run_at, failures, xid, lag(xid) over line as xid_before, lag(run_at) over line as run_at_before,
             lag(failures) over line as failures_before
        from tallybook.entry window line as (partition by lane_id order by xid, seq)) e
     where xid = xid_before and (run_at, failures) < (run_at_before, failures_before)"""
    assert one(db, query) == 0


@pytest.mark.slow
@pytest.mark.direct("compares what one session reads with what it has read before")
@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("holes", ["no holes", "a hole that was drained", "a hole that has ended", "a hole"])
def test_an_idle_claim_reads_nothing_of_a_big_open_enqueue(quiet: Server, holes: str, newest: bool) -> None:
    """Review 14: 20,000 jobs that are not committed yet do not make the claims of their lane more expensive."""
    dsn = quiet.create_database(f"idle_{uuid4().hex}")
    with psycopg.connect(dsn, autocommit=True) as db, psycopg.connect(dsn) as other, psycopg.connect(dsn) as business:
        migrate(db)
        if holes != "no holes":
            other.execute("select pg_current_xact_id()")
        enqueue(db, n=3)
        drain(db)
        if holes == "a hole that was drained":
            enqueue(other)
            other.commit()
            assert len(drain(db)) == 1
        elif holes == "a hole that has ended":
            other.commit()
        worker = start_worker(db)
        idle = "select * from tallybook.claim(%s, '{q}', '{100}', gen_random_uuid())"
        without = pages(db, idle, worker)
        business.execute("""
        select tallybook.enqueue_many(array_fill('q'::text, array[20000]), array_fill('work'::text, array[20000]),
                                      array_fill('{}'::text, array[20000]))""")
        if not newest:  # a snapshot does not list transactions newer than the newest one that has ended
            db.execute("select pg_current_xact_id()")
        assert pages(db, idle, worker) <= 2 * without
        business.rollback()
        other.rollback()


def test_a_claim_that_meets_only_cancelled_jobs_says_so(db: Connection) -> None:
    """Review 15: a claim that met only cancelled jobs has an id and no jobs, which is not "no work"."""
    worker, jobs = start_worker(db), enqueue(db, n=100)
    db.execute("select tallybook.cancel(id) from unnest(%s::bigint[]) id", [jobs[:-1]])
    first = claim(db, worker, n=1)
    assert (first.claim_id is not None, first.jobs) == (True, 0)
    assert jobs_of(db, claim(db, worker, n=1)) == jobs[-1:]
    assert claim(db, worker, n=1).claim_id is None


@pytest.mark.direct("watches which session waits for which")
def test_pause_is_exact(db: Connection, connect: Any) -> None:
    """Review 17, S3-38: a claim that waited for its lane while the queue was paused takes nothing."""
    worker, jobs = start_worker(db), enqueue(db)
    holder, waiter = connect(autocommit=False), connect()
    holder.execute("select pg_advisory_xact_lock(%s, %s)", [LANE_LOCK, lane(db)])
    with behind(waiter) as pool:
        waiting = pool.submit(claim, waiter, worker)
        wait_until(lambda: blocked_by(db, waiter) == [holder.info.backend_pid], "the claim to wait for the lane")
        assert one(db, "select tallybook.pause('q')")
        holder.commit()
        assert waiting.result(timeout=20)[1:] == (None, 0)
    assert one(db, "select tallybook.resume('q')")
    assert drain(db) == jobs


# --- the low ones: arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "tallybook.enqueue('q', 'work', priority => 100000)",
        "tallybook.enqueue('q', 'work', priority => -1)",
        "tallybook.enqueue('q', 'work', priority => null)",
        "tallybook.enqueue('q', 'work', priority => 100000, unique_key => 'k')",
        "tallybook.enqueue_many('{q,q}', '{work,work}', array['{}', '{}'], priorities => '{2,100000}')",
        """tallybook.enqueue_many('{q}', '{work}', array['{}'], priorities => '{100000}')""",
        """tallybook.enqueue_many('{q}', '{work}', array['{}'], priorities => '{100000}', unique_keys => '{k}')""",
        r"""tallybook.enqueue_many('{q}', array[E'a\nb'], array['{}'])""",
        r"""tallybook.enqueue_many('{q}', array[E'a\u0007'], array['{}'])""",
        """tallybook.enqueue_many('{q}', '{work}', array['{}'], headers => array['[1]'])""",
        """tallybook.enqueue_many('{q}', '{work}', array['{}'], headers => array['"text"'])""",
        """tallybook.enqueue_many('{q}', '{work}', array['{}'], headers => array['null'])""",
        """tallybook.enqueue_many('{q}', '{work}', array['[]'])""",
    ],
)
def test_what_does_not_fit_is_refused(db: Connection, call: LiteralString) -> None:
    """Review, low: invalid priorities, task names, args and headers raise TB005, and nothing is enqueued."""
    with pytest.raises(psycopg.Error) as raised:
        db.execute("select " + call)
    assert raised.value.sqlstate == "TB005"
    assert one(db, "select count(*) from tallybook.job") == 0


def test_no_priority_in_a_batch_is_the_default(db: Connection) -> None:
    """Review, low: a job of a batch with a null priority has the default one."""
    db.execute("select tallybook.enqueue_many('{q,q}', '{work,work}', array['{}', '{}'], priorities => '{null,7}')")
    assert db.execute("select priority from tallybook.job order by id").fetchall() == [(2,), (7,)]


def test_fail_without_a_delay_answers_available(db: Connection) -> None:
    """Review, low: fail returns available without a delay, and scheduled with one."""
    worker = start_worker(db)
    enqueue(db, n=2)
    claimed = claim(db, worker)
    first, second = jobs_of(db, claimed)
    query = "select tallybook.fail(%s, %s, 1, '{}', %s)"
    assert one(db, query, claimed.lease, first, "0") == "available"
    assert one(db, query, claimed.lease, second, "1 hour") == "scheduled"
    assert states(db, first, second) == ["available", "retrying"]


def test_a_job_that_is_named_twice_is_completed_once(db: Connection) -> None:
    """Review, low: an end that names a job twice completes it and refuses nothing, even if it is repeated."""
    worker, jobs = start_worker(db), enqueue(db, n=2)
    claimed = claim(db, worker)
    named = [jobs[0], jobs[0], jobs[1]]
    for _ in range(2):
        refused = one(db, "select tallybook.complete_many(%s, %s, %s)", [claimed.lease] * 3, named, [1] * 3)
        assert refused == []
    assert states(db, *jobs) == ["completed", "completed"]
    assert one(db, "select count(*) from tallybook.outcome") == 2
