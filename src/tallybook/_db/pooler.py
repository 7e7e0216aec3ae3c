"""A pooler in transaction mode between us and the server: how it is noticed, and what is not done then.

Each transaction may run on another session of the server. So nothing is set on the session, no statement is prepared by
name, no session's advisory lock is taken, nothing is listened to. A pooler makes up the key data by which a client would
cancel its statements, so the process number that libpq was told is not that of the backend that answers.
"""

from __future__ import annotations

from typing import Any

import psycopg

IS_SESSION = "select pg_backend_pid() = %s::int"

# So that the server finds out about a client that is gone, and ends its transaction: on a session of our own only.
_KEEPALIVES = """\
select set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
       set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '15000', false)
 where pg_backend_pid() = %s::int"""
# asyncpg prepares all that has a result, by name, which cannot be done yet.
_KEEPALIVES_ASYNCPG = """\
do $$ begin
  if pg_backend_pid() <> {pid:d} then raise exception 'a pooler is between' using errcode = '26000'; end if;
end $$;
set tcp_keepalives_idle = 10; set tcp_keepalives_interval = 5; set tcp_keepalives_count = 3; set tcp_user_timeout = 15000"""

# What a session of our own would have set right, see SESSION in link.py: (name, value, what comes of it) where it differs.
UNGUARDED = """\
select s.name, s.setting, v.wanted
  from (values ('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'),
               ('default_transaction_isolation', 'read committed'), ('default_transaction_read_only', 'off')) v(name, wanted)
  join pg_settings s on s.name = v.name
 where s.setting <> v.wanted"""


def is_behind_pooler(conn: psycopg.Connection[Any]) -> bool:
    """Whether what answers on this connection is not the session that it was opened with."""
    cursor = psycopg.ClientCursor(conn)  # one simple query: nothing is prepared
    row = cursor.execute(IS_SESSION, (conn.info.backend_pid,)).fetchone()
    return row != (True,)


def shares_sessions(dsn: str, **connect: Any) -> bool:
    """Whether two connections by this DSN were seen to share a session of the server: it is no pooler in session mode.

    Opens two connections. A busy pooler might hide it, so it is looked at several times.
    """
    with (
        psycopg.connect(dsn, autocommit=True, **connect) as one,
        psycopg.connect(dsn, autocommit=True, **connect) as other,
    ):
        seen: dict[int, set[int]] = {0: set(), 1: set()}
        pair = (one, other)
        for turn in range(8):
            holder, visitor = pair[turn % 2], pair[1 - turn % 2]
            with holder.transaction():  # what is idle now goes to the visitor, or stays its own
                seen[turn % 2].add(_pid(holder))
                seen[1 - turn % 2].add(_pid(visitor))
        return len(seen[0]) > 1 or len(seen[1]) > 1 or bool(seen[0] & seen[1])


def make_fit(conn: psycopg.Connection[Any]) -> None:
    """Make a new connection fit for transactions of handlers: keepalives on a session of our own, else nothing prepared."""
    if conn.execute(_KEEPALIVES, (conn.info.backend_pid,)).rowcount == 0:
        conn.prepare_threshold = None


async def make_fit_async(conn: psycopg.AsyncConnection[Any]) -> None:
    """The same."""
    if (await conn.execute(_KEEPALIVES, (conn.info.backend_pid,))).rowcount == 0:
        conn.prepare_threshold = None


async def ask_asyncpg(conn: Any) -> bool:
    """The same for asyncpg; False: a pooler is between, and the connection has to be made with statement_cache_size=0."""
    try:
        await conn.execute(_KEEPALIVES_ASYNCPG.format(pid=conn.get_server_pid()))
    except Exception as error:
        if getattr(error, "sqlstate", None) == "26000":
            return False
        raise
    return True


def _pid(conn: psycopg.Connection[Any]) -> int:
    row = psycopg.ClientCursor(conn).execute("select pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])
