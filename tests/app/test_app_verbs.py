"""A verb can be awaited, run on a connection, or run without an event loop; an App shows few names."""

import asyncio
import gc
from typing import Any

import psycopg
import pytest

from tallybook import App
from tallybook.errors import ConnectionNotSupported, InvalidArgument, NotSupported, SignatureError, UnknownQueue

NOUNS = (
    "audit breakers concurrency_limits counts dead doctor events history jobs nodes providers queues rate_limits"
    " schedules services subjects"
)


@pytest.fixture
def shop(dsn: str) -> App:
    """An app with a task in the queue mail."""
    app = App("shop", dsn=dsn)

    @app.task(queue="mail")
    async def send(user_id: int) -> None: ...

    return app


def put(app: App, n: int = 1) -> list[int]:
    """Enqueue this many jobs of the task."""
    with psycopg.connect(app.conninfo()) as conn:
        return [job.id for job in app.enqueue_many_sync(conn, [app.tasks["send"].job(at) for at in range(n)])]


def test_an_app_shows_few_names() -> None:
    """dir(App) has at most 40 names, at most 22 of them verbs: those for daily use."""
    verbs = (
        "task include lifespan around_job retry_policy schedule rate_limit concurrency_limit breaker open run_worker"
        " drain enqueue_many enqueue_many_sync get result cancel retry conninfo"
    )
    shown = {name for name in dir(App("x")) if not name.startswith("_")}
    assert shown == {*verbs.split(), *NOUNS.split(), "name", "dsn", "tasks"}
    assert len(shown) <= 40
    assert len(verbs.split()) <= 22


def test_each_noun_is_what_the_command_line_calls_it(shop: App) -> None:
    """A noun shows verbs only, and its repr names its app."""
    for name in set(NOUNS.split()) - {"providers"}:
        noun = getattr(shop, name)
        assert all(callable(getattr(noun, verb)) for verb in dir(noun) if not verb.startswith("_"))
        assert "shop" in repr(noun)


async def test_a_verb_is_awaited_gathered_or_made_a_task(shop: App) -> None:
    """An awaited verb runs in a short transaction of the app's own; gather and create_task accept it."""
    put(shop)
    assert await shop.queues.pause("mail", by="ada")
    assert not await asyncio.create_task(shop.queues.pause("mail"))
    assert await asyncio.gather(shop.queues.resume("mail"), shop.queues.set("slow")) == [True, "created"]


async def test_a_verb_of_the_callers_transaction(shop: App, dsn: str) -> None:
    """On a connection a verb is part of the transaction: a rollback undoes it."""
    put(shop)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        assert await shop.queues.pause("mail").on(conn)
        await conn.rollback()
    assert [queue.paused_by for queue in await shop.queues.list()] == [None]


def test_a_verb_without_an_event_loop(shop: App, db: psycopg.Connection[Any]) -> None:
    """sync() runs in its own transaction, sync(conn) in the caller's."""
    (job,) = put(shop)
    assert shop.cancel(job, "withdrawn").sync(db) == "cancelled"
    assert shop.jobs.state(job).sync() == "cancelled"


async def test_verbs_of_several_statements_have_all_forms(shop: App, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncate in batches gives the same result awaited, on a connection, and without an event loop."""
    monkeypatch.setattr("tallybook._app.queues.BATCH", 2)
    batches: list[int] = []
    put(shop, 5)
    assert (await shop.queues.truncate("mail", on_batch=batches.append)).cancelled == 5
    put(shop, 5)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        assert (await shop.queues.truncate("mail", on_batch=batches.append).on(conn)).cancelled == 5
        await conn.commit()
    put(shop, 5)
    done = await asyncio.to_thread(lambda: shop.queues.truncate("mail", on_batch=batches.append).sync())
    assert done.cancelled == 5
    assert [cancelled for cancelled in batches if cancelled] == [2, 2, 1] * 3


async def test_an_error_of_a_later_statement_reaches_the_caller(shop: App) -> None:
    """An error in a statement of a longer verb is raised where the verb was awaited."""
    with pytest.raises(UnknownQueue):
        await shop.queues.truncate("nobody")
    with pytest.raises(UnknownQueue):
        await asyncio.to_thread(lambda: shop.queues.truncate("nobody").sync())


def test_a_verb_that_nobody_runs_warns(shop: App) -> None:
    """A verb that is never run warns with its name, like a coroutine."""
    with pytest.warns(RuntimeWarning, match=r"pause was never awaited"):
        shop.queues.pause("mail")
        gc.collect()


async def test_a_verb_is_used_once(shop: App) -> None:
    """Like a coroutine, a verb raises an error on its second use, and does nothing then."""
    put(shop)
    verb = shop.queues.pause("mail")
    assert await verb
    assert await shop.queues.resume("mail")
    with pytest.raises(RuntimeError, match="reuse"):
        await verb
    assert not await shop.queues.resume("mail")


@pytest.mark.direct("a pooler reports the encoding of its own connections")
def test_a_connection_that_declares_no_encoding_answers_in_text(shop: App, dsn: str) -> None:
    """With the client_encoding SQL_ASCII, for which psycopg returns texts as bytes, verbs return the same as always."""
    (job,) = put(shop)
    with psycopg.connect(dsn, client_encoding="sql_ascii") as conn:
        assert conn.execute("select 'x'::text").fetchone() == (b"x",)
        assert shop.jobs.state(job).sync(conn) == "available"
        assert shop.cancel(job).sync(conn) == "cancelled"


async def test_a_connection_of_the_other_kind_is_refused(shop: App, db: psycopg.Connection[Any], dsn: str) -> None:
    """.on() refuses a plain connection, .sync() an async one, and doctor.run() one of the caller's."""
    put(shop)
    with pytest.raises(ConnectionNotSupported):
        await shop.queues.pause("mail").on(db)  # type: ignore[arg-type]
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        with pytest.raises(ConnectionNotSupported):
            shop.queues.pause("mail").sync(conn)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="needs its own connection"):
            await shop.doctor.run().on(conn)
    plain = await asyncio.to_thread(lambda: shop.doctor.run().sync())
    assert [found.name for found in await shop.doctor.run()] == [found.name for found in plain]


def test_an_enqueue_where_no_loop_runs_names_the_other_one(shop: App) -> None:
    """enqueue outside an event loop raises an error that names enqueue_sync."""
    with pytest.raises(NotSupported, match="enqueue_sync"):
        shop.tasks["send"].enqueue(shop, 42)
    with pytest.raises(NotSupported, match="enqueue_sync"):
        shop.tasks["send"].with_(priority=1).enqueue(shop, 42)


async def test_a_sync_verb_of_the_apps_own_inside_a_loop_says_await(shop: App, db: psycopg.Connection[Any]) -> None:
    """In an event loop a sync verb raises on the app's own connection, and runs on the caller's."""
    with pytest.raises(NotSupported, match=r"[Aa]wait"):
        shop.tasks["send"].enqueue_sync(shop, 42)
    with pytest.raises(NotSupported, match=r"[Aa]wait"):
        shop.queues.list().sync()
    with pytest.raises(NotSupported, match=r"schedule_pause inside .* [Aa]wait"):
        shop.schedules.pause("nightly").sync()
    assert shop.tasks["send"].enqueue_sync(db, 42).created


@pytest.mark.parametrize(
    ("word", "ours"), [("delay", "enqueue"), ("apply_async", "enqueue"), ("defer", "enqueue"), ("configure", "with_")]
)
def test_the_words_of_other_queues_name_ours(shop: App, word: str, ours: str) -> None:
    """A method name of Celery or Procrastinate raises an AttributeError that names ours."""
    for task in (shop.tasks["send"], shop.tasks["send"].with_(priority=1)):
        with pytest.raises(AttributeError, match=rf"{word}.*{ours}"):
            getattr(task, word)
        with pytest.raises(AttributeError, match="colour"):
            _ = task.colour


@pytest.mark.parametrize(("word", "ours"), [("countdown", "delay"), ("eta", "run_at"), ("max_retries", "max_attempts")])
def test_the_options_of_other_queues_name_ours(shop: App, word: str, ours: str) -> None:
    """An option of another queue, in with_ or among the args, raises an error that names ours."""
    with pytest.raises(TypeError, match=rf"{word}.*with_\({ours}="):
        shop.tasks["send"].with_(**{word: 5})
    with pytest.raises(SignatureError, match=rf"{word}.*with_\({ours}="):
        shop.tasks["send"].job(42, **{word: 5})


async def test_a_missing_connection_is_named(shop: App) -> None:
    """If the first argument is not a connection and the rest does not fit, the error asks for one."""
    with pytest.raises(ConnectionNotSupported, match="as a connection"):
        await shop.tasks["send"].enqueue(42)  # type: ignore[arg-type]
    with pytest.raises(ConnectionNotSupported, match="as a connection"):
        shop.tasks["send"].enqueue_sync(42)  # type: ignore[arg-type]
