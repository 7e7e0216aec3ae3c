"""The kinds of connections that users have, with one interface for tests."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import asyncpg
import psycopg
import sqlalchemy as sa
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

# Options that drivers need behind PgBouncer in transaction mode: prepare nothing that outlives a transaction.
POOLED = bool(os.environ.get("TALLYBOOK_TEST_POOLER"))
NO_PREPARE: dict[str, Any] = {"prepare_threshold": None} if POOLED else {}
_ASYNCPG_DIALECT: dict[str, Any] = {
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": lambda: f"__asyncpg_{uuid.uuid4()}__",
}


@dataclass
class Caller:
    """A connection inside a user's transaction."""

    conn: Any
    execute: Callable[[str], Any]
    savepoint: Callable[[], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]

    def ask(self, verb: Any) -> Any:
        """Run the verb on this connection and return its result."""
        return verb.sync(self.conn)

    def enqueue(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        return task.enqueue_sync(self.conn, *args, **kwargs)

    def enqueue_many(self, app: Any, calls: Any) -> Any:
        return app.enqueue_many_sync(self.conn, calls)


class AsyncCaller(Caller):
    """An asynchronous connection with its own event loop, so that tests use both kinds alike."""

    def __init__(self, inner: Caller, runner: asyncio.Runner) -> None:
        run = self.run = partial(_run, runner)
        super().__init__(
            inner.conn,
            partial(run, inner.execute),
            lambda: _block(runner, inner.savepoint()),
            partial(run, inner.commit),
            partial(run, inner.rollback),
        )

    def ask(self, verb: Any) -> Any:
        return self.run(verb.on, self.conn)

    def enqueue(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(task.enqueue, self.conn, *args, **kwargs)

    def enqueue_many(self, app: Any, calls: Any) -> Any:
        return self.run(app.enqueue_many, self.conn, calls)


def _run(runner: asyncio.Runner, verb: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    async def in_loop() -> Any:
        return await verb(*args, **kwargs)

    return runner.run(in_loop())


@contextmanager
def _block(runner: asyncio.Runner, block: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
    """Enter an asynchronous context manager from a synchronous test."""
    entered = _run(runner, block.__aenter__)
    try:
        yield entered
    except BaseException as error:
        if not _run(runner, block.__aexit__, type(error), error, error.__traceback__):
            raise
    else:
        _run(runner, block.__aexit__, None, None, None)


@contextmanager
def connected(kind: Callable[[str], Any], dsn: str) -> Iterator[Caller]:
    """Yield a connection of this kind, one of `KINDS`."""
    block = kind(dsn)
    if isinstance(block, AbstractContextManager):
        with block as caller:
            yield caller
    else:
        with asyncio.Runner() as runner, _block(runner, block) as caller:
            yield AsyncCaller(caller, runner)


@contextmanager
def psycopg_plain(dsn: str, **options: Any) -> Iterator[Caller]:
    with psycopg.connect(dsn, **NO_PREPARE, **options) as conn:
        yield Caller(conn, conn.execute, conn.transaction, conn.commit, conn.rollback)


def psycopg_dict_rows(dsn: str) -> AbstractContextManager[Caller]:
    return psycopg_plain(dsn, row_factory=dict_row)


def psycopg_raw_cursor(dsn: str) -> AbstractContextManager[Caller]:
    return psycopg_plain(dsn, cursor_factory=psycopg.RawCursor)


def psycopg_client_cursor(dsn: str) -> AbstractContextManager[Caller]:
    return psycopg_plain(dsn, cursor_factory=psycopg.ClientCursor)


def _of_sqlalchemy(s: Any) -> Caller:
    return Caller(s, lambda text: s.execute(sa.text(text)), s.begin_nested, s.commit, s.rollback)


@contextmanager
def _engine(dsn: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn, **NO_PREPARE), poolclass=NullPool
    )
    yield engine
    engine.dispose()


@contextmanager
def sqlalchemy_connection(dsn: str) -> Iterator[Caller]:
    with _engine(dsn) as engine, engine.connect() as conn:
        yield _of_sqlalchemy(conn)


@contextmanager
def sqlalchemy_session(dsn: str) -> Iterator[Caller]:
    with _engine(dsn) as engine, Session(engine) as session:
        yield _of_sqlalchemy(session)


@contextmanager
def sqlalchemy_scoped_session(dsn: str) -> Iterator[Caller]:
    with _engine(dsn) as engine:
        session = scoped_session(sessionmaker(engine))
        yield _of_sqlalchemy(session)
        session.remove()


@contextmanager
def django_alias(dsn: str) -> Iterator[Caller]:
    import django
    from django.conf import settings
    from django.db import connections, transaction

    if not settings.configured:
        settings.configure(USE_TZ=False)  # the unusual value: datetimes come back naive
        django.setup()
    given = conninfo_to_dict(dsn)
    shop = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": given["dbname"],
        "USER": given.get("user") or "",
        "PASSWORD": given.get("password") or "",
        "HOST": given.get("host") or "",
        "PORT": str(given.get("port") or ""),
    }
    connections.settings = connections.configure_settings({"default": {}, "shop": shop})
    conn = connections["shop"]

    def execute(text: str) -> None:
        with conn.cursor() as cursor:
            cursor.execute(text)

    conn.set_autocommit(False)
    try:
        yield Caller("shop", execute, lambda: transaction.atomic(using="shop"), conn.commit, conn.rollback)
    finally:
        conn.close()
        del connections["shop"]


@contextmanager
def django_connection(dsn: str) -> Iterator[Caller]:
    from django.db import connections

    with django_alias(dsn) as caller:
        caller.conn = connections["shop"]
        yield caller


@contextmanager
def django_proxy(dsn: str) -> Iterator[Caller]:
    from django.db import connections
    from django.utils.connection import ConnectionProxy

    with django_alias(dsn) as caller:
        caller.conn = ConnectionProxy(connections, "shop")  # the type of `from django.db import connection`
        yield caller


@asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row, **NO_PREPARE) as conn:
        yield Caller(conn, conn.execute, conn.transaction, conn.commit, conn.rollback)


@asynccontextmanager
async def psycopg_async_raw_cursor(dsn: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(dsn, cursor_factory=psycopg.AsyncRawCursor, **NO_PREPARE) as conn:
        yield Caller(conn, conn.execute, conn.transaction, conn.commit, conn.rollback)


def asyncpg_options(dsn: str) -> dict[str, Any]:
    """Return the conninfo as asyncpg's options."""
    given = conninfo_to_dict(dsn)
    words = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
    options: dict[str, Any] = {words[name]: value for name, value in given.items() if name in words}
    if POOLED:
        options["statement_cache_size"] = 0
    return options


async def _asyncpg_caller(conn: Any) -> Caller:
    outer: Any = None

    async def begin() -> None:
        nonlocal outer
        outer = conn.transaction()
        await outer.start()

    async def commit() -> None:
        await outer.commit()
        await begin()  # the other drivers do that on their own

    async def rollback() -> None:
        await outer.rollback()
        await begin()

    await begin()
    return Caller(conn, conn.execute, conn.transaction, commit, rollback)


@asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncIterator[Caller]:
    conn = await asyncpg.connect(**asyncpg_options(dsn))
    # Many applications do this; it must not affect our statements.
    await conn.set_type_codec("jsonb", encoder=repr, decoder=repr, schema="pg_catalog")
    yield await _asyncpg_caller(conn)
    await conn.close()


@asynccontextmanager
async def asyncpg_pool(dsn: str) -> AsyncIterator[Caller]:
    async with asyncpg.create_pool(**asyncpg_options(dsn), min_size=1, max_size=1) as pool, pool.acquire() as conn:
        yield await _asyncpg_caller(conn)


@asynccontextmanager
async def _async_engine(dsn: str, driver: str) -> AsyncIterator[Any]:
    async def connect() -> Any:
        if driver == "asyncpg":
            return await asyncpg.connect(**asyncpg_options(dsn))
        return await psycopg.AsyncConnection.connect(dsn, **NO_PREPARE)

    told = _ASYNCPG_DIALECT if POOLED and driver == "asyncpg" else {}
    engine = create_async_engine(
        f"postgresql+{driver}://", async_creator=connect, poolclass=NullPool, connect_args=told
    )
    yield engine
    await engine.dispose()


@asynccontextmanager
async def _async_session(dsn: str, driver: str) -> AsyncIterator[Caller]:
    async with _async_engine(dsn, driver) as engine, AsyncSession(engine) as session:
        yield _of_sqlalchemy(session)


def async_session_over_asyncpg(dsn: str) -> AbstractAsyncContextManager[Caller]:
    return _async_session(dsn, "asyncpg")


def async_session_over_psycopg(dsn: str) -> AbstractAsyncContextManager[Caller]:
    return _async_session(dsn, "psycopg")


@asynccontextmanager
async def async_scoped(dsn: str) -> AsyncIterator[Caller]:
    async with _async_engine(dsn, "asyncpg") as engine:
        session = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
        yield _of_sqlalchemy(session)
        await session.remove()


@asynccontextmanager
async def async_connection_over_asyncpg(dsn: str) -> AsyncIterator[Caller]:
    async with _async_engine(dsn, "asyncpg") as engine, engine.connect() as conn:
        yield _of_sqlalchemy(conn)


KINDS = [
    psycopg_plain, psycopg_dict_rows, psycopg_raw_cursor, psycopg_client_cursor,
    sqlalchemy_connection, sqlalchemy_session, sqlalchemy_scoped_session,
    django_alias, django_connection, django_proxy,
    psycopg_async, psycopg_async_raw_cursor, asyncpg_connection, asyncpg_pool,
    async_session_over_asyncpg, async_session_over_psycopg, async_scoped, async_connection_over_asyncpg,
]  # fmt: skip
