"""Time is an argument: tests pass another time, and nothing sleeps. The server's clock may step back or forward."""

from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from support.askers import HOUR, MIN, MS, Asker, S, T, put
from support.broken import without
from support.database import Connection, call, one
from support.hands import put_many, states
from support.ticking import clocks, fires
from support.ticking import put as set_schedule

YEARS = timedelta(days=3650)
SERVICES = ["concurrency_release", "fair_release", "fold", "parents_resolve", "promote", "prune", "rebase", "rescue"]


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
    many = put_many(db, 2, run_ats=[T + HOUR, T - S], at=T)
    assert states(db, later, now, *many) == ["scheduled", "available", "scheduled", "available"]
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
        fail = "select tallybook.fail(%s, %s::bigint, %s::int, '{}', %s, at => %s)"
        assert one(db, fail, lease, job, attempt, wait, at + S) == "scheduled"
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
    jobs = put_many(db, 5, at=T)
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
    for at, n in ((T + MIN, 1), (T + MIN + S, 0)):
        db.execute("select tallybook.rescue(at => %s, only_worker => 0)", [at])
        assert one(db, left) == n


# --- a clock that steps: delays keep their length, and everything continues ----------------------------------------


def run(db: Connection, *services: str, at: datetime) -> None:
    """Run these services, or all, as workers do."""
    for service in services or SERVICES:
        call(db, service, at=at, as_service=True)


def run_at(db: Connection, job: int) -> datetime:
    return one(db, "select run_at from tallybook.scheduled where job_id = %s", job)


def end(db: Connection, verb: str, at: datetime, **more: Any) -> int:
    """Make one job whose first attempt has ended in this way."""
    (job,) = put(db, at=at)
    asker = Asker(db)
    asker.take(at=at)
    asker.end(verb, job, at=at, **more)
    return job


@pytest.mark.parametrize("back", [MIN, HOUR, YEARS], ids=str)
def test_every_service_runs_at_the_next_look(db: Connection, back: timedelta) -> None:
    """After a step back the next services_due names all services, whatever it asks for; once they have run, none."""

    def look(db: Connection, at: datetime) -> list[str]:
        """Return the services that are due, from a services_due for promote alone."""
        return one(db, "select due from tallybook.services_due('{promote}', at => %s)", at)

    run(db, at=T)
    db.execute("update tallybook.service set last_run_at = %s where name = 'schedules'", (T,))
    assert look(db, T + S) == []
    after = T - back
    assert look(db, after) == [*SERVICES, "schedules"]
    run(db, at=after)
    ran = one(db, "select array_agg(name order by name) from tallybook.service where last_run_at = %s", after)
    assert ran == SERVICES
    assert one(db, "select last_run_at from tallybook.service where name = 'schedules'") is None
    assert look(db, after + S) == []


def test_a_step_is_on_record_once_and_the_doctor_shows_it(db: Connection) -> None:
    """A step back is recorded once, with its size, and the doctor's `clock_steps` names it for a day."""
    day = timedelta(days=1)
    run(db, at=T)
    run(db, at=T - HOUR)
    assert db.execute("select noticed_at, by from tallybook.clock_step").fetchall() == [(T - HOUR, -HOUR)]
    doctor = "select level, finding from tallybook.doctor('maintenance', at => %s) where name = 'clock_steps'"
    assert db.execute(doctor, (T - HOUR + 5 * MIN,)).fetchone() == (
        "warning", "the clock of the server stepped back by 60 min, 5 min ago",
    )  # fmt: skip
    assert one(db, doctor, T + day) == "ok"


def test_a_clock_that_does_not_step_changes_nothing(db: Connection) -> None:
    """Services that run at times some seconds apart, out of order, are no step."""
    run(db, at=T)
    run(db, at=T - 9 * S)
    assert one(db, "select count(*) from tallybook.clock_step") == 0


@pytest.mark.parametrize("back", [HOUR, YEARS], ids=str)
def test_limited_jobs_keep_their_order_and_gaps(db: Connection, back: timedelta) -> None:
    """Turns that lie ahead by the step move back by it: each job keeps its gap to the one before."""
    db.execute("select tallybook.rate_limit_set('provider', 8, '1 minute')")
    jobs = put(db, "provider:acme", n=6)
    asker = Asker(db)
    assert asker.look(T) == jobs[:1]
    run(db, "promote", at=T + S)
    after = T + 2 * S - back  # two seconds after the first start, by a clock that is right
    run(db, "promote", at=after)
    assert asker.run(after + MIN, after) == jobs[1:]
    starts = [start for job, start in asker.started if job != jobs[0]]
    assert after < starts[0] <= after + 7500 * MS, "a second later at most than without the step"
    assert starts[0] >= after + 5500 * MS, "no sooner"
    assert [b - a for a, b in pairwise(starts)] == [7500 * MS] * 4


def test_control_limited_jobs_wait_for_the_clock(db: Connection) -> None:
    """Control: if nothing is moved back, the next job starts only when the clock has caught up."""
    without(db, "_service_claim", "perform tallybook._clock_back(p_at);")
    with pytest.raises(AssertionError):
        test_limited_jobs_keep_their_order_and_gaps(db, HOUR)


def test_a_start_that_was_missed_by_the_step_is_made_up_for_at_once(db: Connection) -> None:
    """A job that was let through just before the step and missed its start does not wait for the clock."""
    db.execute("select tallybook.rate_limit_set('api', 10, '1 second')")
    jobs = put(db, "api")
    asker = Asker(db)
    assert asker.look(T) == jobs
    run(db, "promote", at=T)
    run(db, "promote", at=T - HOUR)
    asker.too_late(jobs, T - HOUR)
    assert asker.started[0][1] <= T - HOUR + 200 * MS


def test_what_an_attempt_has_put_off_comes_after_its_delay(db: Connection) -> None:
    """A backoff and a snooze are delays and move back by the step; the run_at of a producer is a time and stays."""
    run(db, "promote", at=T)
    (asked,) = put(db, at=T, run_at=T + MIN)
    failed = end(db, "fail", T, error={"message": "no"}, retry_in=MIN)
    snoozed = end(db, "snooze", T, delay=MIN)
    run(db, "promote", at=T - HOUR)
    assert [run_at(db, job) for job in (failed, snoozed, asked)] == [T - HOUR + MIN, T - HOUR + MIN, T + MIN]


def test_a_time_from_before_the_step_stays_for_a_job_that_a_limit_has_held(db: Connection) -> None:
    """A job that was given another time while it waited for a limit keeps that time; only turns move by the step."""
    db.execute("select tallybook.rate_limit_set('provider', 8, '1 minute')")
    asker = Asker(db)
    put(db, "provider:acme")
    (held,) = put(db, "provider:acme", unique_key="k")
    asker.look(T)
    put(db, "provider:acme", unique_key="k", on_conflict="push_run_at", run_at=T + 6 * HOUR, at=T + S)
    run(db, "promote", at=T + 2 * HOUR)
    run(db, "promote", at=T + HOUR)
    assert run_at(db, held) == T + 6 * HOUR


def test_a_job_that_somebody_has_locked_holds_up_nothing(db: Connection, connect: Any) -> None:
    """A scheduled job that an open transaction has locked is skipped; the others still move back."""
    jobs = [end(db, "snooze", T, delay=MIN) for _ in range(2)]
    run(db, "promote", at=T)
    holder = connect(autocommit=False)
    holder.execute("select from tallybook.scheduled where job_id = %s for update", (jobs[0],))
    run(db, "promote", at=T - HOUR)
    assert [run_at(db, job) for job in jobs] == [T + MIN, T - HOUR + MIN]


def test_an_open_breaker_closes_after_its_time(db: Connection) -> None:
    """A breaker that was opened for a minute lets its probe through a minute later, whatever the clock did."""
    db.execute("select tallybook.breaker_set('api', 3, '1 min', '1 min')")
    db.execute("select tallybook.breaker_open('api', at => %s)", (T,))
    run(db, "promote", at=T)
    run(db, "promote", at=T - HOUR)
    assert one(db, "select open_until from tallybook.breaker_state") == T - HOUR + MIN


def dies(db: Connection, *, at: datetime) -> int:
    """Let a worker without a session claim a job and fall silent; return the worker."""
    put(db, at=at)
    worker = one(db, "select tallybook.worker_start('w', '{q}', at => %s)", at)
    claim(db, worker, at)
    return worker


def lost(db: Connection, at: datetime) -> int:
    return one(db, "select lost from tallybook.rescue(at => %s, as_service => true)", at)


@pytest.mark.parametrize("noted", [False, True], ids=["before it was noticed", "after it was noticed"])
def test_a_dead_worker_is_rescued_after_its_lease(db: Connection, noted: bool) -> None:
    """A worker that died before the step loses its jobs one lease after the step, not when the clock has caught up."""
    dies(db, at=T)
    run(db, "rescue", at=T + (31 * S if noted else S))
    after = T - HOUR
    assert lost(db, after) == 0
    assert lost(db, after + 29 * S) == 0
    assert lost(db, after + 31 * S) == 0, "noticed"
    assert lost(db, after + 42 * S) == 1


def test_a_server_that_started_later_than_now_rescues(db: Connection) -> None:
    """If the clock has stepped back behind the start of the server, a dead worker is still rescued."""
    started: datetime = one(db, "select pg_postmaster_start_time()")
    dies(db, at=started - HOUR)
    assert [lost(db, started - HOUR + after) for after in (31 * S, 42 * S)] == [0, 1]


@pytest.mark.parametrize("step", [-HOUR, HOUR, YEARS], ids=str)
def test_a_worker_that_beats_keeps_its_jobs(db: Connection, step: timedelta) -> None:
    """Whatever the step, a worker with the slowest heartbeat, every 15 s of a lease of 30, keeps its jobs."""
    worker = dies(db, at=T)
    run(db, "rescue", at=T + 14 * S)
    after = T + 14 * S + step
    for second in range(60):
        assert lost(db, after + second * S) == 0
        if second % 15 == 14:
            db.execute("select tallybook.renew(%s, 0, at => %s)", (worker, after + second * S))


def test_control_a_third_of_the_lease_robs_a_worker_that_beats(db: Connection) -> None:
    """Control: if the silence of a step forward counts, a worker that sends heartbeats loses its job."""
    without(
        db, "_worker_fate", "when w.gone_at - w.seen_at > 2 * p_lease and not v_free then greatest(p_grace, p_lease)"
    )
    with pytest.raises(AssertionError):
        test_a_worker_that_beats_keeps_its_jobs(db, HOUR)


async def _ticks(db: Connection, dsn: str, rule: dict[str, Any], back: timedelta, *times: timedelta) -> list[datetime]:
    """Return the recorded ticks of a schedule that ran until T, and then at these times after a step back."""
    set_schedule(db, "s", at=T - HOUR, overlap=True, **rule)
    after = T - back
    async with clocks(dsn, None) as (clock,):
        for at in [T - HOUR, T, *(after + time for time in times)]:
            await clock.run(at=at)
            db.execute("update tallybook.service set last_run_at = %s where name = 'promote'", (at,))
    return [row for row in fires(db, "s", "tick") if row <= after + times[-1]]


@pytest.mark.parametrize("back", [HOUR, YEARS], ids=str)
async def test_a_schedule_of_short_intervals_ticks_on(db: Connection, dsn: str, back: timedelta) -> None:
    """A schedule whose interval is shorter than the step ticks from now on, even if it fired these ticks before."""
    times = [n * 10 * S for n in range(4)]
    ticks = await _ticks(db, dsn, {"every": 10 * S}, back, *times)
    assert [tick for tick in ticks if tick > T - back] == [T - back + time for time in times[1:]]


async def test_a_daily_schedule_is_not_fired_twice(db: Connection, dsn: str) -> None:
    """A daily schedule that has fired before a step of an hour does not fire the same tick again."""
    ticks = await _ticks(db, dsn, {"cron": "0 0 * * *"}, HOUR, MIN, 31 * MIN, 59 * MIN, 61 * MIN)
    assert ticks == [T - 30 * MIN]
    assert one(db, "select fired_count from tallybook.schedule") == 1


async def test_a_step_forward_fires_once(db: Connection, dsn: str) -> None:
    """After a step forward missed ticks are treated as the schedule asks, once by default, and it continues."""
    set_schedule(db, "s", at=T, every=10 * MIN, overlap=True)
    async with clocks(dsn, None) as (clock,):
        ran = [await clock.run(at=at) for at in (T, T + YEARS + 5 * MIN, T + YEARS + 10 * MIN)]
    assert [one_run.fired for one_run in ran] == [0, 1, 1]
