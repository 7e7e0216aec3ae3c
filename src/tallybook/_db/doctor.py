"""The doctor: checks that only a client can make (schema of this release, clocks, a pooler), then those of doctor.sql.

Each group of checks is one statement in its own transaction with its own time limit. If a group takes long, meets a
lock or lacks a right, that is a finding, and the other groups still run. Settings are limited to a transaction, because
there may be a pooler.
"""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg

from tallybook._db import migrate
from tallybook._db.declared import Declared
from tallybook._db.link import CONNECT, dsn_for_people
from tallybook._db.nodes import foreign_ids
from tallybook._db.policy import first_line
from tallybook._db.pooler import UNGUARDED, is_behind_pooler
from tallybook._model.maintenance import Finding
from tallybook.errors import QueueUnavailable

GROUPS = ("horizon", "storage", "settings", "workers", "queues", "maintenance", "counters", "roles")
PATIENCE = timedelta(seconds=5)
_RECOUNT = timedelta(minutes=10)

Conn = psycopg.Connection[Any]
Found = Finding | list[Finding]
_DOCTOR = Declared("doctor(about text) -> rows (name text, level text, finding text, advice text, details jsonb)")
_COUNTERS = Declared("""
  _doctor_counters(p_asked boolean)
  -> rows (name level finding advice text, details jsonb)""", p_asked="false")  # fmt: skip
_LIMITS = """\
select set_config('statement_timeout', %s, true), set_config('lock_timeout', '1s', true),
       set_config('jit', 'off', true), set_config('datestyle', 'ISO', true)"""
_OLDEST = 150000


def doctor(dsn: str, *, verify: bool = False) -> list[Finding]:
    """Run all checks on their own connection. Raises QueueUnavailable if the server cannot be reached."""
    try:
        conn = psycopg.connect(dsn, **CONNECT)
    except psycopg.OperationalError as error:
        raise QueueUnavailable(dsn_for_people(dsn), str(error)) from error
    with conn:
        return list(examine(conn, verify=verify))


def examine(conn: Conn, *, verify: bool = False, patience: timedelta = PATIENCE) -> Iterator[Finding]:
    """Run all checks in order, on a connection in autocommit."""
    for check in (_connection, _schema, clock, _pooler):
        yield from _bounded(conn, check.__name__.removeprefix("_"), patience, check)
    there = _bounded(conn, "checks", patience, _missing)
    yield from there
    for group in GROUPS if not there else ():
        asked = verify and group == "counters"
        yield from _bounded(conn, group, _RECOUNT if asked else patience, partial(_group, group=group, verify=verify))


def _missing(conn: Conn) -> list[Finding]:
    if conn.execute("select to_regprocedure('tallybook.doctor(text, timestamptz)') is not null").fetchone() == (True,):
        return []
    text = "the other checks were skipped: this database has no tallybook.doctor"
    return [Finding(name="checks", level="note", finding=text, advice="See the check schema.")]


def _bounded(conn: Conn, name: str, patience: timedelta, look: Callable[[Conn], Found]) -> list[Finding]:
    """Return the findings of `look` in a transaction with a time limit; an error or a timeout is a finding, too."""
    milliseconds = f"{int(patience.total_seconds() * 1000)}ms"
    try:
        with conn.transaction():
            conn.execute(_LIMITS, (milliseconds,))
            found = look(conn)
            return found if isinstance(found, list) else [found]
    except psycopg.errors.QueryCanceled:
        level, text = "note", f"could not be checked within {patience.total_seconds():g} s"
        advice = "The server is busy, or something holds a lock. Run it again."
    except psycopg.Error as error:
        level, text = "note", f"could not be checked: {first_line(error)}"
        advice = "Run it again. If it fails again, see the check schema."
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            level, advice = "warning", "Run it as a user with the role operator, or the owner of the schema."
        elif conn.closed:
            level, text = "problem", f"the connection was lost: {first_line(error)}"
            advice = "Check whether the server is running, and read its log."
    return [Finding(name=name, level=level, finding=text, advice=advice)]


def _group(conn: Conn, *, group: str, verify: bool) -> list[Finding]:
    # Requested by name, counters are recounted at any size; without --verify they run with the other checks.
    query, params = (_COUNTERS, ()) if group == "counters" and not verify else (_DOCTOR, (group,))
    return [
        Finding(name=name, level=level, finding=text, advice=advice, details=more)
        for name, level, text, advice, more in conn.execute(query.worker, params).fetchall()
    ]


def _connection(conn: Conn) -> Finding:
    info = conn.info
    ((standby, started),) = conn.execute("select pg_is_in_recovery(), pg_postmaster_start_time()").fetchall()
    version = info.parameter_status("server_version")
    details = {"server_version": version, "started_at": started.isoformat(), "standby": standby}
    text = f"PostgreSQL {version}, database {info.dbname!r}, as {info.user!r}"
    level, advice = "ok", None
    if standby:
        level, text = "problem", f"{text}: a standby"
        remedy = "Connect to the primary: target_session_attrs=read-write finds it."
        advice = f"Nothing can be enqueued or claimed here. {remedy}"
    elif info.server_version < _OLDEST:
        level, text, advice = "problem", f"{text}: too old", "Upgrade the server to 15 or newer."
    return Finding(name="connection", level=level, finding=text, advice=advice, details=details)


def _schema(conn: Conn) -> Finding:
    found = migrate.info(conn)
    details = {
        "version": found.version or None,
        "expected": found.expected,
        "routines_current": found.routines_current,
        "works_from": found.works_from,
    }
    shown = f"version {found.version}, and this program has {found.expected}"
    level, text, advice = "ok", f"version {found.version}, up to date", None
    if error := migrate.verdict(found.version, found.works_from, found.expected, conn.info.dbname):
        level, text, advice = "problem", f"{shown}: they are incompatible", "Run `tallybook migrate`."
        if found.version == 0:
            text = "there is no schema tallybook in this database"
        elif found.version > found.expected:
            advice = error.hint or "Update the package tallybook here."
    elif found.version > found.expected:
        level, text = "note", f"{shown}: they are compatible"
        advice = "Update the package tallybook here when convenient."
    elif not found.routines_current:
        level, text = "warning", f"version {found.version}, with functions of a different release"
        advice = "Run `tallybook migrate`."
    if level != "problem" and (foreign := foreign_ids(conn)):
        level, (text, advice) = "problem", foreign
    return Finding(name="schema", level=level, finding=text, advice=advice, details=details)


def clock(conn: Conn, now: Callable[[], float] = time.time) -> Finding:
    """Measure how far the client's clock is from the server's, from the shortest of several round trips."""
    trips: list[tuple[float, float]] = []
    for _ in range(7):
        before = now()
        ((server,),) = conn.execute("select extract(epoch from clock_timestamp())::float8").fetchall()
        after = now()
        trips.append((abs(after - before), server - (before + after) / 2))
    trip, ahead = min(trips)
    off = max(0.0, abs(ahead) - trip / 2)
    details = {"server_ahead_s": round(ahead, 6), "round_trip_s": round(trip, 6)}
    if off < 1:
        text = f"this machine's clock and the server's are {abs(ahead) * 1000:.0f} ms apart at most"
        return Finding(name="clock", level="ok", finding=text, details=details)
    text = f"this machine's clock is {abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'} the server's"
    advice = (
        "Jobs start by the server's clock: times from this machine (run_at, expires_at) are wrong by this difference, "
        "delays are not. Run NTP on both machines."
    )
    return Finding(name="clock", level="warning" if off >= 10 else "note", finding=text, advice=advice, details=details)


def _pooler(conn: Conn) -> Finding:
    if not is_behind_pooler(conn):
        text = "there is no pooler in transaction mode"
        return Finding(name="pooler", level="ok", finding=text, details={"pooled": False})
    # The session's value, not the time limit of this check.
    wrong = [
        {"setting": name, "value": value, "wanted": wanted}
        for name, value, wanted in conn.execute(UNGUARDED.replace("s.setting", "s.reset_val")).fetchall()
    ]
    text = "there is a pooler in transaction mode: workers poll, and notice a dead worker only when its lease expires"
    advice = "If that is too slow, pass `--direct-dsn` to the workers: a DSN that bypasses the pooler."
    if wrong:
        listed = ", ".join(f"{one['setting']} = {one['value']}" for one in wrong)
        text = f"{text}. Its sessions have {listed}, which workers cannot change there"
        wanted = "; ".join(f"{one['setting']} = {one['wanted']}" for one in wrong)
        advice = f"Set for the role of the workers: {wanted}. {advice}"
    details = {"pooled": True, "settings": wrong}
    return Finding(name="pooler", level="warning" if wrong else "note", finding=text, advice=advice, details=details)
