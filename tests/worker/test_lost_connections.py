"""Connections that are lost, silent or refused, in the middle of everything: what continues, and what is logged."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.proxy import Proxy
from support.workers import SLEEPY, Jobs, eventually, working
from tallybook import App, Job
from tallybook._db import calls, exactly_once, link
from tallybook._db.link import Link
from tallybook._db.migrate import migrate
from tallybook._worker.claim import sleeper
from tallybook._worker.life import heartbeat
from tallybook.embedded import temporary_server
from tallybook.errors import CommitUnknown, QueueUnavailable, WrongIsolationLevel

pytestmark = pytest.mark.direct("the proxy of these tests stands before the server itself")
COMMIT = b"\x00commit\x00"  # not the "read committed" of its BEGIN
LONG = {"lease": timedelta(seconds=30), "heartbeat": timedelta(seconds=10), "rescue_look": timedelta(seconds=5)}


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(dsn) as proxy:
        yield proxy


@pytest.mark.slow
async def test_a_half_open_listener_is_noticed_within_15_seconds(
    app: App, note: Any, db: Any, jobs: Jobs, proxy: Proxy
) -> None:
    """F11 P10: a ping on the listening session notices a network that drops everything; the session is replaced."""
    async with working(app, proxy.dsn, **SLEEPY, **LONG) as worker:
        assert worker.sleeper is not None
        await eventually(lambda: worker.sleeper and worker.sleeper.clear, "the worker sleeps")
        first = worker.sleeper._conn
        proxy.silent = True
        began = time.monotonic()
        await eventually(lambda: worker.sleeper and worker.sleeper._conn is not first, "it was noticed")
        assert time.monotonic() - began < 15
        proxy.silent = False
        proxy.cut()
        await jobs.ends(note.enqueue_sync(db))


@pytest.mark.slow
async def test_without_the_question_a_half_open_listener_stays_deaf(
    app: App, db: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11, negative control: a session that is not pinged is not replaced within 13 s, longer than a ping needs."""
    monkeypatch.setattr(sleeper, "_PING_EVERY", 3600.0)
    async with working(app, proxy.dsn, **SLEEPY, **LONG) as worker:
        assert worker.sleeper is not None
        await eventually(lambda: worker.sleeper and worker.sleeper.clear, "the worker sleeps")
        first = worker.sleeper._conn
        proxy.silent = True
        with pytest.raises(AssertionError, match="not within"):
            await eventually(lambda: worker.sleeper and worker.sleeper._conn is not first, "it was noticed", seconds=13)
        proxy.silent = False
        proxy.cut()


async def test_a_session_that_does_not_listen_any_more_is_made_again(
    app: App, note: Any, db: Any, jobs: Jobs, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11: a session that was reset (by a pooler, say) answers, but does not listen: the ping checks for that, too."""
    monkeypatch.setattr(sleeper, "_PING_EVERY", 0.2)
    async with working(app, dsn, **SLEEPY) as worker:
        assert worker.sleeper is not None
        await eventually(lambda: worker.sleeper and worker.sleeper.clear, "the worker sleeps")
        with suppress(psycopg.ProgrammingError):  # it returns no row
            await worker.sleeper._ask("unlisten *", ())
        first = worker.sleeper._conn
        await eventually(lambda: worker.sleeper and worker.sleeper._conn is not first, "it was noticed")


@pytest.mark.slow
async def test_a_blackhole_costs_no_job_and_heals_by_itself(
    app: App, note: Any, db: Any, jobs: Jobs, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F10 P10: after a blackhole longer than the lease, every connection comes back, and each job ends once.

    Either the heartbeat or a rescue may come first: an end is refused only for an attempt that was rescued.
    """
    monkeypatch.setattr(link, "_ANSWER", 3.0)  # 30 s by default, too long for a test
    async with working(app, proxy.dsn) as worker:
        await jobs.ends(note.enqueue_sync(db))
        proxy.silent = True
        put = [note.enqueue_sync(db, n) for n in range(20)]
        beats = "select extract(epoch from clock_timestamp() - max(seen_at))::float8 from tallybook.worker"
        await eventually(lambda: db.execute(beats).fetchone()[0] > 2.5, "its lease is over")
        proxy.silent = False
        assert all(job.state == "completed" for job in await jobs.ends(*put, seconds=40))
        ends = dict(db.execute("select state::text, count(*) from tallybook.outcome group by state").fetchall())
        assert ends.pop("completed") == 21
        assert worker.finisher.counts["refused"] == ends.pop("lost", 0) and not ends


async def test_a_slow_network_costs_no_lease(app: App, db: Any, dsn: str) -> None:
    """F12: an answer that is slow, but within the limit, does not cut the heartbeat's connection."""
    settings = {"lease": timedelta(seconds=30), "heartbeat": timedelta(seconds=0.3)}
    async with working(app, dsn, **settings) as worker:
        beat = await eventually(
            lambda: worker.heartbeat and worker.heartbeat.worker_id and worker.heartbeat, "it is on"
        )
        assert beat._answer == 5.0
        first = beat._conn
        with psycopg.connect(dsn) as blocker:
            blocker.execute("select from tallybook.worker for update")
            await asyncio.sleep(1.2)  # the time that the answer takes
        seen = "select seen_at from tallybook.worker"
        before = db.execute(seen).fetchone()
        await eventually(lambda: db.execute(seen).fetchone() > before, "it beats")
        assert beat._conn is first


async def test_terminated_sessions_are_replaced(app: App, note: Any, db: Any, jobs: Jobs, dsn: str) -> None:
    """F6 P10: an operator terminates all sessions of a worker repeatedly: every job ends once."""
    end = (
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like 'tallybook %' and pid <> pg_backend_pid() and datname = current_database()"
    )
    async with working(app, dsn) as worker:
        put = []
        for turn in range(5):
            put += [note.enqueue_sync(db, turn * 100 + n) for n in range(30)]
            db.execute(end)
            await asyncio.sleep(0.05)
        ended = await jobs.ends(*put, seconds=30)
    assert {(job.state, job.failures) for job in ended} == {("completed", 0)}
    assert worker.finisher.counts["completed"] >= 1


def limit_the_role(dsn: str) -> None:
    """Set limits on the database, as administrators do, with which no worker can run."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        name = sql.Identifier(admin.info.dbname)
        for setting in ("statement_timeout = 150", "lock_timeout = 50", "default_transaction_isolation = serializable"):
            admin.execute(sql.SQL("alter database {} set " + setting).format(name))


async def test_time_limits_of_the_role_are_no_failure_of_a_job(
    app: App, note: Any, db: Any, jobs: Jobs, dsn: str
) -> None:
    """F20: the worker's sessions override time-outs and the isolation level of a role: an end waits, none fails."""
    put = [note.enqueue_sync(db, n) for n in range(50)]
    limit_the_role(dsn)
    with psycopg.connect(dsn, options="-c statement_timeout=0 -c lock_timeout=0") as blocker:
        blocker.execute("lock table tallybook.outcome in share mode")
        async with working(app, dsn) as worker:
            await eventually(lambda: worker.claimer.claimed == 50, "they run")
            await asyncio.sleep(0.5)  # longer than both limits
            blocker.commit()
            ended = await jobs.ends(*put)
    assert {(job.state, job.failures) for job in ended} == {("completed", 0)}


async def test_not_set_aside_the_limits_of_the_role_stop_a_worker(
    app: App, note: Any, db: Any, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F20, negative control: with the role's isolation level in force, the worker stops with WrongIsolationLevel."""
    note.enqueue_sync(db)
    limit_the_role(dsn)
    monkeypatch.setattr(link, "SESSION", "select 1 where pg_backend_pid() = %s::int")
    with pytest.raises(WrongIsolationLevel):
        async with working(app, dsn) as worker:
            await eventually(lambda: worker.claimer.stopping.is_set() or worker._failed, "it stops")


@pytest.mark.slow
@pytest.mark.parametrize(("state", "times"), [("55P03", 7), ("40P01", 7), ("40001", 7), ("57014", 7), ("53100", 2)])
async def test_what_only_time_can_mend_is_said_again(dsn: str, state: str, times: int) -> None:
    """F15 F18 F19 F20: contention, time limit, full disk: a call is repeated on its connection until it works."""
    fail_with = "do $$ begin raise exception 'x' using errcode = '{}'; end $$"
    one, tries = Link(dsn, "test"), 0
    used = set()

    async def call(conn: Any) -> int:
        nonlocal tries
        tries += 1
        used.add(conn.info.backend_pid)
        if tries <= times:
            await conn.execute(fail_with.format(state))
        return tries

    try:
        assert await one.run(call) == times + 1
        assert len(used) == 1
    finally:
        await one.close()


async def test_a_full_disk_is_an_unavailable_queue_to_who_enqueues(
    app: App, db: Any, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F15: an enqueue without room on the server is repeated for a while; then QueueUnavailable gives the reason."""
    monkeypatch.setattr(exactly_once, "PATIENCE", 0.5)
    db.execute("""create function public.no_room() returns bigint language plpgsql as
        $$ begin raise exception 'could not extend file' using errcode = '53100'; end $$""")
    app.dsn = dsn
    call = calls.Call("enqueue", "select public.no_room()", {}, Job)
    with pytest.raises(QueueUnavailable, match="could not extend file"):
        await app._run(call)
    with pytest.raises(QueueUnavailable, match="could not extend file"):
        await asyncio.to_thread(app._run_sync, call)


@pytest.mark.slow
async def test_a_server_without_free_connections_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """F16: 53300 from the real server: a worker finds no connection, logs it once, and waits until one is free."""
    app = App("shop")

    @app.task
    async def note() -> None:
        pass

    with ExitStack() as stack:
        server = stack.enter_context(temporary_server(settings={"max_connections": "12"}))
        dsn = server.create_database("shop")
        with psycopg.connect(dsn) as conn:
            migrate(conn)
        db = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        job = note.enqueue_sync(db)
        taken = []
        with pytest.raises(psycopg.OperationalError, match="too many clients"):
            while True:
                taken.append(stack.enter_context(psycopg.connect(dsn)))
        async with working(app, dsn):
            await eventually(lambda: "too many clients" in caplog.text, "it is told")
            assert len(caplog.records) == 1
            for conn in taken:
                conn.close()
            assert (await Jobs(app, db).ends(job))[0].state == "completed"


@pytest.mark.slow
async def test_many_idle_workers_and_one_job(app: App, note: Any, db: Any, jobs: Jobs, dsn: str) -> None:
    """F48: a job wakes all sleeping workers, one gets it, and the others sleep again instead of polling."""
    asked = 0

    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(working(app, dsn, **SLEEPY)) for _ in range(12)]
        for worker in workers:
            await eventually(lambda it=worker: it.sleeper and it.sleeper.clear, "it sleeps")  # type: ignore[misc]
            original = worker.claimer.claim

            async def claim(original: Any = original, **options: Any) -> Any:
                nonlocal asked
                asked += 1
                return await original(**options)

            worker.claimer.claim = claim  # type: ignore[method-assign]
        await jobs.ends(note.enqueue_sync(db))
        for worker in workers:
            await eventually(lambda it=worker: it.sleeper and it.sleeper.clear, "it sleeps")  # type: ignore[misc]
    assert sum(worker.claimer.claimed for worker in workers) == 1
    assert asked <= 5 * len(workers)


@pytest.mark.parametrize("deliver", [True, False], ids=["committed", "not committed"])
@pytest.mark.parametrize("pool", [True, False], ids=["pool", "no pool"])
async def test_a_commit_whose_answer_is_lost_is_resolved(
    app: App, note: Any, db: Any, proxy: Proxy, deliver: bool, pool: bool
) -> None:
    """F7 P1: an enqueue by the app, cut off at its COMMIT, makes one job, committed or not; the id is the job's."""
    app.dsn = proxy.dsn
    if pool:
        async with app.open():
            await note.enqueue(app, 0)
            proxy.cut_at(COMMIT, deliver=deliver)
            job = await note.enqueue(app, 1)
    else:
        await note.enqueue(app, 0)
        proxy.cut_at(COMMIT, deliver=deliver)
        job = await note.enqueue(app, 1)
    assert proxy.times_cut == 1
    found = db.execute("select id from tallybook.job where args = '{\"n\": 1}'").fetchall()
    assert found == [(job.id,)]


@pytest.mark.parametrize("deliver", [True, False], ids=["committed", "not committed"])
def test_a_lost_commit_is_resolved_without_a_loop(app: App, note: Any, db: Any, proxy: Proxy, deliver: bool) -> None:
    """F7: the same with enqueue_many_sync, for three jobs with unique keys."""
    app.dsn = proxy.dsn
    proxy.cut_at(COMMIT, deliver=deliver)
    report = app.enqueue_many_sync(app, [note.with_(unique=str(n)).job(n) for n in range(3)])
    assert proxy.times_cut == 1
    assert [job.created for job in report] == [True] * 3
    assert db.execute("select id from tallybook.job order by id").fetchall() == [(job.id,) for job in report]


@pytest.mark.parametrize("deliver", [True, False], ids=["committed", "not committed"])
def test_a_lost_commit_with_a_follow_up_is_resolved(app: App, note: Any, db: Any, proxy: Proxy, deliver: bool) -> None:
    """F7: the same for jobs that another job waits for."""
    app.dsn = proxy.dsn
    proxy.cut_at(COMMIT, deliver=deliver)
    report = app.enqueue_many_sync(app, [note.job(n) for n in range(2)], then=note.job(2))
    assert proxy.times_cut == 1
    assert db.execute("select id, state from tallybook.job order by id").fetchall() == [
        (job.id, state) for job, state in zip(report, ("available", "available", "waiting"), strict=True)
    ]


async def test_said_again_blindly_a_lost_commit_is_two_jobs(
    app: App, note: Any, db: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7, negative control: without the check whether it was committed there are two jobs."""

    async def never(conn: object, saying: object) -> bool:
        return False

    monkeypatch.setattr(exactly_once, "_is_there", never)
    app.dsn = proxy.dsn
    proxy.cut_at(COMMIT)
    await note.enqueue(app, 1)
    assert db.execute("select count(*) from tallybook.job").fetchone() == (2,)


async def test_a_commit_that_cannot_be_resolved_is_an_error(
    app: App, note: Any, db: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: if the server does not come back in time, CommitUnknown names the verb; there is no guess."""
    monkeypatch.setattr(exactly_once, "PATIENCE", 0.5)
    app.dsn = proxy.dsn
    async with app.open(max_size=1):
        await note.enqueue(app, 0)
        pool = app._own_pool()
        assert pool is not None
        pool.timeout = 0.5  # only after it has connected, which may take a while
        proxy.cut_at(COMMIT)
        proxy.refusing = True
        with pytest.raises(CommitUnknown) as caught:
            await note.enqueue(app, 1)
    assert caught.value.verb == "enqueue"
    assert "again" in (caught.value.hint or "")


async def test_a_job_younger_than_the_lost_commit_is_not_taken_for_it(app: App, note: Any, db: Any, dsn: str) -> None:
    """F7: after a crash the server may reuse transaction and job ids: a younger job is another's."""
    app.dsn = dsn
    job = await note.enqueue(app, 1)
    (xid, at) = db.execute(
        "select xmin::text, (enqueued_at - interval '1 us')::text from tallybook.entry where job_id = %s", (job.id,)
    ).fetchone()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        for mark, there in (((xid, at), False), ((xid, "infinity"), True), (("999999999999", at), False)):
            saying: Any = exactly_once._Saying(calls.get(1), "x")
            saying.said, saying.mark = job, mark
            assert await exactly_once._is_there(conn, saying) is there


@pytest.mark.slow
async def test_a_full_server_is_waited_for_without_a_storm(
    app: App, note: Any, db: Any, jobs: Jobs, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F16 P10: while the server refuses connections, the worker lives, retries with growing pauses, then continues."""
    async with working(app, proxy.dsn) as worker:
        await jobs.ends(note.enqueue_sync(db))
        proxy.refusing = True
        proxy.cut()
        before = proxy.accepted
        await asyncio.sleep(4)  # the length of the outage
        tries = proxy.accepted - before
        proxy.refusing = False
        job = note.enqueue_sync(db)
        assert (await jobs.ends(job))[0].state == "completed"
        assert not worker._failed
    assert 5 <= tries <= 60  # five connections, each about ten times in 4 s


async def test_a_wrong_password_while_running_is_told_and_waited_for(
    app: App, note: Any, db: Any, jobs: Jobs, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P10: a refused login is logged with the database's name; when it is allowed again, the worker continues."""
    (name,) = db.execute("select current_database()").fetchone()
    role = f"role_{name[-12:]}"
    db.execute(f"create role {role} login superuser")
    try:
        caplog.set_level(logging.INFO, "tallybook")
        async with working(app, psycopg.conninfo.make_conninfo(dsn, user=role)):
            await jobs.ends(note.enqueue_sync(db))
            db.execute(f"alter role {role} nologin")
            db.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = %s", (role,))
            await eventually(lambda: "is not permitted to log in" in caplog.text, "it is told")
            told = caplog.text
            assert name in told
            db.execute(f"alter role {role} login")
            assert (await jobs.ends(note.enqueue_sync(db)))[0].state == "completed"
            await eventually(lambda: "connected again after" in caplog.text, "its end is told")
    finally:
        db.execute(f"drop owned by {role}; drop role {role}")


async def test_handlers_that_take_the_pool_do_not_stop_the_worker(app: App, db: Any, jobs: Jobs, dsn: str) -> None:
    """F41: 20 slots whose handlers enqueue by a pool of 2: the worker has its own connections, and all jobs end."""

    @app.task
    async def child(n: int) -> None:
        pass

    @app.task
    async def parent(n: int) -> None:
        for _ in range(3):
            await child.enqueue(app, n)

    async with app.open(dsn=dsn, max_size=2), working(app, dsn, queues={"default": 20}):
        app.enqueue_many_sync(db, [parent.job(n) for n in range(60)])
        done = "select count(*) from tallybook.outcome where state = 'completed'"
        await eventually(lambda: db.execute(done).fetchone() == (240,), "all have ended", seconds=30)
    assert db.execute("select count(*) from tallybook.job where failures > 0").fetchone() == (0,)


async def test_a_taken_pool_is_told_after_a_bound(app: App, note: Any, dsn: str) -> None:
    """F41: with all connections taken, a call times out as QueueUnavailable, with the reason; later it works."""
    async with app.open(dsn=dsn, max_size=1, timeout=timedelta(seconds=1)):
        async with app._connection():
            began = time.monotonic()
            with pytest.raises(QueueUnavailable, match="all 1 connections of the app's pool were taken"):
                await note.enqueue(app, 1)
            assert time.monotonic() - began < 5
        await note.enqueue(app, 1)


def test_the_limits_leave_room_in_the_lease() -> None:
    """F10 F12: by default a hanging heartbeat is cut early enough for two more within the lease."""
    assert heartbeat._MOST_ANSWER * 2 + 10 <= 30
    assert sleeper._PING_EVERY + sleeper._PING_LIMIT < 15
