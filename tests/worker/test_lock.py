"""`ctx.lock`: one handler at a time holds a name, on real workers, until its block or its session ends."""

import asyncio
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from support import zoo
from support.pooler import PACKAGE, installed
from support.workers import Jobs, eventually, working
from tallybook import App, Context
from tallybook._worker.run.verbs import Lock
from tallybook.errors import ConfigError

pytestmark = pytest.mark.direct("a lock is a session's")


def locks(db: Any) -> list[int]:
    held = (
        "select pid from pg_locks where locktype = 'advisory' and classid = 1413565450 and granted"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    return [pid for (pid,) in db.execute(held).fetchall()]


async def test_one_has_it_until_its_session_ends(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """S2-05: one of two has it; a handler that does not wait fails, a waiting one gets it once the session dies."""
    gate, began = asyncio.Event(), list[str]()

    @app.task(max_attempts=1)
    async def post(ctx: Context, name: str, wait: str | None = None) -> None:
        async with ctx.lock("ledger", wait=wait):
            began.append(name)
            await gate.wait()

    async with working(app, dsn, {"default": 2}), working(app, dsn, {"default": 2}):
        first = post.enqueue_sync(db, "first")
        await eventually(lambda: began, "the first has it")
        hasty = await jobs.becomes(post.enqueue_sync(db, "hasty", "0 s"), "dead")
        assert "the lock 'ledger' was not free within 0 s" in str(hasty.errors)
        second = post.enqueue_sync(db, "second")
        await jobs.becomes(second, "running")
        (pid,) = locks(db)
        assert began == ["first"]
        db.execute("select pg_terminate_backend(%s)", (pid,))
        await eventually(lambda: began == ["first", "second"], "the second has it")
        gate.set()
        assert {info.state for info in await jobs.ends(first, second)} == {"completed"}
        await eventually(lambda: not locks(db), "it is free")
    assert "lock 'ledger' was lost with its session" in caplog.text


@pytest.mark.parametrize("broken", [False, True], ids=["", "control"])
async def test_plain_handlers_take_turns(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """S2-14: plain handlers in one process exclude each other, one that raises unlocks; control: else they meet."""
    if broken:
        monkeypatch.setattr("tallybook._worker.run.verbs._TAKE", "select true, %s::text")
    inside, met = list[int](), threading.Event()

    @app.task(max_attempts=1)
    def post(ctx: Context) -> None:
        with ctx.lock("ledger"):
            inside.append(ctx.job_id)
            if len(inside) > 1:
                met.set()
            met.wait(5 if broken else 0.05)
            inside.remove(ctx.job_id)
            raise ValueError("it fails inside")

    async with working(app, dsn, {"default": 3}):
        ends = await jobs.ends(*app.enqueue_many_sync(db, [post.job() for _ in range(3)]))
    assert {info.errors[0]["type"] for info in ends} == {"ValueError"}
    assert met.is_set() is broken
    await eventually(lambda: not locks(db), "it is free")


async def test_a_job_that_is_cancelled_waits_no_more(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-05: a cancel ends a plain handler that waits for a lock, and an async one."""
    db.execute("select pg_advisory_lock(1413565450, hashtext('ledger'))")
    waits = list[int]()

    @app.task
    def plain(ctx: Context) -> None:
        waits.append(ctx.job_id)
        with ctx.lock("ledger"):
            raise AssertionError("it was taken")

    @app.task
    async def other(ctx: Context) -> None:
        waits.append(ctx.job_id)
        async with ctx.lock("ledger"):
            raise AssertionError("it was taken")

    async with working(app, dsn):
        put = [plain.enqueue_sync(db).id, other.enqueue_sync(db).id]
        await eventually(lambda: len(waits) == 2, "both wait")
        for job in put:
            app.cancel(job).sync(db)
        assert {info.state for info in await jobs.ends(*put)} == {"cancelled"}


@pytest.mark.skipif(not installed(), reason=f"not installed: {PACKAGE}")
@pytest.mark.parametrize("direct", [False, True])
async def test_a_pooler_is_no_session(app: App, dsn: str, pooled: str, db: Any, jobs: Jobs, direct: bool) -> None:
    """S2-05 F40: through a pooler in transaction mode a lock is refused; with a direct DSN it bypasses the pooler."""

    @app.task(max_attempts=1)
    async def post(ctx: Context) -> None:
        async with ctx.lock("ledger", wait=timedelta(0)):
            assert len(locks(db)) == 1

    job = post.enqueue_sync(db)
    async with working(app, pooled, lease=timedelta(seconds=30), direct_dsn=dsn if direct else None):
        (info,) = await jobs.ends(job)
    refused = "ctx.lock behind a pooler in transaction mode"
    assert (info.state, refused in str(info.errors)) == (("completed", False) if direct else ("dead", True))


async def test_where_there_is_no_lock_of_its_own(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-05: ctx.lock is an error in an atomic task, which names what to call, and in a process of its own."""

    @app.task(atomic=True, max_attempts=1)
    async def written(tx: psycopg.AsyncConnection[Any], ctx: Context) -> None:
        async with ctx.lock("ledger"):
            raise AssertionError("it was taken")

    locked = app.task(process=True, max_attempts=1)(zoo.locked)
    async with working(app, dsn):
        atomic, apart = await jobs.ends(written.enqueue_sync(db), locked.enqueue_sync(db))
    assert "Call pg_advisory_xact_lock in its transaction" in str(atomic.errors)
    assert "ctx.lock in a process of its own" in str(apart.errors)


@pytest.mark.parametrize(
    ("name", "wait", "words"), [("", None, "1 to 200 bytes"), ("a", "soon", "wait"), ("a", 5, "wait")]
)
def test_a_wrong_lock_is_refused(name: str, wait: Any, words: str) -> None:
    """S2-05: an invalid name, and a wait that is no duration, are errors at the call."""
    with pytest.raises(ConfigError, match=words):
        Lock(None, name, wait, "")
