"""What answers on a connection: a pooler in transaction mode in front of the server, or a hot standby.

Behind a pooler, each transaction may run on another session of the server. So the session gets no settings, no named
prepared statements, no session-level advisory locks and no LISTEN. A pooler invents the key data by which a client
cancels its statements. So the process number that libpq has is not that of the answering backend.
"""

from dataclasses import dataclass
from typing import Any

import psycopg

from tallybook._db.sync import got

IS_SESSION = "select pg_backend_pid() = %s::int"

# The server finds a lost client within 25 s and ends its transaction, which releases its locks. Set only on a session
# of our own.
_KEEPALIVES = """\
select set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
       set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '15000', false)
 where pg_backend_pid() = %s::int"""
KEEPALIVES = (
    "set tcp_keepalives_idle = 10; set tcp_keepalives_interval = 5; set tcp_keepalives_count = 3;"
    " set tcp_user_timeout = 15000"
)
# asyncpg prepares every statement with a result by name, which is not possible yet.
_KEEPALIVES_ASYNCPG = f"""\
do $$ begin
  if pg_backend_pid() <> {{pid:d}} then raise exception 'a pooler is between' using errcode = '26000'; end if;
end $$;
{KEEPALIVES}"""

# The settings that a session of our own would have changed, see SESSION in link.py: (name, value, wanted) if it
# differs.
UNGUARDED = """\
select s.name, s.setting, v.wanted
  from (values ('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'),
               ('default_transaction_isolation', 'read committed'),
               ('default_transaction_read_only', 'off')) v(name, wanted)
  join pg_settings s on s.name = v.name
 where s.setting <> v.wanted"""


def is_behind_pooler(conn: psycopg.Connection[Any]) -> bool:
    """Whether the session that answers on this connection is not the one that it was opened with."""
    cursor = psycopg.ClientCursor(conn)  # one simple query: nothing is prepared
    return cursor.execute(IS_SESSION, (conn.info.backend_pid,)).fetchone() != (True,)


def shares_sessions(dsn: str, **connect: Any) -> bool:
    """Whether two connections by this DSN shared a session: then there is a pooler, not in session mode."""
    with (
        psycopg.connect(dsn, autocommit=True, **connect) as one,
        psycopg.connect(dsn, autocommit=True, **connect) as other,
    ):
        seen: dict[Any, set[int]] = {one: set(), other: set()}
        for turn in range(8):  # a busy pooler might hide it
            holder, visitor = (other, one) if turn % 2 else (one, other)
            with holder.transaction():  # an idle session is now given to the visitor, or stays its own
                seen[holder].add(_pid(holder))
                seen[visitor].add(_pid(visitor))
        return len(seen[one]) > 1 or len(seen[other]) > 1 or bool(seen[one] & seen[other])


async def make_fit(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Fit a connection for handlers' transactions: on its own session, with keepalives and prepared statements."""
    if (await got(conn.execute(_KEEPALIVES, (conn.info.backend_pid,)))).rowcount:
        conn.prepare_threshold = 5


async def ask_asyncpg(conn: Any) -> bool:
    """The same for asyncpg; False: there is a pooler, and the connection needs statement_cache_size=0."""
    try:
        await conn.execute(_KEEPALIVES_ASYNCPG.format(pid=conn.get_server_pid()))
    except Exception as error:
        if getattr(error, "sqlstate", None) == "26000":
            return False
        raise
    return True


def _pid(conn: psycopg.Connection[Any]) -> int:
    ((pid,),) = psycopg.ClientCursor(conn).execute("select pg_backend_pid()").fetchall()
    return int(pid)


# While a receiver runs and has replayed everything but the newest page, the lag is zero: a record or two are being
# replayed. Otherwise only the age of the last replayed transaction is known; for an idle primary that is old.
LAG = """\
pg_is_in_recovery(), exists (select from pg_stat_wal_receiver),
case when not pg_is_in_recovery() then 0
     when exists (select from pg_stat_wal_receiver) and not pg_is_wal_replay_paused()
      and pg_wal_lsn_diff(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) < 8192 then 0
     else extract(epoch from clock_timestamp() - pg_last_xact_replay_timestamp()) end::float8"""
"""Columns of a select: the values of a Standby."""
BEHIND = 10.0  # seconds from which on the lag is worth a warning


@dataclass(frozen=True, slots=True)
class Standby:
    """A server that is used for reads instead of the primary."""

    in_recovery: bool  # False: it is a primary
    receives: bool  # whether it is connected to its primary
    lag: float | None  # seconds; None: it has replayed nothing yet

    @property
    def is_behind(self) -> bool:
        """Whether its data may be old."""
        return self.in_recovery and (not self.receives or self.lag is None or self.lag >= BEHIND)

    def __str__(self) -> str:
        if not self.in_recovery:
            return "read from a primary: no standby is at this address"
        how = "by an unknown time" if self.lag is None else f"{self.lag:.1f} s"
        cut_off = "" if self.receives else ", which receives nothing from its primary"
        return f"read from a standby, {how} behind{cut_off}"
