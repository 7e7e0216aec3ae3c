"""What a worker asks of the database before it goes on record, and when something is missing there later."""

from __future__ import annotations

import contextlib
import logging
from difflib import get_close_matches
from typing import TYPE_CHECKING

from tallybook._db import migrate, rates
from tallybook._db.driver import Connection, Error, connect
from tallybook._db.link import CONNECT
from tallybook._db.schema import UNDEFINED, refusal
from tallybook._worker.claim.limits import check_limits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tallybook._worker.run.served import ServedApp

__all__ = ["checked", "explained"]

log = logging.getLogger("tallybook.worker")

_TWINS = """\
select n.name, t.app, t.definition ->> 'queue' from tallybook.tasks t, unnest(t.aliases || t.name) n(name)
 where t.app <> %s and n.name = any (%s) order by n.name"""


def checked(app: ServedApp, dsn: str, queues: Iterable[str], *, lives: bool) -> int:
    """Check the schema and declare the app's limits; the version that a library may expect of it.

    Raises SchemaError, and ConfigError for a limit that nobody has set, where the worker `lives` for more than a drain.
    Warns of task names that another app has, and of queues that look misspelt.
    """
    with connect(dsn, connect_timeout=10, autocommit=True) as conn:
        expected = migrate.check(conn).expected
        _warn_of_twins(app, conn)
        declared = rates.registered(
            app._rate_rules.values(), app._concurrency_rules.values(), app._breaker_rules.values()
        )
        conn.execute(rates.REGISTER.worker, (app.name, declared))
        if lives:
            check_limits(app.tasks.values(), conn.execute(rates.NAMES.worker).fetchone())
        known = [row[0] for row in conn.execute("select name from tallybook.queues")]
    for queue in queues:
        if queue not in known and (near := get_close_matches(queue, known, 1, 0.75)):
            log.warning("no job was ever put into queue %r; did you mean %r? It is served all the same", queue, near[0])
    return expected


def _warn_of_twins(app: ServedApp, conn: Connection) -> None:
    """Two apps with one task name would run each other's jobs on one queue; the catalogue has one entry for both."""
    for name, other, queue in conn.execute(_TWINS, (app.name, list(app._names))).fetchall():
        both = " It has the same queue there: each runs jobs that are meant for the other." * (
            queue == app._names[name].queue
        )
        log.warning(
            "task %r is on record as one of app %r, not of app %r.%s Give one of them another name, unless the app was renamed",
            name, other, app.name, both,
        )  # fmt: skip


def explained(error: BaseException, dsn: str, expected: int) -> BaseException:
    """What is missing in the schema may be so because it is another one by now; then that is the error."""
    if not isinstance(error, Error) or error.sqlstate not in UNDEFINED:
        return error
    with contextlib.suppress(Error), connect(dsn, **CONNECT) as conn:
        return refusal(conn, expected) or error
    return error
