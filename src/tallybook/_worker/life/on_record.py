"""Checks in the database before a worker registers, and when something is missing there later.

One of them is whether the worker can hold its own session.
"""

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from tallybook._db import migrate
from tallybook._db.declared import Declared
from tallybook._db.driver import Connection, Error, connect
from tallybook._db.link import CONNECT, Link, dsn_for_people
from tallybook._db.migrate import UNDEFINED, refusal
from tallybook._db.nodes import foreign_ids
from tallybook._db.pooler import UNGUARDED, is_behind_pooler, shares_sessions
from tallybook._model.durations import format_duration
from tallybook._task.task import Owner
from tallybook._worker.jobs import AnyTask
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import ConfigError

log = logging.getLogger("tallybook.worker")

_NAMES = Declared("_limit_names() -> text[]")
REGISTER = Declared("_limits_register(p_app text, p_rules jsonb) -> void")
_TWINS = """\
select n.name, t.app, t.definition ->> 'queue' from tallybook.tasks t, unnest(t.aliases || t.name) n(name)
 where t.app <> %s and n.name = any (%s) order by n.name"""


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part of what the code declares for all nodes."""

    at: int = 0
    """Its position among the nodes, in the order of their numbers."""
    of: int = 1
    """How many nodes there are."""
    home: bool = True
    """Whether the code's schedules are stored there."""
    number: int | None = None
    """The number that the list has for the node; None: the list has no numbers."""


WHOLE = Part()


def limits(app: Owner, part: Part) -> str:
    """Return the limits of the app's code, or a node's part, as workers store them. ConfigError: a limit too small."""
    rules = {
        "rates": [asdict(rule.part(part.at, part.of)) for rule in app._rate_rules.values()],
        "concurrency": [asdict(rule.part(part.at, part.of)) for rule in app._concurrency_rules.values()],
        "breakers": list(map(asdict, app._breaker_rules.values())),
    }
    return json.dumps(rules, default=format_duration)


def checked(app: Owner, queues: Iterable[str], part: Part, lives: bool, conn: Connection) -> int:
    """Check the schema and store the app's limits; return the schema version that a library may expect.

    Raises SchemaError, and ConfigError for another node's database, or for an undeclared limit if the worker `lives`
    for more than a drain. Warns of job ids of another node, task names of another app, and queues that look misspelt.
    """
    expected = migrate.check(conn)
    if part.number is not None and (found := migrate.info(conn).node) != part.number:
        hint = "Correct the address: `tallybook node add NAME ADDRESS`; `tallybook node check` shows all nodes"
        reason = f"the database {conn.info.dbname!r} at its address has number {found}"
        raise ConfigError("number of a node", part.number, reason, hint=hint)
    if foreign := foreign_ids(conn):
        log.warning("%s. %s", *foreign)
    _warn_of_twins(app, conn)
    conn.execute(REGISTER.worker, (app.name, limits(app, part)))
    if lives:
        _check_limits(app.tasks.values(), conn.execute(_NAMES.worker).fetchone())
    known = [row[0] for row in conn.execute("select name from tallybook.queues")]
    for queue in queues:
        if queue not in known and (near := get_close_matches(queue, known, 1, 0.75)):
            log.warning("queue %r has never had a job; did you mean %r? The worker serves it anyway", queue, near[0])
    return expected


def _warn_of_twins(app: Owner, conn: Connection) -> None:
    """Warn of two apps with one task name: on one queue they run each other's jobs, and the catalogue has one entry."""
    for name, other, queue in conn.execute(_TWINS, (app.name, list(app._names))).fetchall():
        both = " It has the same queue there: each runs jobs that are meant for the other." * (
            queue == app._names[name].queue
        )
        log.warning(
            "task %r is recorded for app %r, not for app %r.%s Rename one of them, unless the app was renamed",
            name, other, app.name, both,
        )  # fmt: skip


def explained(error: BaseException, dsn: str, expected: int) -> BaseException:
    """Return the error, or a SchemaError if something is missing because the schema has changed since."""
    if not isinstance(error, Error) or error.sqlstate not in UNDEFINED:
        return error
    with contextlib.suppress(Error), connect(dsn, **CONNECT) as conn:
        return refusal(conn, expected) or error
    return error


def _check_limits(tasks: Iterable[AnyTask], known: Sequence[list[str]] | None) -> None:
    """Raise ConfigError for a limit declared neither in code nor in the database, or a `{name}` that is no argument."""
    (names,) = known or ([],)
    for task in tasks:
        _check_arguments(task, "fair_key", task.options.fair_key or "")
        _check_arguments(task, "unique", task.options.unique if isinstance(task.options.unique, tuple) else "")
        for key in task.options.limits:
            _check_arguments(task, "limits", key)
            if not any(_holds(name, key) for name in names):
                near = get_close_matches(key.split(":")[0], names, 2) or sorted(names)[:5]
                hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "There is none"
                hint += "; app.rate_limit(...) and app.concurrency_limit(...) declare one"
                raise ConfigError(f"limits of task {task.name!r}", key, "no limit of that name is declared", hint=hint)


def _holds(name: str, key: str) -> bool:
    """Return whether a rule of this name may apply to jobs of this key: its own rule, or one below it."""
    fixed = key.split("{", maxsplit=1)[0]
    return name == key or key.startswith(f"{name}:") or ("{" in key and name.startswith(fixed))


def _check_arguments(task: AnyTask, option: str, value: str | tuple[str, ...]) -> None:
    """Raise ConfigError for a name in this tuple, or in braces in this text, that is no argument of the task."""
    for wanted in re.findall(r"\{(\w+)\}", value) if isinstance(value, str) else value:
        if wanted not in task.args.names and not task.args.is_open:
            known = sorted(task.args.names)
            near = get_close_matches(wanted, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known) or 'none'}"
            raise ConfigError(f"{option} of task {task.name!r}", value, f"it has no argument {wanted!r}", hint=hint)


# An equal name does not mean the same database: another server may have one with that name.
_WHERE = "select s.system_identifier, current_database()::text from pg_control_system() s"


async def holds_session(link: Link, settings: WorkerSettings) -> bool:
    """Return whether heartbeat and listener hold sessions; checked once, at the start. Logs it if they do not.

    Behind a pooler in transaction mode they hold none, unless a direct DSN bypasses it. ConfigError: a wrong one.
    """
    if link.pooled:
        for name, value, wanted in await link.rows(UNGUARDED):
            log.warning(
                "%s is %r for this role or database, and a worker behind a pooler cannot override it; "
                "recommended: alter role ... set %s = %r",
                name, value, name, wanted,
            )  # fmt: skip
    if not settings.notify:
        return False
    if settings.direct_dsn:
        direct: str = settings.direct_dsn
        (here,) = await link.rows(_WHERE)
        session = await link.until(lambda: _is_direct(direct, here))
        if session:
            return True
        log.warning("the direct DSN (%s) also leads to a pooler in transaction mode", dsn_for_people(direct))
    elif not link.pooled:
        return True
    log.info(
        "behind a pooler in transaction mode: this worker holds no session. It polls for jobs every %g s, "
        "and its death is noticed after its lease of %g s. Pass --direct-dsn to connect past the pooler",
        settings.poll.total_seconds(), settings.lease.total_seconds(),
        extra={"event": "pooled"},
    )  # fmt: skip
    return False


def _is_direct(dsn: str, here: Any) -> bool:
    with connect(dsn, **CONNECT) as conn:
        if conn.execute(_WHERE).fetchone() != here:
            raise ConfigError("direct_dsn", dsn_for_people(dsn), "it leads to another database than the DSN")
        if not is_behind_pooler(conn):
            return True
    return not shares_sessions(dsn, connect_timeout=10)  # a pooler in session mode is as good
