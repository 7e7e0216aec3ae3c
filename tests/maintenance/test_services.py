"""The services in running workers, in Python and on the command line."""

import asyncio
import json
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from support.cli import invoke
from support.workers import SLEEPY, Jobs, eventually, working
from tallybook import App, ServiceInfo
from tallybook._db.link import Link
from tallybook._maintenance.services import Promoter
from tallybook._worker.claim import claimer as claimer_module
from tallybook._worker.claim.claimer import Claimer
from tallybook.errors import ConfigError, InvalidArgument

S = timedelta(seconds=1)

# A run of a service takes its time, holds a lock of the test until its transaction ends, and records if another run
# has that lock.
WATCHED = """
create table beside (name text);
create function claimed(p_name text, p_at timestamptz) returns boolean language plpgsql as $$ {body} $$;
create or replace function tallybook._service_claim(p_name text, p_at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  if not claimed(p_name, p_at) then return false; end if;
  if not pg_try_advisory_xact_lock(4711, hashtext(p_name)) then insert into beside values (p_name); end if;
  perform pg_sleep(0.03);
  return true;
end $$"""


def counted(of: Any, verb: str, monkeypatch: pytest.MonkeyPatch) -> AsyncMock:
    """Count the calls of this coroutine function."""
    mock = AsyncMock(wraps=getattr(of, verb))
    monkeypatch.setattr(of, verb, mock)
    return mock


def info(app: App, db: Any, name: str) -> ServiceInfo:
    return next(one for one in app.services.list().sync(db) if one.name == name)


@pytest.mark.parametrize("maintenance", [False, True], ids=["off", "control"])
async def test_a_worker_without_maintenance_only_runs_jobs(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture, *, maintenance: bool
) -> None:
    """S3-41: without maintenance jobs run, nothing is promoted, no service has run, and the log reports it."""

    @app.task
    async def note() -> None: ...

    caplog.set_level("INFO", logger="tallybook.worker")
    poll = timedelta(seconds=0.05)
    async with working(app, dsn, maintenance=maintenance, poll=poll):
        later = note.with_(delay=timedelta(seconds=0.1)).enqueue_sync(db)
        due = "select bool_and(clock_timestamp() > run_at) is not false from tallybook.scheduled"
        await eventually(lambda: db.execute(due).fetchone()[0], "it is due, or was promoted")
        job = note.enqueue_sync(db)
        await eventually(lambda: jobs(job).state == "completed", "what is in line runs")
        if maintenance:
            await eventually(lambda: jobs(later).state == "completed", "it was promoted")
        ran = db.execute("select count(*) from tallybook.service where last_run_at is not null").fetchone()[0]
        assert (jobs(later).state, ran > 0) == (("completed", True) if maintenance else ("scheduled", False))
    assert ("no maintenance here" in caplog.text) is not maintenance
    if not maintenance:
        await app.drain(dsn=dsn)
        assert jobs(later).state == "completed"


# Two workers


async def _three_workers(app: App, dsn: str, db: Any, jobs: Jobs, body: str) -> int:
    """Return how often a service ran beside itself, while three workers promote 300 jobs that fall due in a second."""
    body = body or db.execute("select prosrc from pg_proc where proname = '_service_claim'").fetchone()[0]
    db.execute(WATCHED.format(body=body))

    @app.task
    async def note(n: int) -> None: ...

    db.execute(
        "select count(tallybook.enqueue('default', 'note', jsonb_build_object('n', n),"
        " run_at => clock_timestamp() + make_interval(secs => 1 + n / 300.0))) from generate_series(1, 300) n"
    )
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(working(app, dsn, **SLEEPY))
        await eventually(lambda: not db.execute("select from tallybook.scheduled").fetchall(), "all are promoted")
        await eventually(
            lambda: db.execute("select count(*) = 300 from tallybook.job where state = 'completed'").fetchone()[0],
            "all are done",
        )
    return int(db.execute("select count(*) from beside").fetchone()[0])


@pytest.mark.slow
async def test_workers_never_run_one_service_at_once(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S3-32: of three workers for which jobs fall due at once, one at a time promotes; none is left or run twice."""
    assert await _three_workers(app, dsn, db, jobs, "") == 0
    assert info(app, db, "promote").last_effect is not None


@pytest.mark.slow
async def test_workers_run_services_at_once_where_nobody_claims(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Negative control of S3-32: if every claim succeeds, the same test finds concurrent runs."""
    assert await _three_workers(app, dsn, db, jobs, "begin return true; end") > 0


@pytest.mark.parametrize("insists", [True, False], ids=["drain", "control"])
async def test_drain_promotes_while_a_worker_does(
    app: App, dsn: str, db: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, insists: bool
) -> None:
    """S4-07 S3-32: a drain that finds the service claimed promotes itself; control: otherwise its jobs do not run."""
    ran: list[int] = []

    @app.task
    async def note(n: int) -> None:
        ran.append(n)

    if not insists:
        run = Promoter._run

        async def only_claimed(self: Promoter, *, as_service: bool = True) -> Any:
            return await run(self)

        monkeypatch.setattr(Promoter, "_run", only_claimed)
    db.execute(
        "select tallybook.enqueue('default', 'note', '{\"n\": 1}', run_at => clock_timestamp() + interval '1 h')"
    )
    db.execute("update tallybook.scheduled set run_at = clock_timestamp() - interval '1 s'")
    other = connect()
    other.execute("begin")
    other.execute("select tallybook._service_claim('promote'), tallybook._service_claim('rescue')")
    await app.drain(dsn=dsn)
    assert ran == ([1] if insists else [])


# How often


async def test_a_new_interval_reaches_a_running_worker(
    app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3-32: an interval changed while a worker runs holds from its next look on, without a restart."""
    for name in ("promote", "rescue", "rebase"):
        app.services.set(name, "1 hour").sync(db)
    async with working(app, dsn, rescue_look=timedelta(hours=1)) as worker:
        looks = counted(worker.maintenance, "look", monkeypatch)
        app.services.set("rebase", "100 ms").sync(db)
        # With the new interval ten looks take a second; before it, looks are at least four seconds apart.
        await eventually(lambda: worker.maintenance.rebaser.every == 0.1, "it has learned")
        before = looks.call_count
        await eventually(lambda: looks.call_count >= before + 10, "it looks as often", seconds=20)
        assert worker.maintenance.promoter.every == 3600


async def test_rescue_looks_as_often_as_its_service_says_unless_the_worker_was_told(
    app: App, dsn: str, db: Any
) -> None:
    """A worker's option rescue_look overrides the service's interval; without it, the interval holds."""
    app.services.set("rescue", "200 ms").sync(db)
    async with working(app, dsn, rescue_look=None) as one, working(app, dsn, rescue_look=50 * S) as other:
        await eventually(
            lambda: one.maintenance.rescuer.every == other.maintenance.rescuer.every == 0.2, "both have looked"
        )
        assert all(0.1 <= one.maintenance.rescuer.pause(100) <= 0.2 for _ in range(20))
        assert all(25 <= other.maintenance.rescuer.pause(100) <= 50 for _ in range(20))


# The look in place of the claim


@pytest.mark.slow
@pytest.mark.parametrize("rides", [True, False], ids=["look", "control"])
async def test_the_look_finds_jobs_for_a_worker_that_is_not_woken(
    app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch, rides: bool
) -> None:
    """The services' look finds a job whose producer sends no notification; control: nothing else does."""
    ran: list[int] = []

    @app.task
    async def note(n: int) -> None:
        ran.append(n)

    monkeypatch.setattr(claimer_module, "jittered", lambda seconds: 3600.0)  # the claimer does not poll
    if not rides:
        monkeypatch.setattr(Claimer, "idle_queues", lambda self: [])
    db.execute("set tallybook.notify = off")
    async with working(app, dsn, poll=0.2 * S) as worker:
        await eventually(
            lambda: worker.claimer.asleep and (worker.sleeper is None or worker.sleeper.clear), "it sleeps"
        )
        db.execute("select tallybook.enqueue('default', 'note', '{\"n\": 1}')")
        looks = counted(worker.maintenance, "look", monkeypatch)
        await eventually(lambda: ran or looks.call_count >= 8, "it ran, or looked eight times")
        assert bool(ran) is rides


@pytest.mark.slow
async def test_an_idle_claimer_leaves_the_look_to_the_services(
    app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5-09: an idle worker waits: it claims nothing while services look often enough, one statement instead of two."""
    monkeypatch.setattr(claimer_module, "jittered", lambda seconds: seconds)
    async with working(app, dsn, poll=S) as worker:
        await eventually(
            lambda: worker.claimer.asleep and (worker.sleeper is None or worker.sleeper.clear), "it sleeps"
        )
        claims = counted(worker.claimer, "_claim", monkeypatch)
        looks = counted(worker.maintenance, "look", monkeypatch)
        await eventually(lambda: looks.call_count >= 10, "ten looks")
        assert claims.call_count <= 1


async def test_looks_behind_the_mark_take_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 14: looks behind the mark take about a tenth of the time at most, and no requested one is forgotten.

    Each producer of a job that is due soon requests one; it walks over all jobs promoted while an old snapshot is held.
    """

    class SlowLink:
        """Each promote takes 20 ms and finds the next job due in 5 ms; `marks` keeps the marks of all calls."""

        def __init__(self) -> None:
            self.now, self.next_in = 100.0, 0.005
            self.marks: list[Any] = []

        async def rows(self, _: str, *params: Any) -> Any:
            self.marks.append(params[1])
            self.now += 0.02
            return [(0, datetime(2031, 1, 1, tzinfo=UTC), self.next_in)]

    link = SlowLink()
    promoter = Promoter(cast(Link, link), lambda: None)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: link.now)
    start = link.now
    for _ in range(100):
        promoter.at_latest_in(0, behind=True)
        again = await promoter.serve()
        assert again is not None and again <= 0.2
        link.now += 0.005
    behind = sum(mark is None for mark in link.marks)
    assert 0.02 * behind <= 0.12 * (link.now - start)
    assert behind >= 5
    link.next_in = 3600.0
    for early in (False, True):
        link.now += 0 if early else 1
        promoter.at_latest_in(0, behind=True)
        again = await promoter.serve()
        assert (link.marks[-1] is None) is not early
    assert again is not None and 0.1 < again < 0.2, "it waits, for it was asked for too early"
    link.now += again
    await promoter.serve()
    assert link.marks[-1] is None, "but it was not forgotten"


@pytest.mark.slow
@pytest.mark.direct("holds a lock of a session")
async def test_a_suspect_is_looked_at_twice(
    app: App, dsn: str, db: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3-06: a worker whose session is gone is given up by the second run of rescue, a grace after the first.

    No look in between delays that.
    """
    other = connect()
    dead = db.execute("select tallybook.worker_start('gone', '{default}', session => true)").fetchone()[0]
    other.execute("select pg_advisory_lock_shared(1413565443, %s::int)", [dead])
    async with working(app, dsn, rescue_look=None) as worker:
        await eventually(lambda: info(app, db, "rescue").last_run_at, "it has looked")
        runs = counted(worker.maintenance.rescuer, "serve", monkeypatch)
        other.close()
        ended = "select ended_at is not null from tallybook.worker where id = %s"
        await eventually(lambda: db.execute(ended, [dead]).fetchone()[0], "it is given up")
        assert runs.call_count == 2


# In Python and on the command line


def test_services_in_python(app: App, db: Any) -> None:
    """S3-31 S3-32: services.list shows the last runs; services.set changes the interval, and refuses invalid ones."""
    db.execute("select tallybook.promote(as_service => true)")
    names = [one.name for one in app.services.list().sync(db)]
    assert names == sorted(names) and {"fair_release", "concurrency_release", "promote", "rebase", "rescue"} <= set(
        names
    )
    promote, rescue = info(app, db, "promote"), info(app, db, "rescue")
    assert (promote.every, promote.last_effect) == (5 * S, 0)
    assert promote.last_run_at is not None and promote.last_took is not None
    assert (rescue.last_run_at, rescue.last_took, rescue.last_effect) == (None, None, None)
    assert app.services.set("rescue", "10 s").sync(db)
    assert not app.services.set("rescue", timedelta(seconds=10)).sync(db)
    assert info(app, db, "rescue").every == 10 * S
    with pytest.raises(InvalidArgument, match='there is no service "rescued"'):
        app.services.set("rescued", "10 s").sync(db)
    with pytest.raises(InvalidArgument, match="cannot run every"):
        app.services.set("rescue", "2 days").sync(db)
    with pytest.raises(ConfigError, match="every"):
        app.services.set("rescue", "often").sync(db)


async def test_services_in_async_python(app: App, dsn: str) -> None:
    """The same verbs, awaited with the App."""
    app.dsn = dsn
    assert await app.services.set("promote", S)
    assert next(one for one in await app.services.list() if one.name == "promote").every == S


def test_services_on_the_command_line(dsn: str, db: Any) -> None:
    """S3-31 S3-32: `service list` shows interval, last run, duration, effect; `service every` changes the interval."""
    db.execute("select tallybook.rescue(as_service => true)")
    changed = invoke("service", "every", "rescue", "10s", to=dsn)
    assert (changed.exit_code, changed.output) == (0, "service rescue checks every 10 s at least\n")
    assert invoke("service", "every", "rescue", "10 s", to=dsn).output == "service rescue checks every 10 s already\n"
    lines = invoke("service", "list", to=dsn).output.splitlines()
    assert lines[0].split() == ["service", "every", "last", "run", "took", "effect"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows["rescue"][1:3] == ["10", "s"] and rows["rescue"][-2:] == ["ms", "0"]
    assert rows["promote"][3:] == ["never"]
    found = {row["name"]: row for row in json.loads(invoke("service", "list", "--json", to=dsn).output)}
    assert found["rescue"]["every"] == 10 and found["rescue"]["last_effect"] == 0
    assert found["promote"] == {
        "name": "promote", "every": 5, "last_run_at": None, "last_took": None, "last_effect": None,
    }  # fmt: skip
    wrong = invoke("service", "every", "rescued", "10s", to=dsn)
    assert wrong.exit_code == 1 and 'there is no service "rescued"' in wrong.output
    assert invoke("service", "every", "rescue", "10", to=dsn).exit_code == 2
