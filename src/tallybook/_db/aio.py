"""Run a Call on the caller's own asynchronous connection, inside the caller's transaction.

As in sync.py, nothing is committed, rolled back or set. Only the server's Tallybook errors are translated.
"""

from __future__ import annotations

from typing import Any, TypeVar

from tallybook._db.declared import Call, rendered
from tallybook._db.kinds import kind_of, refusal, refused
from tallybook._db.sync import demand_postgres, sqlalchemy_text

T = TypeVar("T")


async def run(conn: Any, call: Call[T]) -> T:
    """Return the result of `call` on `conn`. Raises ConnectionNotSupported for an object that is no such connection."""
    fetch = _FETCH.get(kind_of(conn))
    if fetch is None:
        raise refused(conn, call.verb, sync=False)
    try:
        row = await fetch(conn, call)
    except Exception as error:
        if ours := refusal(error, call):
            raise ours from error
        raise
    return call.row(row[0] if row is not None else None)


async def _psycopg(conn: Any, call: Call[Any]) -> Any:
    from psycopg import AsyncRawCursor
    from psycopg.rows import tuple_row

    async with conn.cursor(row_factory=tuple_row) as cursor:
        if isinstance(cursor, AsyncRawCursor):
            sql, names = rendered(call.sql, "dollar")
            await cursor.execute(sql, [call.params[name] for name in names])
        else:
            await cursor.execute(call.sql, call.params)
        return await cursor.fetchone()


async def _asyncpg(conn: Any, call: Call[Any]) -> Any:
    sql, names = rendered(call.sql, "dollar")
    return await conn.fetchrow(sql, *[call.params[name] for name in names])


async def _session(session: Any, call: Call[Any]) -> Any:
    demand_postgres(session, session.get_bind().dialect.name, call, sync=False)
    return (await session.execute(sqlalchemy_text(call.sql), call.params)).fetchone()


async def _connection(conn: Any, call: Call[Any]) -> Any:
    demand_postgres(conn, conn.dialect.name, call, sync=False)
    return (await conn.execute(sqlalchemy_text(call.sql), call.params)).fetchone()


_FETCH = {
    "async psycopg": _psycopg,
    "async asyncpg": _asyncpg,
    "async sqlalchemy session": _session,
    "async sqlalchemy connection": _connection,
}
