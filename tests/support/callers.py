"""The kinds of connections that users have, with one interface for tests."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import asyncpg
import psycopg
import sqlalchemy as sa
from anyio.from_thread import BlockingPortal, start_blocking_portal
from django.utils.connection import ConnectionProxy
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy.ext import asyncio as sa_async
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from support.workers import POOLED

# Options that drivers need behind PgBouncer in transaction mode: prepare nothing that outlives a transaction.
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
    """An asynchronous connection with an event loop in a thread, so that tests use both kinds alike."""

    def __init__(self, inner: Caller, portal: BlockingPortal) -> None:
        self.call = portal.call
        execute, commit, rollback = (partial(self.call, verb) for verb in (inner.execute, inner.commit, inner.rollback))
        savepoint = lambda: portal.wrap_async_context_manager(inner.savepoint())  # noqa: E731
        super().__init__(inner.conn, execute, savepoint, commit, rollback)

    def ask(self, verb: Any) -> Any:
        return self.call(verb.on, self.conn)

    def enqueue(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call(partial(task.enqueue, self.conn, *args, **kwargs))

    def enqueue_many(self, app: Any, calls: Any) -> Any:
        return self.call(app.enqueue_many, self.conn, calls)


@contextmanager
def connected(kind: str, dsn: str) -> Iterator[Caller]:
    """Yield a connection of this kind, one of `KINDS`."""
    block = KINDS[kind](dsn)
    if isinstance(block, AbstractContextManager):
        with block as caller:
            yield caller
    else:
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(block) as caller:
            yield AsyncCaller(caller, portal)


def _of_psycopg(conn: Any) -> Caller:
    return Caller(conn, conn.execute, conn.transaction, conn.commit, conn.rollback)


@contextmanager
def _psycopg(dsn: str, **options: Any) -> Iterator[Caller]:
    with psycopg.connect(dsn, **NO_PREPARE, **options) as conn:
        yield _of_psycopg(conn)


@asynccontextmanager
async def _psycopg_async(dsn: str, **options: Any) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(dsn, **NO_PREPARE, **options) as conn:
        yield _of_psycopg(conn)


def _of_sqlalchemy(s: Any) -> Caller:
    return Caller(s, lambda text: s.execute(sa.text(text)), s.begin_nested, s.commit, s.rollback)


@contextmanager
def _sqlalchemy(connect: Callable[[sa.Engine], Any], dsn: str) -> Iterator[Caller]:
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn, **NO_PREPARE), poolclass=NullPool
    )
    with connect(engine) as conn:
        yield _of_sqlalchemy(conn)
    engine.dispose()


@asynccontextmanager
async def _sqlalchemy_async(
    driver: str, connect: Callable[[sa_async.AsyncEngine], Any], dsn: str
) -> AsyncIterator[Caller]:
    async def open_one() -> Any:
        if driver == "asyncpg":
            return await asyncpg.connect(**asyncpg_options(dsn))
        return await psycopg.AsyncConnection.connect(dsn, **NO_PREPARE)

    told = _ASYNCPG_DIALECT if POOLED and driver == "asyncpg" else {}
    engine = sa_async.create_async_engine(
        f"postgresql+{driver}://", async_creator=open_one, poolclass=NullPool, connect_args=told
    )
    async with connect(engine) as conn:
        yield _of_sqlalchemy(conn)
    await engine.dispose()


@asynccontextmanager
async def _scoped(engine: sa_async.AsyncEngine) -> AsyncIterator[Any]:
    session = sa_async.async_scoped_session(sa_async.async_sessionmaker(engine), scopefunc=lambda: 1)
    yield session
    await session.remove()


@contextmanager
def django_alias(dsn: str, conn: Callable[[Any], Any] = lambda connections: "shop") -> Iterator[Caller]:
    """Configure Django with the database `shop`; the alias, or what `conn` returns, is the connection."""
    import django
    from django.conf import settings
    from django.db import connections, transaction

    if not settings.configured:
        settings.configure(USE_TZ=False)  # the unusual value: datetimes come back naive
        django.setup()
    given = conninfo_to_dict(dsn)
    words = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    database = {word: str(given.get(name) or "") for word, name in words.items()}
    shop = {"ENGINE": "django.db.backends.postgresql", **database}
    connections.settings = connections.configure_settings({"default": {}, "shop": shop})
    own = connections["shop"]

    def execute(text: str) -> None:
        with own.cursor() as cursor:
            cursor.execute(text)

    own.set_autocommit(False)
    try:
        yield Caller(conn(connections), execute, lambda: transaction.atomic(using="shop"), own.commit, own.rollback)
    finally:
        own.close()
        del connections["shop"]


def asyncpg_options(dsn: str) -> dict[str, Any]:
    """Return the conninfo as asyncpg's options."""
    given = conninfo_to_dict(dsn)
    words = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
    options: dict[str, Any] = {words[name]: value for name, value in given.items() if name in words}
    if POOLED:
        options["statement_cache_size"] = 0
    return options


async def _of_asyncpg(conn: Any) -> Caller:
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
async def _asyncpg_connection(dsn: str) -> AsyncIterator[Caller]:
    conn = await asyncpg.connect(**asyncpg_options(dsn))
    # Many applications do this; it must not affect our statements.
    await conn.set_type_codec("jsonb", encoder=repr, decoder=repr, schema="pg_catalog")
    yield await _of_asyncpg(conn)
    await conn.close()


@asynccontextmanager
async def _asyncpg_pool(dsn: str) -> AsyncIterator[Caller]:
    async with asyncpg.create_pool(**asyncpg_options(dsn), min_size=1, max_size=1) as pool, pool.acquire() as conn:
        yield await _of_asyncpg(conn)


KINDS: dict[str, Callable[[str], Any]] = {
    "psycopg_plain": _psycopg,
    "psycopg_dict_rows": partial(_psycopg, row_factory=dict_row),
    "psycopg_raw_cursor": partial(_psycopg, cursor_factory=psycopg.RawCursor),
    "psycopg_client_cursor": partial(_psycopg, cursor_factory=psycopg.ClientCursor),
    "sqlalchemy_connection": partial(_sqlalchemy, sa.Engine.connect),
    "sqlalchemy_session": partial(_sqlalchemy, Session),
    "sqlalchemy_scoped_session": partial(_sqlalchemy, lambda engine: closing(scoped_session(sessionmaker(engine)))),
    "django_alias": django_alias,
    "django_connection": partial(django_alias, conn=lambda connections: connections["shop"]),
    # The type of `from django.db import connection`.
    "django_proxy": partial(django_alias, conn=lambda connections: ConnectionProxy(connections, "shop")),
    "psycopg_async": partial(_psycopg_async, row_factory=dict_row),
    "psycopg_async_raw_cursor": partial(_psycopg_async, cursor_factory=psycopg.AsyncRawCursor),
    "asyncpg_connection": _asyncpg_connection,
    "asyncpg_pool": _asyncpg_pool,
    "async_session_over_asyncpg": partial(_sqlalchemy_async, "asyncpg", sa_async.AsyncSession),
    "async_session_over_psycopg": partial(_sqlalchemy_async, "psycopg", sa_async.AsyncSession),
    "async_scoped": partial(_sqlalchemy_async, "asyncpg", _scoped),
    "async_connection_over_asyncpg": partial(_sqlalchemy_async, "asyncpg", sa_async.AsyncEngine.connect),
}
