"""The caller's own connection: its kind, and a Call on it, inside the caller's transaction.

Nothing is committed, rolled back or set here. A refusal by the server in Tallybook's terms becomes an error of
Tallybook. Every other error passes as the driver raised it, because it is about the caller's transaction.

One text serves asynchronous and synchronous connections. A function for both is a coroutine that awaits `got(...)`. On
an asynchronous connection it waits. A synchronous one has returned its result already, so the coroutine never waits,
and `done` runs it to its end without an event loop.
"""

import os
import sys
from collections.abc import Coroutine
from functools import cache
from typing import Any, get_origin

from psycopg import AsyncRawCursor, RawCursor
from psycopg.rows import tuple_row

from tallybook._db.declared import Call, T, rendered
from tallybook.errors import ConnectionNotSupported, TallybookError, UnknownJob, from_sqlstate


async def got(found: Any) -> Any:
    """Return a call's result, awaited if the connection is asynchronous."""
    return await found if hasattr(found, "__await__") else found


def done(running: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        running.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    running.close()
    raise AssertionError("it waits on a synchronous connection")


# By the names of its classes, so that no library has to be imported.
_NAMES = {
    "psycopg": "psycopg.Connection",
    "async psycopg": "psycopg.AsyncConnection",
    "async asyncpg": "asyncpg.connection.Connection asyncpg.pool.PoolConnectionProxy",
    "sqlalchemy connection": "sqlalchemy.engine.base.Connection",
    "sqlalchemy session": "sqlalchemy.orm.session.Session sqlalchemy.orm.scoping.scoped_session",
    "async sqlalchemy connection": "sqlalchemy.ext.asyncio.engine.AsyncConnection",
    "async sqlalchemy session": "sqlalchemy.ext.asyncio.session.AsyncSession"
    " sqlalchemy.ext.asyncio.scoping.async_scoped_session",
    "django": "django.db.backends.base.base.BaseDatabaseWrapper django.utils.connection.ConnectionProxy",
    "django alias": "builtins.str",
    # Not connections; recognized so that the error can name what to pass instead.
    "pool": "psycopg_pool.base.BasePool asyncpg.pool.Pool sqlalchemy.engine.base.Engine"
    " sqlalchemy.ext.asyncio.engine.AsyncEngine",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}

_SYNC = "a psycopg Connection, a SQLAlchemy Session or Connection, a Django connection or its alias, or the App"
_ASYNC = "a psycopg AsyncConnection, an asyncpg connection, a SQLAlchemy AsyncSession or AsyncConnection, or the App"


@cache
def _kind(cls: type) -> str:
    names = (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), "")


def kind_of(conn: object) -> str:
    """Return one of the kinds above, or "". A tracing proxy counts as the class that it claims to wrap."""
    return _kind(type(conn)) or _kind(conn.__class__)  # type: ignore[arg-type]  # a class has a hash


def transaction_kind(annotation: object) -> str:
    """Return the kind of transaction for a parameter with this annotation, or "" for any other annotation."""
    cls = get_origin(annotation) or annotation
    kind = _kind(cls) if isinstance(cls, type) else ""
    return "" if kind in ("pool", "django alias") else kind


def refused(conn: object, verb: str, *, sync: bool, postgres: bool = True) -> ConnectionNotSupported:
    """Return the error for an object that `verb`, or its `_sync` form, cannot use."""
    kind, accepted = kind_of(conn), _SYNC if sync else _ASYNC
    if verb.startswith("enqueue"):
        other = f"{verb}()" if sync else f"{verb}_sync()"
    else:
        other = ".on(conn)" if sync else ".sync(conn)"
    if not postgres:
        return ConnectionNotSupported(conn, f"one to PostgreSQL: {accepted}")
    if kind == "pool":
        return ConnectionNotSupported(conn, f"one connection out of it: {accepted}")
    if kind == "django alias":
        return ConnectionNotSupported(conn, accepted if sync else f"{accepted}; a Django alias goes to {other}")
    if kind.startswith("async") == sync and kind:
        return ConnectionNotSupported(conn, f"this one to {other}, or here {accepted}")
    return ConnectionNotSupported(conn, accepted)


def chain(error: BaseException) -> list[BaseException]:
    """Return `error` and the errors that it wraps, the driver's own error last."""
    seen: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and len(seen) < 5:
        seen.append(inner)
        inner = getattr(inner, "orig", None) or inner.__cause__
    return seen


def state_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of a driver's error."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state if isinstance(state, str) else None


def refusal(error: BaseException, call: Call[Any] | None = None) -> TallybookError | None:
    """Return the Tallybook error for a refusal by the server (SQLSTATE TB0xx); None for any other driver error."""
    for inner in reversed(chain(error)):  # SQLAlchemy and Django wrap the driver's error, which alone has all data
        if (sqlstate := state_of(inner) or "").startswith("TB"):
            diag = getattr(inner, "diag", inner)
            message = getattr(diag, "message_primary", None) or getattr(diag, "message", None) or str(inner)
            detail = getattr(diag, "message_detail", None) or getattr(diag, "detail", None)
            hint = getattr(diag, "message_hint", None) or getattr(diag, "hint", None)
            if sqlstate == "TB002" and call is not None and call.unknown is not UnknownJob:
                return call.unknown.of_server(sqlstate, message, detail, hint)
            return from_sqlstate(sqlstate, message, detail, hint)
    return None


def run(conn: Any, call: Call[T]) -> T:
    """Return the result of `call` on `conn`, a synchronous connection."""
    return done(run_on(conn, call, sync=True))


async def run_on(conn: Any, call: Call[T], *, sync: bool) -> T:
    """Return the result of `call` on `conn`; `sync`: without waiting (see `got`). Raises ConnectionNotSupported."""
    kind = kind_of(conn)
    fetch = None if kind.startswith("async ") == sync else _FETCH.get(kind.removeprefix("async "))
    if fetch is None:
        raise refused(conn, call.verb, sync=sync)
    try:
        row = await fetch(conn, call)
    except Exception as error:
        if ours := refusal(error, call):
            raise ours from error
        raise
    found = row[0] if row is not None else None
    return call.row(found.decode() if isinstance(found, bytes) else found)  # text, if client_encoding is SQL_ASCII


async def _psycopg(conn: Any, call: Call[Any]) -> Any:
    cursor = conn.cursor(row_factory=tuple_row)
    if isinstance(cursor, RawCursor | AsyncRawCursor):
        sql, names = rendered(call.sql, "dollar")
        await got(cursor.execute(sql, [call.params[name] for name in names]))
    else:
        await got(cursor.execute(call.sql, call.params))
    return await got(cursor.fetchone())


async def _asyncpg(conn: Any, call: Call[Any]) -> Any:
    sql, names = rendered(call.sql, "dollar")
    return await conn.fetchrow(sql, *[call.params[name] for name in names])


async def _sqlalchemy(conn: Any, call: Call[Any]) -> Any:
    bind = conn.get_bind() if hasattr(conn, "get_bind") else conn  # a session, or a connection
    _demand_postgres(conn, bind.dialect.name, call)
    return (await got(conn.execute(_sqlalchemy_text(call.sql), call.params))).fetchone()


async def _django(conn: Any, call: Call[Any]) -> Any:
    _demand_postgres(conn, conn.vendor, call)
    with conn.cursor() as cursor:
        cursor.execute(call.sql, call.params)
        return cursor.fetchone()


async def _alias(alias: str, call: Call[Any]) -> Any:
    # A text can only be an alias if the program has loaded Django and Django has this name.
    django, conf = sys.modules.get("django.db"), sys.modules.get("django.conf")
    configured = conf is not None and (conf.settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ)
    if django is None or not configured or alias not in django.connections.settings:
        raise refused(alias, call.verb, sync=True)
    return await _django(django.connections[alias], call)


def _demand_postgres(conn: object, name: str, call: Call[Any]) -> None:
    if name != "postgresql":
        raise refused(conn, call.verb, sync=not kind_of(conn).startswith("async "), postgres=False)


@cache
def _sqlalchemy_text(sql: str) -> Any:
    """Return SQLAlchemy's text clause for one of our statements; it is parsed once, and is its own cache key."""
    from sqlalchemy import text

    return text(rendered(sql, "colon")[0])


_FETCH = {
    "psycopg": _psycopg, "asyncpg": _asyncpg, "sqlalchemy session": _sqlalchemy, "sqlalchemy connection": _sqlalchemy,
    "django": _django, "django alias": _alias,
}  # fmt: skip
