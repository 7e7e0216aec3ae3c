"""Whether a worker can hold a session of its own, and what it has to say where it cannot."""

from __future__ import annotations

import logging
from typing import Any

from tallybook._db.driver import AsyncConnection, connect
from tallybook._db.link import CONNECT, Link, dsn_for_people
from tallybook._db.pooler import UNGUARDED, is_behind_pooler, shares_sessions
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import ConfigError

log = logging.getLogger("tallybook.worker")

# The same name is not the same database: another server may have one, too.
_WHERE = "select s.system_identifier, current_database()::text from pg_control_system() s"


async def hold(link: Link, settings: WorkerSettings) -> bool:
    """Whether heartbeat and listener hold sessions; looked at once, while starting. ConfigError for a wrong direct DSN.

    Behind a pooler in transaction mode they do not, unless there is a DSN that leads past it. Says so in the log.
    """
    if link.pooled:
        await link.run(_say_unguarded)
    if not settings.notify:
        return False
    if settings.direct_dsn:
        direct: str = settings.direct_dsn
        here = await link.run(_where)
        session = await link.until(lambda: _is_direct(direct, here))
        if session:
            return True
        log.warning("the direct DSN (%s) leads to a pooler in transaction mode, too", dsn_for_people(direct))
    elif not link.pooled:
        return True
    log.info(
        "behind a pooler in transaction mode: this worker holds no session. It looks for jobs every %g s and is not woken, "
        "and its death is seen after its lease of %g s, not at once. --direct-dsn gives it a way past the pooler",
        settings.poll.total_seconds(), settings.lease.total_seconds(),
        extra={"event": "pooled"},
    )  # fmt: skip
    return False


async def _where(conn: AsyncConnection) -> Any:
    return await (await conn.execute(_WHERE)).fetchone()


def _is_direct(dsn: str, here: Any) -> bool:
    with connect(dsn, **CONNECT) as conn:
        if conn.execute(_WHERE).fetchone() != here:
            raise ConfigError("direct_dsn", dsn_for_people(dsn), "it leads to another database than the DSN")
        if not is_behind_pooler(conn):
            return True
    return not shares_sessions(dsn, connect_timeout=10)  # a pooler in session mode is as good


async def _say_unguarded(conn: AsyncConnection) -> None:
    for name, value, wanted in await (await conn.execute(UNGUARDED)).fetchall():
        log.warning(
            "%s is %r for this role or database, and behind a pooler a worker cannot change it for itself; "
            "it works best with: alter role ... set %s = %r",
            name, value, name, wanted,
        )  # fmt: skip
