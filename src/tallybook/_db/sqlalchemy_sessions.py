"""Transactions for atomic tasks with SQLAlchemy: a Session, an AsyncSession, or the Connection of one.

The sessions are the user's own if the App has a maker, else those of an engine that the worker creates.
"""

from collections.abc import Callable
from typing import Any

import psycopg
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import sessionmaker

from tallybook._db.link import CONNECT
from tallybook._db.pooler import make_fit
from tallybook._db.sync import done, got, kind_of
from tallybook._db.transactions import MARK, RESET, Begun, Library, own_to_commit
from tallybook.errors import ConfigError

Maker = Callable[[], Any]


def _made(makers: tuple[Maker, ...], kind: str) -> Maker | None:
    """Return the first of the user's makers whose sessions are of this kind, or None if there is no maker."""
    found = next((maker for maker in makers if kind_of(maker()) == kind), None)
    if makers and found is None:
        what = "an AsyncSession" if kind.startswith("async") else "a Session"
        hint = "Pass both as a tuple: App(..., session=(sessionmaker(engine), async_sessionmaker(async_engine)))"
        raise ConfigError("session", makers[0], f"a task's annotation requires {what}, but none is made", hint=hint)
    return found


_URL = "postgresql+psycopg://"
# No limit, and all connections are kept: see transactions.py.
_POOL: dict[str, Any] = {"pool_size": 0, "pool_reset_on_return": None}


def _clean(engine: Any) -> None:
    """Reset session settings of one job before the next; the user's own engines are left alone."""

    def reset(conn: Any, record: Any, state: Any) -> None:
        if not state.terminate_only:
            conn.rollback()
            cursor = conn.cursor()
            cursor.execute(RESET)
            cursor.close()
            conn.commit()

    event.listen(engine, "reset", reset)


_ENDS = "tallybook ends its transaction"


def _refuse(session: Any) -> None:
    """Refuse a handler's own commit before it happens. A rollback is detected afterwards, by the mark."""
    if not session.info[_ENDS] and session.get_nested_transaction() is None:
        raise own_to_commit("commit()")


class Sessions(Library):
    """An AsyncSession or a Session of sqlalchemy, or its Connection."""

    def __init__(self, dsn: str, name: str, makers: tuple[Maker, ...], kind: str) -> None:
        self._connection = kind.endswith("connection")
        self._is_async = kind.startswith("async")
        self._engine: Any = None
        made = _made(makers, "async sqlalchemy session" if self._is_async else "sqlalchemy session")
        self._maker = made or self._own(dsn, {**CONNECT, "application_name": name})

    def _own(self, dsn: str, options: dict[str, Any]) -> Maker:
        library = psycopg.AsyncConnection if self._is_async else psycopg.Connection

        async def connect() -> Any:
            conn = await got(library.connect(dsn, **options))
            await make_fit(conn)
            await got(conn.set_autocommit(False))
            return conn

        if self._is_async:
            from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

            self._engine = create_async_engine(_URL, async_creator=connect, **_POOL)
            _clean(self._engine.sync_engine)
            return async_sessionmaker(self._engine)
        self._engine = create_engine(_URL, creator=lambda: done(connect()), **_POOL)
        _clean(self._engine)
        return sessionmaker(self._engine)

    async def begin(self) -> Begun:
        session = self._maker()
        try:
            session.info[_ENDS] = False
            event.listen(session.sync_session if self._is_async else session, "before_commit", _refuse)
            await got(session.begin())
            conn = await got(session.connection())
            await got(session.execute(text(MARK)))
        except BaseException:
            await got(session.invalidate())
            raise
        driver = None if self._is_async else conn.connection.driver_connection
        return Begun(conn if self._connection else session, session, driver)

    async def flush(self, begun: Begun) -> None:
        await got(begun.handle.flush())

    async def commit(self, begun: Begun) -> None:
        begun.handle.info[_ENDS] = True
        await got(begun.handle.commit())

    async def rollback(self, begun: Begun) -> None:
        await got(begun.handle.rollback())

    async def keep(self, begun: Begun) -> None:
        await got(begun.handle.close())

    async def drop(self, begun: Begun) -> None:
        await got(begun.handle.invalidate())

    async def close(self) -> None:
        if self._engine is not None:
            await got(self._engine.dispose())
