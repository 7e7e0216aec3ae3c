"""Run a Call on the caller's own synchronous connection, inside the caller's transaction.

Nothing is committed, rolled back or set here. A refusal by the server in Tallybook's terms becomes an error of
Tallybook. Every other error passes as the driver raised it, because it is about the caller's transaction.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any, TypeVar

from tallybook._db.declared import Call, rendered
from tallybook._db.kinds import kind_of, refusal, refused

T = TypeVar("T")


def run(conn: Any, call: Call[T]) -> T:
    """Return the result of `call` on `conn`. Raises ConnectionNotSupported for an object that is no such connection."""
    fetch = _FETCH.get(kind_of(conn))
    if fetch is None:
        raise refused(conn, call.verb, sync=True)
    try:
        row = fetch(conn, call)
    except Exception as error:
        if ours := refusal(error, call):
            raise ours from error
        raise
    return call.row(row[0] if row is not None else None)


def _psycopg(conn: Any, call: Call[Any]) -> Any:
    from psycopg import RawCursor
    from psycopg.rows import tuple_row

    with conn.cursor(row_factory=tuple_row) as cursor:
        if isinstance(cursor, RawCursor):
            sql, names = rendered(call.sql, "dollar")
            return cursor.execute(sql, [call.params[name] for name in names]).fetchone()
        return cursor.execute(call.sql, call.params).fetchone()


def _session(session: Any, call: Call[Any]) -> Any:
    demand_postgres(session, session.get_bind().dialect.name, call)
    return session.execute(sqlalchemy_text(call.sql), call.params).fetchone()


def _connection(conn: Any, call: Call[Any]) -> Any:
    demand_postgres(conn, conn.dialect.name, call)
    return conn.execute(sqlalchemy_text(call.sql), call.params).fetchone()


def _django(conn: Any, call: Call[Any]) -> Any:
    demand_postgres(conn, conn.vendor, call)
    with conn.cursor() as cursor:
        cursor.execute(call.sql, call.params)
        return cursor.fetchone()


def _alias(alias: str, call: Call[Any]) -> Any:
    # A text can only be an alias if the program has loaded Django and Django has this name.
    django, conf = sys.modules.get("django.db"), sys.modules.get("django.conf")
    configured = (
        django is not None and conf is not None and (conf.settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ)
    )
    if django is None or not configured or alias not in django.connections.settings:
        raise refused(alias, call.verb, sync=True)
    return _django(django.connections[alias], call)


def demand_postgres(conn: object, name: str, call: Call[Any], *, sync: bool = True) -> None:
    if name != "postgresql":
        raise refused(conn, call.verb, sync=sync, postgres=False)


@cache
def sqlalchemy_text(sql: str) -> Any:
    """Return SQLAlchemy's text clause for one of our statements; it is parsed once, and is its own cache key."""
    from sqlalchemy import text

    return text(rendered(sql, "colon")[0])


_FETCH = {
    "psycopg": _psycopg,
    "sqlalchemy session": _session,
    "sqlalchemy connection": _connection,
    "django": _django,
    "django alias": _alias,
}
