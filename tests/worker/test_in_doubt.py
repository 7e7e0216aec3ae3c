"""Ends with an unknown outcome: a connection lost at COMMIT, and `ctx.complete` in a handler's own transaction."""

import asyncio
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from support.atomic_kinds import TABLE, psycopg_async
from support.broken import without
from support.workers import Jobs, eventually, given_up, working
from tallybook import App, Complete, Constant, Context, Drop, Kill, Reject, Reschedule, Snooze
from tallybook._db.transactions import Begun, Psycopg
from tallybook.errors import LeaseLost, NotSupported

LOST = psycopg.OperationalError("the connection is lost")


@pytest.fixture
def app(dsn: str, db: Any) -> App:
    db.execute(TABLE)
    return App("shop", dsn=dsn)


def attempts(db: Any) -> list[int]:
    return [row[0] for row in db.execute("select attempt from effect order by 1")]


# A connection that is lost at COMMIT


@pytest.mark.parametrize("when", ["before", "after", "late"])
async def test_a_connection_lost_at_commit(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """P4 F7: whether the COMMIT arrived, was lost, or is still on its way, the effect and the end exist once."""
    commits: list[Any] = []
    commit = Psycopg.commit

    async def cut(self: Psycopg, begun: Begun) -> None:
        if commits:
            return await commit(self, begun)
        commits.append(begun.handle)
        if when == "after":
            await commit(self, begun)
        if when == "late":  # the server is still committing when the worker asks
            monkeypatch.setattr(Psycopg, "drop", keep_open)
            commits.append(asyncio.create_task(commit_late(begun)))
        raise LOST

    async def keep_open(self: Psycopg, begun: Begun) -> None:
        monkeypatch.undo()

    async def commit_late(begun: Begun) -> None:
        def waits() -> Any:
            return db.execute(
                "select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            ).fetchall()

        await eventually(waits, "the worker's own end meets it")
        await psycopg.AsyncConnection.commit(begun.handle)
        await begun.handle.close()

    monkeypatch.setattr(Psycopg, "commit", cut)
    work = psycopg_async(app, lambda tx, ctx: None)
    async with working(app, dsn, queues="default") as worker:
        job = work.enqueue_sync(db, 1)
        (ended,) = await jobs.ends(job)
        await eventually(lambda: worker.finisher.counts["completed"] == 1, "it is counted as completed, once")
        await worker.finisher.drained()
        assert worker.finisher.counts["refused"] == 0
    if when == "before":
        assert (ended.failures, ended.last_error, attempts(db)) == (1, str(LOST), [2])
    else:
        assert (ended.failures, ended.attempts, attempts(db)) == (0, 1, [1])


async def test_control_a_blind_second_end_is_refused(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: if the fence forgets, the job whose COMMIT arrived runs again and has two effects."""
    db.execute("alter table effect drop constraint effect_pkey")
    for name in ("brief", "default", "long"):
        db.execute(f'drop index tallybook."an attempt of {name} ends once"')
    db.execute(
        "create or replace function tallybook.ended(lease uuid, job_id bigint, attempt int) returns text"
        " language sql as $$ select 'running' $$"
    )
    without(db, "_end", "on conflict do nothing")
    commit = Psycopg.commit
    cuts: list[int] = []

    async def cut(self: Psycopg, begun: Begun) -> None:
        await commit(self, begun)
        if not cuts:
            cuts.append(1)
            raise LOST

    monkeypatch.setattr(Psycopg, "commit", cut)
    work = psycopg_async(app, lambda tx, ctx: None)
    async with working(app, dsn, queues="default"):
        work.enqueue_sync(db, 1)
        await eventually(lambda: attempts(db) == [1, 2], "the second effect shows")


@pytest.mark.direct("kills a session by its process")
async def test_a_connection_that_dies_in_the_handler_is_a_failure(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """F6 S5-06: a backend terminated under the handler is an ordinary failure, retried on a new connection."""

    def die_once(tx: Any, ctx: Context) -> None:
        if ctx.attempt == 1:
            with psycopg.connect(dsn, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s, 5000)", (tx.info.backend_pid,))

    work = psycopg_async(app, die_once)
    async with working(app, dsn, queues="default"):
        (ended,) = await jobs.ends(work.enqueue_sync(db, 1))
    assert (ended.state, ended.attempts, ended.failures, attempts(db)) == ("completed", 2, 1, [2])


async def test_idle_connections_that_died_cost_no_attempt(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """F6: connections that died while nothing ran are replaced before a handler starts."""
    work = psycopg_async(app, lambda tx, ctx: None)
    async with working(app, dsn, queues="default"):
        await jobs.ends(*[work.enqueue_sync(db, n) for n in range(5)])
        db.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where pid <> pg_backend_pid() and datname = current_database()"
        )
        ended = await jobs.ends(*[work.enqueue_sync(db, n) for n in range(5)])
    assert [(info.state, info.failures) for info in ended] == [("completed", 0)] * 5


# ctx.complete


async def test_a_handler_that_chooses_the_moment(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S5-03 P4: ctx.complete is part of the handler's own transaction; nothing after the commit changes the end."""
    seen: list[str] = []

    @app.task
    async def on_loop(ctx: Context, then: str) -> Any:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await conn.execute("insert into effect values (%s, %s)", (ctx.job_id, ctx.attempt))
            await ctx.complete(conn)
            seen.append(app.get(ctx.job_id).sync(db).state)
        if then == "raise":
            raise ValueError("after the commit")
        return Snooze(timedelta(hours=1)) if then == "snooze" else None

    @app.task
    def in_thread(ctx: Context, then: str) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("insert into effect values (%s, %s)", (ctx.job_id, ctx.attempt))
            ctx.complete_sync(conn)

    put = [on_loop.enqueue_sync(db, then) for then in ("return", "raise", "snooze")] + [in_thread.enqueue_sync(db, "")]
    async with working(app, dsn) as worker:
        ended = await jobs.ends(*put)
        await eventually(lambda: worker.finisher.counts["completed"] == 4, "all are counted as completed")
        assert worker.book.free == {"default": 10} and not worker.book.leases
    assert seen == ["running"] * 3
    assert [(info.state, info.attempts, info.failures) for info in ended] == [("completed", 1, 0)] * 4
    assert attempts(db) == [1] * 4


async def test_a_completion_that_was_rolled_back_is_a_failure(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S5-06: a handler that returns without committing its completion fails, with a clear error, and runs again."""

    @app.task(retry=Constant(timedelta(0)))
    async def work(ctx: Context) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await conn.execute("insert into effect values (%s, %s)", (ctx.job_id, ctx.attempt))
            await ctx.complete(conn)
            if ctx.attempt == 1:
                await conn.rollback()

    async with working(app, dsn):
        (ended,) = await jobs.ends(work.enqueue_sync(db))
    assert (ended.state, ended.failures, attempts(db)) == ("completed", 1, [2])
    assert "ctx.complete is not committed" in (ended.last_error or "")


async def test_a_completion_left_open_holds_up_nobody_else(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """P4: while a transaction with a completion stays open, other jobs end as usual; this one ends at its commit.

    A warning names the open transaction; it is no outage.
    """
    open_one: list[Any] = []

    @app.task(retry=Constant(timedelta(0)))
    async def forgets(ctx: Context) -> None:
        if not open_one:
            open_one.append(await psycopg.AsyncConnection.connect(dsn))
            await ctx.complete(open_one[0])

    @app.task(max_attempts=1)
    async def fails() -> None:
        raise ValueError

    async with working(app, dsn) as worker:
        job = forgets.enqueue_sync(db)
        await eventually(lambda: open_one and not worker.book.running, "the handler is over")
        for _ in range(3):
            await jobs.ends(fails.enqueue_sync(db))
        assert jobs(job).state == "running"
        await eventually(lambda: "its end waits for an open transaction" in caplog.text, "it is told")
        assert worker.finisher.doubtful._link.errors == 0
        await open_one[0].commit()
        (ended,) = await jobs.ends(job)
        assert (ended.state, ended.attempts) == ("completed", 1)
        await open_one[0].close()


@pytest.mark.direct("rescues by hand between two heartbeats")
async def test_a_completion_of_a_lost_attempt_is_refused(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """P5 F8: ctx.complete raises LeaseLost if the job was rescued, and the handler's writes are rolled back."""
    told: list[Any] = []
    go_on = threading.Event()

    @app.task
    def work(ctx: Context) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("insert into effect values (%s, %s)", (ctx.job_id, ctx.attempt))
            if ctx.attempt == 1:
                go_on.wait(10)
            try:
                ctx.complete_sync(conn)
            except LeaseLost as error:
                told.append((error.job, error.attempt))
                raise

    slow = {"heartbeat": timedelta(seconds=60), "lease": timedelta(seconds=300)}
    async with working(app, dsn, **slow) as worker:
        job = work.enqueue_sync(db)
        await jobs.becomes(job, "running")
        await eventually(lambda: worker.book.running, "it runs")
        await given_up(db, worker.heartbeat.worker_id)
        go_on.set()
        await eventually(lambda: worker.finisher.counts["refused"] == 1, "its end is refused")
    assert (told, attempts(db)) == ([(job.id, 1)], [])
    async with working(app, dsn):
        (ended,) = await jobs.ends(job)
    assert (ended.state, ended.crashes, ended.failures, attempts(db)) == ("completed", 1, 0, [2])


# ctx.end


async def test_a_subject_is_rescheduled_in_its_handlers_own_transaction(app: App, dsn: str, db: Any) -> None:
    """S3-07 S3-28: each end of an iteration is part of the handler's transaction; nothing after the commit matters."""
    db.execute("alter table effect drop constraint effect_pkey")
    ends = {
        "later": Reschedule("+1 week", args={"how": "later", "page": 2}), "done": Complete(), "gone": Drop(),
        "never": Kill("forbidden"), "late": Reschedule("+1 week"), "now": Reschedule("0 s", args={"how": "done"}),
    }  # fmt: skip
    seen: list[str] = []

    @app.task
    async def crawl(ctx: Context, how: str, page: int = 1) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await conn.execute("insert into effect values (%s, %s)", (ctx.job_id, ctx.attempt))
            await ctx.end(conn, ends[how])
            seen.append(app.get(ctx.job_id).sync(db).state)
        if how == "late":
            raise ValueError("after the commit")

    app.subjects.push_many([crawl.subject(how).job(how) for how in ends]).sync(db)
    async with working(app, dsn) as worker:
        await eventually(lambda: len(attempts(db)) == 7, "all have ended, one of them twice")
        await eventually(lambda: worker.book.free == {"default": 10} and not worker.book.leases, "the worker knows")
        counted = {name: n for name, n in worker.finisher.counts.items() if n}
    found = {how: crawl.subject(how).get().sync(db) for how in ends}
    states = {how: info and (info.state, info.iterations, info.failures) for how, info in found.items()}
    assert states == {
        "later": ("planned", 1, 0), "done": ("completed", 1, 0), "gone": None, "never": ("killed", 1, 0),
        "late": ("planned", 1, 0), "now": ("completed", 2, 0),
    }  # fmt: skip
    assert found["later"] is not None and found["later"].args == {"how": "later", "page": 2}
    assert seen == ["running"] * 7 and attempts(db) == [1] * 6 + [2]
    assert counted == {"scheduled": 2, "available": 1, "completed": 3, "dead": 1}


async def test_an_iteration_whose_end_was_rolled_back_has_failed(app: App, dsn: str, db: Any) -> None:
    """S3-07: a handler that returns without committing its Reschedule fails, which is counted, and runs again."""

    @app.task(retry=Constant(timedelta(0)))
    async def crawl(ctx: Context) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await conn.execute("insert into effect values (%s, %s)", (ctx.job_id, ctx.attempt))
            await ctx.end(conn, Reschedule("+1 week"))
            if ctx.attempt == 1:
                await conn.rollback()

    subject = crawl.subject("a")
    subject.push().sync(db)
    async with working(app, dsn) as worker:
        await eventually(lambda: attempts(db) == [2], "the second attempt has committed")
        await eventually(lambda: worker.finisher.counts["scheduled"] == 1, "its end is known")
    info = subject.get().sync(db)
    assert info is not None and (info.state, info.iterations) == ("planned", 1)
    failed = db.execute("select message from tallybook.error where task = 'crawl'").fetchall()
    assert len(failed) == 1 and "ctx.end is not committed" in failed[0][0]


async def test_what_cannot_be_ended_so_is_refused(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S3-40: ctx.end refuses a Reject, and any end of an ordinary job."""
    refused: list[str] = []

    @app.task(max_attempts=1)
    async def work(ctx: Context, how: str) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            try:
                outcome = Reject("502") if how == "reject" else Reschedule("+1 week")
                await ctx.end(conn, outcome)  # type: ignore[arg-type]
            except NotSupported as error:
                refused.append(str(error))

    work.subject("a").push("reject").sync(db)
    async with working(app, dsn):
        (ended,) = await jobs.ends(work.enqueue_sync(db, "plain"))
        await eventually(lambda: refused, "the other one has run, too")
    assert (ended.state, ended.last_error and "is not a subject" in ended.last_error) == ("dead", True)
    assert "ctx.end with Reject" in refused[0]
