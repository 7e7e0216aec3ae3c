"""Time is an argument: tests pass another time, and nothing sleeps."""

from datetime import datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from support.askers import HOUR, MIN, S, T
from support.database import Connection, one


def promoted(db: Connection, at: datetime) -> int:
    return int(one(db, "select promoted from tallybook.promote(at => %s)", at))


@pytest.fixture
def worker(db: Connection) -> int:
    return int(one(db, "select tallybook.worker_start('w', '{q}', at => %s)", T))


def claim(db: Connection, worker: int, at: datetime) -> UUID:
    lease = uuid4()
    assert one(db, "select jobs from tallybook.claim(%s::int, '{q}', '{10}', %s, at => %s)", worker, lease, at) > 0
    return lease


@pytest.mark.servers
def test_no_function_asks_the_clock_itself(db: Connection) -> None:
    """Functions read the clock only for default arguments; the one exception measures how long a run took."""
    asking = db.execute(
        "select p.proname::text from pg_proc p where p.pronamespace = 'tallybook'::regnamespace"
        " and p.prosrc ~* '(clock_timestamp|statement_timestamp|transaction_timestamp|timeofday|\\mnow) *\\("
        "|current_timestamp'"
    ).fetchall()
    assert asking == [("_service_ran",)]


def test_a_job_for_later_is_due_when_its_time_comes(db: Connection) -> None:
    """S3-22: a later run_at makes a job scheduled, an earlier one available; the job is due to the microsecond."""
    later = one(db, "select tallybook.enqueue('q', 'send', run_at => %s, at => %s)", T + HOUR, T)
    now = one(db, "select tallybook.enqueue('q', 'send', run_at => %s, at => %s)", T - HOUR, T)
    many = db.execute(
        "select (tallybook.enqueue_many('{q,q}', '{send,send}', array['{}', '{}'],"
        " run_ats => array[%s, %s]::timestamptz[], at => %s)).job_ids",
        (T + HOUR, T - S, T),
    ).fetchone() or ([],)
    states = dict(db.execute("select id, state from tallybook.job").fetchall())
    assert [states[job] for job in (later, now, *many[0])] == ["scheduled", "available", "scheduled", "available"]
    assert promoted(db, T + HOUR - timedelta(microseconds=1)) == 0
    assert promoted(db, T + HOUR) == 2
    assert set(db.execute("select enqueued_at from tallybook.job").fetchall()) == {(T,)}


@pytest.mark.parametrize("value", ["infinity", "-infinity"])
@pytest.mark.parametrize(
    "call",
    [
        "enqueue('q', 't', run_at => '{0}')",
        "enqueue('q', 't', unique_key => 'k', run_at => '{0}')",
        "enqueue('q', 't', unique_key => 'old', on_conflict => 'push_run_at', run_at => '{0}')",
        "enqueue_many('{q,q}', '{t,t}', array['{}', '{}'], run_ats => array[%(at)s, '{0}']::timestamptz[])",
        "enqueue_many('{q,q}', '{t,t}', array['{}', '{}'], run_ats => array[%(at)s, '{0}']::timestamptz[],"
        " unique_keys => '{a,b}')",
        "enqueue_after('q', 't', array[%(job)s], run_at => '{0}')",
        "enqueue_from($$select '{}'::jsonb as args, timestamptz '{0}' as run_at$$, 'q', 't')",
        "subject_push('q', 't', 's', run_at => '{0}')",
        "subject_upsert('q', 't', 's', run_at => '{0}')",
        "subject_move('t', 's', '{0}')",
        "subject_reschedule(%(lease)s, %(job)s, 1, '{0}')",
        "rate_limit_push('r', '{0}')",
    ],
)
def test_an_infinite_time_is_refused(db: Connection, worker: int, call: str, value: str) -> None:
    """An infinite time would let a job wait forever: each verb refuses it with TB005, and nothing is enqueued."""
    db.execute("select tallybook.rate_limit_set('r', 1, '1 s'), tallybook.subject_push('other', 't', 's')")
    job = one(db, "select tallybook.enqueue('q', 't', unique_key => 'old', at => %s)", T)
    given = {"at": T, "job": job, "lease": claim(db, worker, T)}
    before = db.execute("select * from tallybook.job order by id").fetchall()
    with pytest.raises(psycopg.Error) as caught:
        db.execute(("select tallybook." + call.replace("{0}", value)).encode(), given)
    assert caught.value.sqlstate == "TB005"
    assert db.execute("select * from tallybook.job order by id").fetchall() == before
    if call.startswith("enqueue"):
        assert f"run_at is {value}" in str(caught.value)


@pytest.mark.servers
@pytest.mark.parametrize("verb", ["snooze(%s, %s, 1, 'infinity'", "fail(%s, %s, 1, '{}', retry_in => 'infinity'"])
def test_a_delay_without_an_end_is_refused(db: Connection, worker: int, verb: str) -> None:
    """An infinite delay raises TB005 on PostgreSQL 17 and 22007 on older ones; the worker keeps the attempt."""
    job = one(db, "select tallybook.enqueue('q', 't', at => %s)", T)
    lease = claim(db, worker, T)
    with pytest.raises(psycopg.Error) as caught:
        db.execute(f"select tallybook.{verb}, at => %s)".encode(), (lease, job, T))
    assert caught.value.sqlstate == ("TB005" if db.info.server_version >= 170000 else "22007")
    assert one(db, "select tallybook.snooze(%s, %s, 1, '1 s', at => %s)", lease, job, T) == "scheduled"


def test_years_far_away_are_times(db: Connection) -> None:
    """A year BC is in the past and a far year in the future; both are ordinary times."""
    for at, state in (("0044-03-15 00:00:00+00 BC", "available"), ("12026-01-01 00:00:00+00", "scheduled")):
        job = one(db, "select tallybook.enqueue('q', 't', run_at => %s, at => %s)", at, T)
        assert one(db, "select state from tallybook.job where id = %s", job) == state


def test_backoff_by_the_clock(db: Connection, worker: int) -> None:
    """S2-07 S4-11: a failed job is tried again when its backoff has ended, and not before."""
    job = one(db, "select tallybook.enqueue('q', 'send', at => %s)", T)
    at = T
    for attempt, wait in ((1, 5 * MIN), (2, 10 * MIN)):
        lease = claim(db, worker, at)
        said = one(
            db, "select tallybook.fail(%s, %s::bigint, %s::int, '{}', %s, at => %s)", lease, job, attempt, wait, at + S
        )
        assert said == "scheduled"
        assert promoted(db, at + wait) == 0
        assert promoted(db, at + S + wait) == 1
        at += S + wait
    lease = claim(db, worker, at)
    one(db, "select tallybook.fail(%s, %s::bigint, 3, '{}', at => %s)", lease, job, at)
    due = one(db, "select run_at from tallybook.scheduled")
    assert at <= due <= at + 20 * S, "the default: 5 s times 2, twice, with full jitter"


def test_a_lease_by_the_clock(db: Connection, worker: int) -> None:
    """S3-05 S3-06: a silent worker without a session loses its job when its lease ends, not before."""
    job = one(db, "select tallybook.enqueue('q', 'send', at => %s)", T)
    claim(db, worker, T)
    look = "select lost, suspects from tallybook.rescue(at => %s)"
    said = [db.execute(look, [T + wait * S]).fetchone() for wait in (15, 19, 29, 30, 31)]
    assert said == [(0, 0), (0, 1), (0, 1), (0, 1), (1, 0)]
    assert db.execute("select state, crashes from tallybook.job where id = %s", [job]).fetchone() == ("available", 1)


def test_a_heartbeat_by_the_clock(db: Connection, worker: int) -> None:
    """S3-06: a worker that sends heartbeats keeps its jobs, however long they run."""
    one(db, "select tallybook.enqueue('q', 'send', at => %s)", T)
    claim(db, worker, T)
    for beat in range(1, 360):
        db.execute("select tallybook.renew(%s::int, 0, at => %s)", [worker, T + beat * 10 * S])
        if beat % 60 == 0:
            assert one(db, "select lost from tallybook.rescue(at => %s)", T + beat * 10 * S + 29 * S) == 0


def test_expiry_by_the_clock(db: Connection, worker: int) -> None:
    """An attempt that would start at or after its job's expires_at does not: the job is dead, expired at that time."""
    job = one(db, "select tallybook.enqueue('q', 'send', expires_at => %s, at => %s)", T + HOUR, T)
    lease = claim(db, worker, T + HOUR - S)
    expired = "select coalesce(blocked_by = 'expired', false) from tallybook.claimed_jobs(%s, at => %s)"
    assert one(db, expired, lease, T + HOUR - S) is False
    assert one(db, expired, lease, T + HOUR) is True
    assert one(db, "select tallybook.expire(%s, %s::bigint, 1, at => %s)", lease, job, T + HOUR) == "dead"
    found = db.execute("select state, reason, ended_at from tallybook.job where id = %s", [job]).fetchone()
    assert found == ("dead", "expired", T + HOUR)


def test_a_debounce_by_the_clock(db: Connection, worker: int) -> None:
    """push_run_at: each call within the window moves the job on; it runs once no call has come for that long."""
    push = (
        "select tallybook.enqueue('q', 'send', unique_key => 'k', on_conflict => 'push_run_at', run_at => %s, at => %s)"
    )
    jobs = {one(db, push, T + n * MIN + 2 * MIN, T + n * MIN) for n in range(10)}
    assert len(jobs) == 1
    assert promoted(db, T + 11 * MIN - S) == 0
    assert promoted(db, T + 11 * MIN) == 1
    one(db, push, T + 20 * MIN, T + 11 * MIN)  # the job is in its lane by now
    lease = claim(db, worker, T + 12 * MIN)
    put_off = "select coalesce(blocked_by = 'postponed', false) from tallybook.claimed_jobs(%s, at => %s)"
    assert [one(db, put_off, lease, T + minutes * MIN) for minutes in (19, 20)] == [True, False]
    said = one(db, "select tallybook.postpone(%s, %s::bigint, 1, at => %s)", lease, *jobs, T + 19 * MIN)
    assert (said, promoted(db, T + 20 * MIN - S), promoted(db, T + 20 * MIN)) == ("scheduled", 0, 1)


def test_a_line_by_the_clock(db: Connection, worker: int) -> None:
    """A job that is pushed to a later time while it waits for its order key comes into its lane at that time."""
    put = "select tallybook.enqueue('q', 'send', order_key => 'o', unique_key => %s, at => %s)"
    first, second = one(db, put, "a", T), one(db, put, "b", T)
    lease = claim(db, worker, T)
    db.execute("select tallybook.order_admit(%s, %s::bigint[], '{1,1}', at => %s)", ([lease] * 2, [first, second], T))
    assert one(db, "select waits_since from tallybook.waiting where job_id = %s", second) == T
    db.execute(
        "select tallybook.enqueue('q', 'send', unique_key => 'b', on_conflict => 'push_run_at', run_at => %s,"
        " at => %s)",
        (T + HOUR, T + S),
    )
    assert one(db, "select tallybook.complete(%s, %s::bigint, 1, at => %s)", lease, first, T + 2 * S) is True
    assert promoted(db, T + HOUR - S) == 0
    assert promoted(db, T + HOUR) == 1


def test_history_has_the_times_that_were_said(db: Connection, worker: int) -> None:
    """History has the start and end times that the verbs were given, on which retention relies."""
    jobs = [one(db, "select tallybook.enqueue('q', 'send', at => %s)", T) for _ in range(5)]
    lease = claim(db, worker, T + S)
    ends = (
        "select tallybook.complete(%s, %s::bigint, 1, at => %s)",
        "select tallybook.complete(%s, %s::bigint, 1, '1', at => %s)",
        "select tallybook.cancel_running(%s, %s::bigint, 1, at => %s)",
        "select tallybook.fail(%s, %s::bigint, 1, '{}', final => true, at => %s)",
        "select tallybook.move(%s, %s::bigint, 1, at => %s)",
    )
    for job, end in zip(jobs, ends, strict=True):
        db.execute(end, (lease, job, T + 2 * S))
    assert set(db.execute("select started_at from tallybook.attempt where job_id = any (%s)", [jobs[:4]])) == {(T + S,)}
    assert set(db.execute("select ended_at from tallybook.outcome")) == {(T + 2 * S,)}


def test_progress_and_cancels_by_the_clock(db: Connection, worker: int) -> None:
    """Progress, checkpoints and cancels have the times that the verbs were given; a tombstone goes a minute later."""
    job = one(db, "select tallybook.enqueue('q', 'send', at => %s)", T)
    lease = claim(db, worker, T)
    db.execute("select tallybook.progress(%s, %s, 1, 0.5, at => %s)", (lease, job, T + S))
    assert one(db, "select updated_at from tallybook.progress") == T + S
    db.execute("select tallybook.checkpoint(%s, %s, 1, '{}', at => %s)", (lease, job, T + 2 * S))
    assert one(db, "select updated_at from tallybook.progress") == T + 2 * S
    db.execute("select tallybook.cancel_many(queue => 'q', at => %s)", [T])
    db.execute("select tallybook.cancel_running(%s, %s, 1, at => %s)", (lease, job, T + S))
    left = "select count(*) from tallybook.tombstone"
    db.execute("select tallybook.rescue(at => %s, only_worker => 0)", [T + MIN])
    assert one(db, left) == 1
    db.execute("select tallybook.rescue(at => %s, only_worker => 0)", [T + MIN + S])
    assert one(db, left) == 0
