"""Atomic tasks: a handler's writes, the jobs that it enqueues and its end are committed together, or not at all."""

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from support.atomic_kinds import KINDS, TABLE, Kind, Then, psycopg_async, psycopg_plain
from support.callers import django_alias
from support.database import one
from support.waiting import wait_until
from support.workers import Jobs, eventually, working
from tallybook import App, Cancel, Constant, Context, Dead, Snooze
from tallybook._db import transactions
from tallybook.errors import ConfigError, NotSupported, SignatureError

pytestmark = pytest.mark.servers

SLOW_BEAT = {"heartbeat": timedelta(seconds=60), "lease": timedelta(seconds=300)}
BEATEN = "select bool_and(seen_at > started_at) from tallybook.worker where ended_at is null"
FOLLOWERS = "select count(*) from tallybook.job where task = 'follow' and state = 'available'"


@pytest.fixture
def app(dsn: str, db: Any) -> App:
    db.execute(TABLE)
    return App("shop", dsn=dsn)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def declare(request: pytest.FixtureRequest, dsn: str) -> Iterator[Kind]:
    if request.param.name != "django":
        yield request.param
        return
    from django.db import connections

    with django_alias(dsn):
        connections["shop"].close()  # this thread's connection; handlers' threads have their own
        yield request.param


def effects(db: Any) -> list[tuple[int, int]]:
    """Return job and attempt of every committed effect."""
    return [(row[0], row[1]) for row in db.execute("select job_id, attempt from effect order by 1, 2")]


# Every library


async def test_writes_follow_up_jobs_and_the_end_commit_together(
    app: App, dsn: str, db: Any, jobs: Jobs, declare: Kind
) -> None:
    """S5-03 P4: the handler's writes, the jobs that it enqueues and its end are one transaction, with every library."""
    seen: list[Any] = []
    # A commit of the effect is refused unless the same transaction ends its job.
    db.execute("""
create function ended() returns trigger language plpgsql as $$
begin
  if tallybook.state(new.job_id) <> 'completed' then raise 'an effect without its end'; end if;
  return null;
end $$;
create constraint trigger ended after insert on effect deferrable initially deferred
  for each row execute function ended()""")

    def look(tx: Any, ctx: Context) -> str:
        with psycopg.connect(dsn, autocommit=True) as other:
            seen.append((effects(other), one(other, FOLLOWERS), app.get(ctx.job_id).sync(other).state))
        return None

    work = declare(app, look)
    async with working(app, dsn, queues="default") as worker:
        (ended,) = await jobs.ends(work.enqueue_sync(db, 1))
        await eventually(lambda: worker.finisher.counts["completed"] == 1, "it is counted")
        assert worker.book.free == {"default": 10}
    assert seen == [([], 0, "running")]
    assert (ended.state, ended.attempts, ended.failures) == ("completed", 1, 0)
    assert (effects(db), one(db, FOLLOWERS)) == ([(ended.id, 1)], 1)


async def test_an_error_rolls_all_of_it_back_and_counts(app: App, dsn: str, db: Any, jobs: Jobs, declare: Kind) -> None:
    """S5-04 S5-06: a failed attempt leaves only its failure, recorded separately; the next one has the only effect."""
    written: list[Any] = []
    locks = "select from pg_locks where relation = 'effect'::regclass and mode = 'RowExclusiveLock' and granted"

    def fail_once(tx: Any, ctx: Context) -> None:
        if ctx.attempt == 1:
            with psycopg.connect(dsn, autocommit=True) as other:
                written.extend(other.execute(locks).fetchall())
            raise ValueError("not yet")

    work = declare(app, fail_once)
    async with working(app, dsn, queues="default"):
        (ended,) = await jobs.ends(work.enqueue_sync(db, 1))
    assert written, "the effect was there to be rolled back"
    assert (ended.state, ended.attempts, ended.failures, ended.last_error) == ("completed", 2, 1, "not yet")
    assert (effects(db), one(db, FOLLOWERS)) == ([(ended.id, 2)], 1)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [(Snooze(timedelta(hours=1)), "scheduled"), (Cancel("enough"), "cancelled"), (Dead("no"), "dead")],
)
@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
async def test_other_ends_commit_when_returned_and_roll_back_when_raised(
    app: App, dsn: str, db: Any, jobs: Jobs, outcome: Any, state: str, raised: bool
) -> None:
    """S5-03: a returned Snooze, Cancel or Dead commits the handler's writes; a raised one is recorded without them."""

    def end(tx: Any, ctx: Context) -> Any:
        if raised:
            raise outcome
        return outcome

    for declare in (psycopg_async, psycopg_plain):
        tasks = App("shop")
        work = declare(tasks, end)
        async with working(tasks, dsn, queues="default") as worker:
            job = work.enqueue_sync(db, 1)
            info = await jobs.becomes(job, state)
            await eventually(lambda: worker.finisher.counts[state] == 1, "it is counted")
            assert worker.book.free == {"default": 10}
        assert [row for row in effects(db) if row[0] == job.id] == ([] if raised else [(job.id, 1)])
        assert info.failures == (1 if state == "dead" else 0)


@pytest.mark.slow
@pytest.mark.direct("rescues by hand between two heartbeats")
async def test_the_stale_workers_commit_is_refused(app: App, dsn: str, db: Any, jobs: Jobs, declare: Kind) -> None:
    """P4 P5 F8: an attempt that was given to another worker commits nothing; the other's effect is the only one."""
    work = declare(app, robbed(dsn))
    async with working(app, dsn, queues="default", **SLOW_BEAT) as worker:
        await eventually(
            lambda: db.execute(BEATEN).fetchone() == (True,), "its first beat, which would find it robbed, is over"
        )
        job = work.enqueue_sync(db, 1)
        await eventually(lambda: worker.finisher.counts["refused"] == 1, "its end is refused")
        assert effects(db) == []
    info = jobs(job)
    assert (info.state, info.attempt, info.crashes) == ("available", 2, 1)
    async with working(app, dsn, queues="default"):
        await jobs.ends(job)
    assert (effects(db), one(db, FOLLOWERS)) == ([(job.id, 2)], 1)


async def test_control_without_the_fence_there_is_a_second_effect(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Negative control: with a `tallybook.complete` that accepts everything, the stale worker's effect exists, too."""
    db.execute("alter table effect drop constraint effect_pkey")
    db.execute(
        "create or replace function tallybook.complete(lease uuid, job_id bigint, attempt int,"
        " result jsonb default null, at timestamptz default clock_timestamp())"
        " returns boolean language sql as"
        " $$ select tallybook.complete_many(array[lease], array[job_id], array[attempt]) is not null $$"
    )
    work = psycopg_async(app, robbed(dsn))
    async with working(app, dsn, queues="default", **SLOW_BEAT):
        await eventually(
            lambda: db.execute(BEATEN).fetchone() == (True,), "its first beat, which would find it robbed, is over"
        )
        job = work.enqueue_sync(db, 1)
        await eventually(lambda: effects(db), "the stale effect is there")
    async with working(app, dsn, queues="default"):
        await jobs.ends(job)
    assert effects(db) == [(job.id, 1), (job.id, 2)]


def robbed(dsn: str) -> Then:
    """Return a handler whose first attempt is rescued while it runs."""

    def then(tx: Any, ctx: Context) -> None:
        if ctx.attempt > 1:
            return
        with psycopg.connect(dsn) as other:  # one transaction, so that the worker's own rescue is too late
            other.execute("update tallybook.worker set seen_at = '-infinity' where ended_at is null")
            lost = "select lost from tallybook.rescue() where lost = 1"
            wait_until(lambda: other.execute(lost).fetchall(), "no claim of the worker is in flight")

    return then


# What a handler must not do


async def test_a_commit_of_the_handlers_own_is_refused(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """P4: commit() on a handler's transaction raises before it commits; the job is dead at once, with a clear error."""

    @app.task(atomic=True)
    async def on_psycopg(tx: psycopg.AsyncConnection[Any]) -> None:
        await tx.execute("insert into effect values (1)")
        await tx.commit()

    @app.task(atomic=True)
    def on_plain(tx: psycopg.Connection[Any]) -> None:
        tx.execute("insert into effect values (2)")
        tx.commit()

    @app.task(atomic=True)
    def on_session(tx: Session) -> None:
        with tx.begin_nested():
            tx.execute(sa.text("insert into effect values (3)"))
        tx.commit()

    @app.task(atomic=True)
    async def on_async_session(tx: AsyncSession) -> None:
        await tx.execute(sa.text("insert into effect values (4)"))
        await tx.commit()

    put = [task.enqueue_sync(db) for task in (on_psycopg, on_plain, on_session, on_async_session)]
    async with working(app, dsn):
        ended = await jobs.ends(*put)
    assert [(info.state, info.attempts) for info in ended] == [("dead", 1)] * 4
    assert all("called commit()" in (info.last_error or "") for info in ended)
    assert effects(db) == []


async def test_leaving_the_transaction_is_found_out(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """P4: COMMIT or ROLLBACK as SQL, even with a BEGIN after it: the job is dead, not completed, with a clear error."""
    left = ["commit", "rollback", "commit; begin", "rollback; begin; select 1"]

    @app.task(atomic=True)
    async def on_psycopg(tx: psycopg.AsyncConnection[Any], text: str) -> None:
        await tx.execute(text)  # type: ignore[call-overload]

    @app.task(atomic=True)
    def on_session(tx: Session, text: str) -> None:
        tx.rollback()

    put = [on_psycopg.enqueue_sync(db, text) for text in left] + [on_session.enqueue_sync(db, "")]
    async with working(app, dsn):
        ended = await jobs.ends(*put)
    assert [(info.state, info.attempts) for info in ended] == [("dead", 1)] * 5
    assert all("has ended the transaction" in (info.last_error or "") for info in ended)


async def test_a_transaction_in_error_fails(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S5-04: a database error that the handler catches fails the attempt, unless it was caught in a savepoint."""

    @app.task(atomic=True, max_attempts=1)
    async def caught(tx: psycopg.AsyncConnection[Any], ctx: Context, savepoint: bool) -> None:
        await tx.execute("insert into effect values (%s)", (ctx.job_id,))
        with contextlib.suppress(psycopg.Error):
            async with tx.transaction() if savepoint else contextlib.nullcontext():
                await tx.execute("select 1/0")

    put = [caught.enqueue_sync(db, False), caught.enqueue_sync(db, True)]
    async with working(app, dsn):
        bad, good = await jobs.ends(*put)
    assert (bad.state, good.state) == ("dead", "completed")
    assert [job for job, _ in effects(db)] == [good.id]


async def test_a_plain_handler_may_raise_what_ends_an_iteration(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """StopIteration in a plain atomic handler is an ordinary failure, with a message about the handler."""

    @app.task(atomic=True, max_attempts=1)
    def ends(conn: psycopg.Connection[Any]) -> None:
        raise StopIteration

    async with working(app, dsn, queues="default"):
        (ended,) = await jobs.ends(ends.enqueue_sync(db))
    assert (ended.state, ended.last_error) == ("dead", "the handler raised StopIteration")


def test_what_an_atomic_task_takes() -> None:
    """S5-03: a task with an unusable signature is refused at its first use, with a clear error."""
    app = App("shop")

    @app.task(atomic=True)
    async def none(n: int) -> None: ...

    @app.task(atomic=True)
    async def context_first(ctx: Context, tx: psycopg.AsyncConnection[Any]) -> None: ...

    @app.task(atomic=True)
    async def plain_in_async(tx: psycopg.Connection[Any]) -> None: ...

    @app.task(atomic=True)
    def async_in_plain(tx: AsyncSession) -> None: ...

    @app.task
    async def not_atomic(tx: psycopg.AsyncConnection[Any]) -> None: ...

    @app.task(atomic="shop")
    async def no_alias(tx: psycopg.AsyncConnection[Any]) -> None: ...

    for task in app.tasks.values():
        with pytest.raises(SignatureError, match=f"task '{task.name}'.*transaction|names a database"):
            task.job()
    with pytest.raises(ConfigError, match="atomic"):
        app.task(atomic="")(none.fn)
    with pytest.raises(ConfigError, match="session"):
        App("shop", session="postgresql://")  # type: ignore[arg-type]


# Cancel, conflicts, connections


async def test_a_cancel_rolls_back(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S5-04: a cancel ends the wait of an async handler and the query of a plain one; nothing is committed.

    The threads that cancel queries end with the worker.
    """

    @app.task(atomic=True)
    async def on_loop(tx: psycopg.AsyncConnection[Any], ctx: Context) -> None:
        await tx.execute("insert into effect values (%s)", (ctx.job_id,))
        await tx.execute("select pg_sleep(60)")

    @app.task(atomic=True)
    def in_thread(tx: psycopg.Connection[Any], ctx: Context) -> None:
        tx.execute("insert into effect values (%s)", (ctx.job_id,))
        tx.execute("select pg_sleep(60)")

    @app.task(atomic=True)
    def in_session(tx: Session, ctx: Context) -> None:
        tx.execute(sa.text("select pg_sleep(60)"))

    async with working(app, dsn) as worker:
        put = [task.enqueue_sync(db) for task in (on_loop, in_thread, in_session)]
        sleeping = (
            "select count(*) = 3 from pg_stat_activity"
            " where query like '%pg_sleep%' and state = 'active' and pid <> pg_backend_pid()"
            " and datname = current_database()"
        )
        await eventually(lambda: db.execute(sleeping).fetchone()[0], "all run")
        for job in put:
            app.cancel(job, "not wanted").sync(db)
        ended = await jobs.ends(*put)
        assert [(info.state, info.reason) for info in ended] == [("cancelled", "not wanted")] * 3
        await eventually(lambda: worker.book.free == {"default": 10}, "the slots are free")
        assert not db.execute(sleeping).fetchone()[0]
    assert effects(db) == []
    names = "tallybook-interrupt"
    await eventually(lambda: not any(thread.name.startswith(names) for thread in threading.enumerate()), "they end")


@pytest.mark.parametrize("how", ["refused", "late", "deadline"])
async def test_a_stopped_attempt_does_not_start_its_handler(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A plain handler does not run if a cancel or the deadline comes while its thread waits for a connection."""
    began, go_on, ran = threading.Event(), threading.Event(), []
    begin = transactions.Psycopg.begin

    async def slow(library: Any) -> Any:
        began.set()
        if how == "refused":
            raise psycopg.OperationalError("connection refused")
        go_on.wait(20)
        return await begin(library)

    monkeypatch.setattr(transactions.Psycopg, "begin", slow)

    @app.task(atomic=True, timeout="200 ms" if how == "deadline" else None, retry=Constant(timedelta(hours=1)))
    def plain(tx: psycopg.Connection[Any], ctx: Context) -> None:
        ran.append(ctx.job_id)

    async with working(app, dsn) as worker:
        job = plain.enqueue_sync(db)
        await eventually(began.is_set, "it waits for a connection")
        running = worker.book.running[job.id]
        if how != "deadline":
            app.cancel(job, "not wanted").sync(db)
        await eventually(lambda: running.cancel_reason or (running.guard and running.guard.timed_out), "it is stopped")
        go_on.set()
        info = await jobs.becomes(job, "cancelled", "retrying", "completed")
        assert (info.state, ran) == ("retrying" if how == "deadline" else "cancelled", [])
        await eventually(lambda: worker.book.free == {"default": 10}, "its slot is free")


async def test_a_conflict_runs_the_handler_again_at_once(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """F18 F19: after 40001 or 40P01 the handler runs again in the same attempt, with fresh args; at most four runs."""
    ran: list[Any] = []

    @app.task(atomic=True, max_attempts=1)
    async def on_loop(tx: psycopg.AsyncConnection[Any], ctx: Context, items: list[int], times: int) -> None:
        ran.append([*items, ctx.attempt])
        items.append(9)
        await tx.execute("insert into effect values (%s)", (ctx.job_id,))
        if sum(1 for run in ran if run[0] == items[0]) <= times:
            await tx.execute("do $$ begin raise 'conflict' using errcode = '40001'; end $$")

    @app.task(atomic=True, max_attempts=1)
    def in_thread(tx: psycopg.Connection[Any], items: list[int]) -> None:
        ran.append(items)
        if len(ran) == 1:
            tx.execute("do $$ begin raise 'conflict' using errcode = '40P01'; end $$")

    async with working(app, dsn):
        ended = await jobs.ends(on_loop.enqueue_sync(db, [1], 2))
        assert (ended[0].state, ended[0].failures, ran) == ("completed", 0, [[1, 1]] * 3)
        ran.clear()
        ended = await jobs.ends(on_loop.enqueue_sync(db, [2], 9))
        assert (ended[0].state, len(ran)) == ("dead", 4)
        ran.clear()
        ended = await jobs.ends(in_thread.enqueue_sync(db, [3]))
        assert (ended[0].state, ran) == ("completed", [[3], [3]])
    assert len(effects(db)) == 1


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_the_handler_chooses_the_isolation_level(app: App, dsn: str, db: Any, jobs: Jobs, level: str) -> None:
    """S5-03 F19: a handler may set the level in its first statement; otherwise it is READ COMMITTED."""
    found: list[str] = []

    @app.task(atomic=True)
    async def set_level(tx: psycopg.AsyncConnection[Any], ctx: Context) -> None:
        await tx.execute(psycopg.sql.SQL("set transaction isolation level {}").format(psycopg.sql.SQL(level)))
        await tx.execute("insert into effect values (%s)", (ctx.job_id,))
        found.extend(await (await tx.execute("show transaction_isolation")).fetchone() or ())

    @app.task(atomic=True)
    async def plain(tx: psycopg.AsyncConnection[Any]) -> None:
        found.extend(await (await tx.execute("show transaction_isolation")).fetchone() or ())

    async with working(app, dsn):
        for task in (set_level, plain):
            assert (await jobs.ends(task.enqueue_sync(db)))[0].state == "completed"
    assert found == [level, "read committed"]


@pytest.mark.direct("looks at the session that a worker keeps for its handlers")
async def test_a_connection_is_kept_and_clean(app: App, dsn: str, db: Any, jobs: Jobs, declare: Kind) -> None:
    """S5-03: the next job gets the same connection (except with Django), and no transaction is left open."""
    seen: list[set[int]] = []
    in_transaction: LiteralString = (  # in this database: other tests use the same server
        "select pid from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'"
    )

    def look(tx: Any, ctx: Context) -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            seen.append({pid for (pid,) in other.execute(in_transaction).fetchall()})

    work = declare(app, look)
    async with working(app, dsn, queues={"default": 1}) as worker:
        for n in range(3):
            await jobs.ends(work.enqueue_sync(db, n))
            await eventually(lambda: worker.book.free == {"default": 1}, "its slot is free")
    assert len(seen) == 3 and all(seen)
    if declare.name != "django":  # its own settings decide, and here it keeps none
        assert set.intersection(*seen), "one session in all three; a service's may be in one of them, for a moment"
    await eventually(lambda: db.execute(in_transaction).fetchall() == [], "no transaction is left open")


@pytest.mark.direct("ends the session that a worker keeps for its handlers")
async def test_a_connection_that_is_lost_costs_one_attempt(
    app: App, dsn: str, db: Any, jobs: Jobs, declare: Kind
) -> None:
    """S5-03: with every library, a session that ends before the commit fails this attempt only, not those after it."""
    lost: list[int] = []

    def lose(tx: Any, ctx: Context) -> None:
        if not lost:
            with psycopg.connect(dsn, autocommit=True) as other:
                # Not in the condition: PostgreSQL may evaluate that for the sessions of other databases, too.
                lost.extend(
                    pid
                    for pid, _ in other.execute(
                        "select pid, pg_terminate_backend(pid) from pg_stat_activity"
                        " where datname = current_database() and state like 'idle in transaction%'"
                    )
                )

    work = declare(app, lose)
    async with working(app, dsn, queues={"default": 1}):
        for n in range(2):
            assert (await jobs.ends(work.enqueue_sync(db, n)))[-1].state == "completed"
    assert lost and len(effects(db)) == 2


@pytest.mark.direct("looks at the session that a worker keeps for its handlers")
@pytest.mark.parametrize("library", ["psycopg", "session", "async session"])
async def test_what_a_job_has_set_is_gone_for_the_next(app: App, dsn: str, db: Any, jobs: Jobs, library: str) -> None:
    """S5-03: a job's settings, row factory and session locks are gone for the next job on its connection."""
    found: list[Any] = []
    look = (
        "select pg_backend_pid(), coalesce(current_setting('app.tenant', true), ''),"
        " (select count(*) from pg_locks where locktype = 'advisory' and objid = 77 and pid = pg_backend_pid())"
    )
    leave = "select set_config('app.tenant', 'acme', false), pg_advisory_lock(77)"

    @app.task(atomic=True, name="psycopg")
    async def on_psycopg(tx: psycopg.AsyncConnection[Any]) -> None:
        found.append(await (await tx.execute(look)).fetchone())
        await tx.execute(leave)
        tx.row_factory = psycopg.rows.dict_row

    @app.task(atomic=True, name="session")
    def on_session(tx: Session) -> None:
        found.append(tuple(tx.execute(sa.text(look)).one()))
        tx.execute(sa.text(leave))

    @app.task(atomic=True, name="async session")
    async def on_async_session(tx: AsyncSession) -> None:
        found.append(tuple((await tx.execute(sa.text(look))).one()))
        await tx.execute(sa.text(leave))

    async with working(app, dsn) as worker:
        for _ in range(2):
            await jobs.ends(app.tasks[library].enqueue_sync(db))
            await eventually(lambda: worker.book.free == {"default": 10}, "its slot is free")
    assert found == [(found[0][0], "", 0)] * 2


async def test_sessions_of_the_users_own(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S5-03: App(session=...) takes one or two session makers; a task whose kind has none fails with a clear error."""
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    other = create_async_engine("postgresql+psycopg://", async_creator=lambda: psycopg.AsyncConnection.connect(dsn))
    mine, async_mine = sessionmaker(engine, info={"mine": 1}), async_sessionmaker(other, info={"mine": 2})
    found: list[Any] = []

    for session, state in (((mine, async_mine), "completed"), (mine, "dead")):
        tasks = App("shop", session=session)

        @tasks.task(atomic=True)
        def plain(tx: Session) -> None:
            found.append(tx.info["mine"])

        @tasks.task(atomic=True, max_attempts=1)
        async def on_loop(tx: AsyncSession) -> None:
            found.append(tx.info["mine"])

        async with working(tasks, dsn):
            one, two = await jobs.ends(plain.enqueue_sync(db), on_loop.enqueue_sync(db))
        assert (one.state, two.state) == ("completed", state)
    assert sorted(found) == [1, 1, 2]
    assert "requires an AsyncSession" in (two.last_error or "")
    engine.dispose()
    await other.dispose()


async def test_a_session_of_another_database_fails(app: App, dsn: str, db: Any, empty_dsn: str, jobs: Jobs) -> None:
    """P4: an attempt in another database, without the job, fails; the job does not stay running for ever."""
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(empty_dsn))
    tasks = App("shop", session=sessionmaker(engine))

    @tasks.task(atomic=True, max_attempts=1)
    def plain(tx: Session) -> None: ...

    async with working(tasks, dsn):
        (ended,) = await jobs.ends(plain.enqueue_sync(db))
    assert ended.state == "dead" and "tallybook" in (ended.last_error or "")
    engine.dispose()


async def test_hooks_and_drain_serve_atomic_tasks(app: App, db: Any) -> None:
    """S5-03: around_job surrounds the whole transaction, drain counts the job, and ctx.complete raises NotSupported."""
    told: list[Any] = []

    @app.around_job
    async def around(ctx: Context) -> Any:
        told.append(effects(db))
        yield
        told.append(effects(db))

    @app.task(atomic=True)
    async def work(tx: psycopg.AsyncConnection[Any], ctx: Context) -> None:
        await tx.execute("insert into effect values (1, 1)")
        with pytest.raises(NotSupported):
            await ctx.complete(tx)

    work.enqueue_sync(db)
    done = await app.drain()
    assert (done.completed, told) == (1, [[], [(1, 1)]])


async def test_results_and_order_keys_go_with_the_transaction(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S5-03: an atomic handler's return value is its result; the next job of its order key starts after the commit."""
    ran: list[tuple[int, int]] = []

    @app.task(atomic=True)
    async def on_loop(tx: psycopg.AsyncConnection[Any], n: int) -> dict[str, int]:
        await tx.execute("insert into effect values (%s)", (n,))
        ran.append((n, len(effects(db))))
        return {"n": n}

    @app.task(atomic=True)
    def in_thread(tx: psycopg.Connection[Any]) -> Any:
        return object()

    @app.task
    async def itself(ctx: Context) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await ctx.complete(conn, result=[1, 2])

    put = app.enqueue_many_sync(db, [on_loop.with_(order_key="k").job(n) for n in range(5)])
    async with working(app, dsn):
        odd, own = in_thread.enqueue_sync(db), itself.enqueue_sync(db)
        ended = await jobs.ends(*put, odd, own)
        assert [await app.result(job) for job in put] == [{"n": n} for n in range(5)]
        assert await app.result(own) == [1, 2]
    assert [info.state for info in ended] == ["completed"] * 7
    assert ran == [(n, n) for n in range(5)]
    row = db.execute("select error ->> 'message' from tallybook.outcome where error is not null").fetchone()
    assert row[0].startswith("its result was not kept")
