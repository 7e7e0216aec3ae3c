"""Services: one worker claims each run and records it, nothing delays it long, and services_due names what is due."""

from datetime import datetime

import psycopg
import pytest

from support.askers import HOUR, S
from support.database import Connect, Connection, one
from support.hands import Hands
from tallybook._db.migrate import routines

RUNS = {
    "promote": "select promoted from tallybook.promote(at => %s, as_service => true)",
    "rescue": "select lost from tallybook.rescue(at => %s, as_service => true)",
    "rebase": "select rebased::int from tallybook.rebase(at => %s, as_service => true)",
}
LOOK = "select due, next_run_at, passed, work, workers from tallybook.services_due(%s::text[], after => %s, at => %s)"


@pytest.fixture
def somebody(connect: Connect) -> Connection:
    return connect()


def schedule(db: Connection, *ats: datetime) -> None:
    for at in ats:  # enqueued an hour before, however slow the machine is
        db.execute("select tallybook.enqueue('q', 'send', run_at => %s, at => %s)", [at, at - 3600 * S])


def run_all(conn: Connection, at: datetime) -> None:
    for run in RUNS.values():
        one(conn, run, at)


def left(db: Connection) -> int:
    return int(one(db, "select count(*) from tallybook.scheduled"))


# One run, one worker


@pytest.mark.servers
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_claimed_by_one(db: Connection, somebody: Connection, name: str, now: datetime) -> None:
    """S3-32: while one worker runs a service another one does nothing and gets null; after that run it runs."""
    somebody.execute("begin")
    assert one(somebody, RUNS[name], now) is not None
    assert one(db, RUNS[name], now) is None
    others = [one(db, RUNS[other], now) for other in RUNS if other != name]
    assert None not in others, "each service is claimed apart from the others"
    somebody.execute("commit")
    assert one(db, RUNS[name], now + 2 * S) is not None


def test_who_is_refused_moves_nothing(db: Connection, somebody: Connection, now: datetime) -> None:
    """S3-32: a promote that is refused leaves the due job in place, and returns when it is due."""
    somebody.execute("begin")
    one(somebody, RUNS["promote"], now)
    schedule(db, now + 9 * S)
    refused = db.execute("select * from tallybook.promote(at => %s, as_service => true)", [now + 9 * S]).fetchone()
    assert refused == (None, None, now + 9 * S)
    assert left(db) == 1


def test_without_the_claim_two_run_at_once(db: Connection, somebody: Connection, now: datetime) -> None:
    """Negative control of S3-32: with a claim that everybody gets, both run."""
    # The claim, without its guard.
    anybody = (
        "create or replace function tallybook._service_claim(p_name text, p_at timestamptz default now())"
        " returns boolean language sql as 'select true'"
    )
    db.execute(anybody)
    somebody.execute("begin")
    assert all(one(somebody, run, now) is not None for run in RUNS.values())
    assert all(one(db, run, now) is not None for run in RUNS.values())


def test_a_person_is_never_refused(db: Connection, somebody: Connection, now: datetime) -> None:
    """S3-31: a direct call of promote, rescue or rebase runs beside the service, and is not recorded."""
    schedule(db, now + 9 * S)
    somebody.execute("begin")
    run_all(somebody, now)
    assert one(db, "select promoted from tallybook.promote(at => %s)", now + 9 * S) == 1
    assert one(db, "select lost from tallybook.rescue(at => %s)", now) == 0
    assert one(db, "select rebased from tallybook.rebase(at => %s)", now) is False
    somebody.execute("rollback")
    assert one(db, "select count(*) from tallybook.service where last_run_at is not null") == 0


def test_runs_of_promote_that_overlap_move_each_job_once(db: Connection, somebody: Connection, now: datetime) -> None:
    """S3-32: if two runs meet without a claim, the second skips what the first one moves; no job is in line twice."""
    schedule(db, now + 1 * S, now + 2 * S, now + 3 * S)
    somebody.execute("begin")
    assert one(somebody, "select promoted from tallybook.promote(max_jobs => 2, at => %s)", now + 9 * S) == 2
    db.execute("set lock_timeout = '5 s'")
    assert one(db, "select promoted from tallybook.promote(at => %s)", now + 9 * S) == 1
    somebody.execute("commit")
    assert one(db, "select promoted from tallybook.promote(at => %s)", now + 9 * S) == 0
    moved = db.execute("select count(*), count(distinct job_id) from tallybook.entry").fetchone()
    assert (left(db), moved) == (0, (3, 3))


def test_a_claim_that_is_stuck_stops_nobody_for_long(db: Connection, somebody: Connection, now: datetime) -> None:
    """S3-32: an open transaction that has run the services delays them by 20 s at most, for everybody."""
    schedule(db, now + S)
    somebody.execute("begin")
    run_all(somebody, now)
    assert one(db, RUNS["promote"], now + 5 * S) is None
    assert one(db, RUNS["promote"], now + 20 * S) == 1
    assert one(db, RUNS["rescue"], now + 20 * S) == 0
    assert one(db, RUNS["rebase"], now + 20 * S) == 0


def test_a_claim_without_an_end_stops_the_fleet(db: Connection, somebody: Connection, now: datetime) -> None:
    """Negative control: a claim that an open transaction holds to its end stops promotion for that long."""
    # A claim that a transaction holds as long as it is open.
    forever = (
        "create or replace function tallybook._service_claim(p_name text, p_at timestamptz default now())"
        " returns boolean language sql as 'select pg_try_advisory_xact_lock(1413565449, hashtext(p_name))'"
    )
    db.execute(forever)
    schedule(db, now + S)
    somebody.execute("begin")
    run_all(somebody, now)
    assert one(db, RUNS["promote"], now + 24 * HOUR) is None
    assert left(db) == 1


# On record


def test_a_run_is_on_record(db: Connection, now: datetime) -> None:
    """S3-31: the view has a service's last run, duration and effect; promote takes a limit and returns its count."""
    schedule(db, *[now + n * S for n in range(1, 6)])
    moved = "select promoted from tallybook.promote(%s, at => %s, as_service => true)"
    assert one(db, moved, 2, now + 10 * S) == 2
    assert one(db, moved, 1000, now + 12 * S) == 3
    ran, took, effect = (
        db.execute(
            "select last_run_at, last_took, last_effect from tallybook.service where name = 'promote'"
        ).fetchone()
        or (None,) * 3
    )
    assert (ran, effect) == (now + 12 * S, 3)
    assert 0 * S < took < 10 * S


def test_a_rescue_is_on_record_with_its_effect(db: Connection, now: datetime) -> None:
    """S3-31: the effect of a rescue is how many attempts of dead workers it has returned or made dead."""
    hands = Hands(db)
    for _ in range(3):
        db.execute("select tallybook.enqueue('q', 'send')")
    assert len(hands.claim()) == 3
    lost = [one(db, RUNS["rescue"], now + seconds * S) for seconds in (60, 75)]
    assert lost == [0, 3], "silent for its lease, and still a third of it later"
    assert one(db, "select last_effect from tallybook.service where name = 'rescue'") == 3


def test_a_rescue_stops_at_its_limit(db: Connection, now: datetime) -> None:
    """S3-31: rescue takes a limit: past it no other worker's jobs are touched; those of one worker go together."""
    for _ in range(3):
        hands = Hands(db)
        db.execute("select tallybook.enqueue('q', 'send') from generate_series(1, 2)")
        assert len(hands.claim()) == 2
    query = "select lost from tallybook.rescue(at => %s, max_crashes => 1, max_jobs => %s)"
    lost = [one(db, query, now + seconds * S, most) for seconds, most in ((60, 1), (75, 1), (75, 3), (75, 3))]
    assert lost == [0, 2, 4, 0]
    assert one(db, "select count(*) from tallybook.dead") == 0, "whose fault it was is not known of any"
    with pytest.raises(psycopg.Error, match="max_jobs"):
        one(db, query, now, 0)


def test_at_most_one_run_a_second_is_put_on_record(db: Connection, now: datetime) -> None:
    """A service that runs ten times a second writes its row once: a pinned horizon would make it slow."""
    for n in range(20):
        one(db, RUNS["promote"], now + n * S / 10)
    assert one(db, "select last_run_at from tallybook.service where name = 'promote'") == now + 1.1 * S


def test_a_run_never_waits_for_its_record(db: Connection, somebody: Connection, now: datetime) -> None:
    """A run does not wait for a locked row of its service, as while somebody changes its interval."""
    schedule(db, now + S)
    somebody.execute("begin")
    somebody.execute("select tallybook.service_every('promote', '1 min')")
    db.execute("set lock_timeout = '100ms'")
    assert one(db, RUNS["promote"], now + 2 * S) == 1


# How often


def test_every_is_changed_by_sql(db: Connection) -> None:
    """S3-32: service_every changes the interval of a service, and services_due returns it."""
    assert one(db, "select tallybook.service_every('rescue', '10 s')") is True
    assert one(db, "select tallybook.service_every('rescue', '10 s')") is False
    names, every = db.execute("select names, every from tallybook.services_due()").fetchone() or ((), ())
    assert dict(zip(names, every, strict=True))["rescue"] == 10 * S


def test_one_run_serves_all_queues(db: Connection, now: datetime) -> None:
    """S3-32: one run of a service serves all queues, and one interval applies to all."""
    put = "select tallybook.enqueue('q' || n, 'send', run_at => %s, at => %s) from generate_series(1, 20) n"
    db.execute(put, [now + S, now])
    db.execute("select tallybook.service_every('promote', '1 h')")
    assert one(db, RUNS["promote"], now) == 0
    due = "select 'promote' = any (due) from tallybook.services_due(at => %s)"
    assert [one(db, due, at) for at in (now, now + S)] == [False, True], "at its time, whatever the interval says"
    assert (one(db, RUNS["promote"], now + S), left(db)) == (20, 0)
    assert one(db, "select count(*) from tallybook.service where name = 'promote'") == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("'rescued', '10 s'", 'there is no service "rescued"'),
        ("null, '10 s'", "there is no service null"),
        ("'rescue', '99 ms'", "a service cannot run every 00:00:00.099"),
        ("'rescue', '25 hours'", "a service cannot run every 25:00:00"),
        ("'rescue', null", "a service cannot run every null"),
    ],
)
def test_every_that_cannot_be_is_refused(db: Connection, call: str, said: str) -> None:
    """S3-32: an unknown service and a time out of range raise TB005, and nothing is changed."""
    with pytest.raises(psycopg.Error) as caught:
        db.execute(f"select tallybook.service_every({call})")
    assert (caught.value.sqlstate, caught.value.diag.message_primary) == ("TB005", said)
    assert one(db, "select every from tallybook.service where name = 'rescue'") == 5 * S


# The look


def look(db: Connection, at: datetime, *, after: datetime | None = None) -> list[str]:
    due: list[str] = one(db, LOOK, ["promote", "rebase", "rescue"], after, at)
    return due


@pytest.fixture
def ran(db: Connection, now: datetime) -> datetime:
    """Run all services now."""
    run_all(db, now)
    return now


@pytest.mark.servers
def test_an_idle_look_finds_nothing_and_writes_nothing(db: Connection, ran: datetime) -> None:
    """If nothing is to be done, services_due names no service and has no transaction id: it wrote nothing."""
    Hands(db, at="'infinity'")
    schedule(db, ran + 60 * S)
    with db.transaction():
        row = db.execute(LOOK, (None, None, ran + 5 * S)).fetchone()
        assert one(db, "select pg_current_xact_id_if_assigned()") is None
    assert row is not None
    due, next_run_at, passed, work, workers = row
    assert [name for name in due if name in RUNS] == []
    assert (next_run_at, passed, work, workers) == (ran + 60 * S, ran + 4 * S, False, 1)


def test_the_look_names_promote_when_a_job_is_due(db: Connection, ran: datetime) -> None:
    """services_due names promote for a due job, but not if its mark is after that job's time."""
    schedule(db, ran + 10 * S)
    assert look(db, ran + 9 * S) == []
    assert look(db, ran + 10 * S) == ["promote"]
    assert look(db, ran + 10 * S, after=ran + 10 * S) == ["promote"]
    assert look(db, ran + 10 * S, after=ran + 11 * S) == []


def test_the_look_names_what_was_amended(db: Connection, ran: datetime) -> None:
    """services_due names promote for an available job whose priority was changed."""
    for _ in range(2):
        db.execute(
            "select tallybook.enqueue('q', 'send', unique_key => 'k', priority => 1, on_conflict => 'raise_priority')"
        )
    assert look(db, ran + S) == []
    db.execute(
        "select tallybook.enqueue('q', 'send', unique_key => 'k', priority => 0, on_conflict => 'raise_priority')"
    )
    assert "promote" in look(db, ran + S)


@pytest.mark.direct("holds a lock of a session")
def test_the_look_names_rescue_for_who_seems_dead(db: Connection, somebody: Connection, ran: datetime) -> None:
    """services_due names rescue if a worker's session is gone or it is silent for its lease, until it is no suspect."""
    silent = Hands(db, at=f"timestamptz '{ran.isoformat()}'").worker
    assert look(db, ran + 20 * S) == []
    assert look(db, ran + 35 * S) == ["rescue"], "silent"
    db.execute("select tallybook.renew(%s::int, 0, at => %s)", [silent, ran + 24 * HOUR])
    held = one(somebody, "select tallybook.worker_start('held', '{q}', session => true, at => %s)", ran + 24 * HOUR)
    somebody.execute("select pg_advisory_lock_shared(1413565443, %s::int)", [held])
    assert look(db, ran + S) == []
    somebody.execute("select pg_advisory_unlock_all()")
    assert look(db, ran + S) == ["rescue"], "its session is gone"
    assert one(db, RUNS["rescue"], ran + S) == 0
    somebody.execute("select pg_advisory_lock_shared(1413565443, %s::int)", [held])
    assert look(db, ran + 2 * S) == ["rescue"], "it is back, and is a suspect still"
    assert one(db, RUNS["rescue"], ran + 2 * S) == 0
    assert look(db, ran + 3 * S) == []


def test_the_look_names_rescue_for_lines_of_order_keys(db: Connection, ran: datetime) -> None:
    """While jobs wait for their order key, services_due names rescue once a second, to fix missed releases."""
    hands = Hands(db, at="'infinity'")
    for _ in range(2):
        db.execute("select tallybook.enqueue('q', 'send', order_key => 'k')")
    jobs = hands.claim()
    db.execute(
        "select * from tallybook.order_admit(%s, %s, %s)",
        ([job.lease for job in jobs], [job.id for job in jobs], [job.attempt for job in jobs]),
    )
    assert one(db, "select count(*) from tallybook.waiting") == 1
    assert look(db, ran + S / 2) == []
    assert look(db, ran + 2 * S) == ["rescue"]


def test_the_look_names_rescue_for_old_tombstones(db: Connection, ran: datetime) -> None:
    """services_due names rescue once a tombstone of a cancelled job is a minute old."""
    job = one(db, "select tallybook.enqueue('q', 'send')")
    db.execute("select tallybook.cancel(%s)", [job])
    assert "rescue" not in look(db, ran + 30 * S)
    db.execute("update tallybook.service set last_run_at = %s", [ran + 85 * S])
    assert look(db, ran + 88 * S) == []
    assert look(db, ran + 91 * S) == ["rescue"]


def test_the_look_names_the_clock_when_a_schedule_is_due(db: Connection, ran: datetime) -> None:
    """services_due returns the next tick of any schedule, and names schedules from then on."""
    db.execute("select tallybook.schedule_set('s', 'send', every => '1 h', at => %s)", [ran])
    db.execute("update tallybook.schedule set tick = %s, due_at = %s", (ran + 10 * S, ran + 10 * S))
    db.execute("update tallybook.service set last_run_at = %s", [ran])
    # Not fold: it is due whenever a transaction that was open at the last fold ends, in any database.
    look = "select due, next_tick_at from tallybook.services_due('{promote,rescue,rebase,schedules}', at => %s)"
    assert db.execute(look, [ran + 9 * S]).fetchone() == ([], ran + 10 * S)
    assert db.execute(look, [ran + 10 * S]).fetchone() == (["schedules"], ran + 10 * S)
    db.execute("select tallybook.schedule_pause('s')")
    assert db.execute(look, [ran + 10 * S]).fetchone() == ([], None)


def test_the_look_names_rebase_in_another_cluster(db: Connection, ran: datetime) -> None:
    """A database from another cluster needs rebase at once; a lane that it retired, every few seconds."""
    db.execute("select tallybook.enqueue('q', 'send')")
    db.execute("update tallybook.installation set system_identifier = 1")
    assert look(db, ran + S) == ["rebase"]
    assert one(db, RUNS["rebase"], ran + 2 * S) == 1
    assert look(db, ran + 3 * S) == []
    assert look(db, ran + 8 * S) == ["rebase"]


def test_what_has_not_run_for_a_minute_runs(db: Connection, now: datetime) -> None:
    """S3-31: a service with nothing to do still runs once a minute, so its last run proves that somebody looks."""
    assert look(db, now) == sorted(RUNS), "none has ever run"
    run_all(db, now)
    assert look(db, now + 59 * S) == []
    assert look(db, now + 61 * S) == sorted(RUNS)
    db.execute("select tallybook.service_every('promote', '1 hour')")
    assert look(db, now + 61 * S) == ["rebase", "rescue"]


def test_only_what_is_asked_for_is_named(db: Connection, now: datetime) -> None:
    """services_due names only the services that the worker asks for."""
    assert one(db, "select due from tallybook.services_due('{rescue}', at => %s)", now) == ["rescue"]


# The look in place of an idle claim


def work(db: Connection, hands: Hands, *queues: str) -> bool:
    query = "select work from tallybook.services_due('{}', worker => %s, queues => %s)"
    found = one(db, query, hands.worker, list(queues))
    assert isinstance(found, bool)
    return found


def test_the_look_sees_what_a_claim_would_take(db: Connection) -> None:
    """An available job of a requested queue is work; one of another or a paused queue, or a claimed one, is not."""
    hands = Hands(db, "q")
    assert not work(db, hands, "q")
    db.execute("select tallybook.enqueue('q', 'send')")
    assert work(db, hands, "q")
    assert work(db, hands, "other", "q")
    assert not work(db, hands, "other")
    assert not work(db, hands), "nobody asked"
    db.execute("select tallybook.pause('q')")
    assert not work(db, hands, "q")
    db.execute("select tallybook.resume('q')")
    hands.claim()
    assert not work(db, hands, "q")


def test_the_look_sees_no_work_in_lanes_of_tasks_that_others_know(db: Connection) -> None:
    """A job that was set aside for workers that know its task is work for those only."""
    knows = Hands(db, "q")
    db.execute("update tallybook.worker set parts = '{task:send}'")
    stranger = Hands(db, "q")
    db.execute("select tallybook._put(1, 'q', 'send', '{}', null, 2, null, null, null, clock_timestamp())")
    db.execute("update tallybook.lane set part = 'task:send'")
    assert work(db, knows, "q")
    assert not work(db, stranger, "q")


def test_a_look_leaves_the_hard_cases_to_the_claim(db: Connection) -> None:
    """For a worker that was given up, or a cursor of another cluster, work is true: the claim handles it."""
    hands = Hands(db, "q")
    db.execute("update tallybook.worker set ended_at = now()")
    assert work(db, hands, "q")
    other = Hands(db, "q")
    db.execute("select tallybook.enqueue('q', 'send')")
    other.claim()
    db.execute("update tallybook.claim set hi = '9000000000'")
    assert work(db, other, "q")


def test_every_service_has_its_row_and_its_claim(db: Connection) -> None:
    """S3-32: a run is claimed under the name of a row of tallybook.service."""
    known = {row[0] for row in db.execute("select name from tallybook.service")}
    text = "".join(body for _, body in routines())
    assert all(f"_service_claim('{name}', at)" in text and f"_service_ran('{name}', at, " in text for name in RUNS)
    assert set(RUNS) <= known
