"""Run a Call on the caller's own connection, inside the caller's transaction.

Nothing is committed, rolled back or set here. A refusal by the server in Tallybook's terms becomes an error of
Tallybook. Every other error passes as the driver raised it, because it is about the caller's transaction.
"""

import os
import sys
from functools import cache
from typing import Any

from tallybook._db.both import done, got
from tallybook._db.declared import Call, T, rendered
from tallybook._db.kinds import kind_of, refusal, refused


def run(conn: Any, call: Call[T]) -> T:
    """Return the result of `call` on `conn`, a synchronous connection."""
    return done(run_on(conn, call, sync=True))


async def run_on(conn: Any, call: Call[T], *, sync: bool) -> T:
    """Return the result of `call` on `conn`; `sync`: without waiting, see both.py.

    Raises ConnectionNotSupported for an object that is no such connection.
    """
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
    return call.row(row[0] if row is not None else None)


async def _psycopg(conn: Any, call: Call[Any]) -> Any:
    from psycopg import AsyncRawCursor, RawCursor
    from psycopg.rows import tuple_row

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
    "psycopg": _psycopg,
    "asyncpg": _asyncpg,
    "sqlalchemy session": _sqlalchemy,
    "sqlalchemy connection": _sqlalchemy,
    "django": _django,
    "django alias": _alias,
}
