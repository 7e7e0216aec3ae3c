"""Installing, upgrading and removing the schema `tallybook`.

Numbered files in `sql/migrations` create tables and types, each once; the first one names the files that contain them.
Functions and views are applied again as a whole whenever one of their files has changed. All of this runs in one
transaction behind one transaction-level advisory lock. So two migrations at the same time run one after the other, a
failed one leaves nothing behind, and a pooler is no obstacle. Migrations may run under load: see schema_load.

A release expects the version of its own newest migration. `works_from` of a newer schema is the lowest expected version
of a library that can use it. An older schema lacks things that this release needs.
"""

import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import psycopg

from tallybook._db.schema_load import BUSY, altered, aside, holders, set_aside, take
from tallybook._db.sql_lines import commented, profiled, rights
from tallybook.errors import SchemaBusy, SchemaError, SchemaMissing, SchemaTooNew, SchemaTooOld, SchemaUnreleased

_LOCK = "select pg_advisory_xact_lock(1413565440, 0)"
PLAIN = """\
set transaction isolation level read committed;
set local search_path = pg_catalog, pg_temp; set local standard_conforming_strings = on;
set local client_min_messages = warning"""
"""First in each transaction of the owner. No function or operator that others have put into its search_path may run.
A transaction that has waited for another one's lock sees its work."""
_NO_TIMEOUTS = """\
select set_config(name, '0', true) from pg_settings
 where name in ('statement_timeout', 'lock_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout')"""
# Citus would create or drop everything on its other nodes, too, which have their own jobs, or manage the tables.
_NO_PROPAGATION = """\
select set_config(s, 'off', true) from unnest('{citus.enable_ddl_propagation,citus.use_citus_managed_tables}'::text[]) s
 where current_setting(s, true) is not null"""
_ROOMS = ("checks", "core", "lookups", "unique_key", "control", "parts", "read", "ops")
_TABLES = re.compile(r"/tables(/|\.sql$)")
_INCLUDE = re.compile(r"^\\ir \.\./(\S+)$", re.MULTILINE)
UNDEFINED = ("42883", "42P01", "42703", "42704", "3F000")
"""SQLSTATEs of a missing function, table, column, type or schema: the schema may have been migrated, or dropped."""

# Reads the catalog itself: the cache behind to_regclass may be older than a lock that this transaction has waited for.
_THERE = """\
select coalesce(bool_or(c.relname = 'installed'), false), coalesce(bool_or(c.relname = 'installation'), false)
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where n.nspname = 'tallybook' and c.relname in ('installed', 'installation')"""
_ROW = "select to_jsonb(i)::text from tallybook.installed i"
_TABLE_ROW = "select to_jsonb(i)::text from tallybook.installation i"


@dataclass(frozen=True)
class SchemaInfo:
    """The schema installed in one database, compared with that of this release."""

    version: int  # the version of the schema in the database; 0: none is installed
    expected: int  # the version of this release's schema
    routines_current: bool  # whether functions and views are those of this release
    node: int  # the number that makes this database's job ids unique
    server: str  # PostgreSQL's version
    works_from: int | None = None  # the lowest expected version of a release that can use it; None: only its own

    @property
    def current(self) -> bool:
        """Whether a migration would change nothing."""
        return self.version == self.expected and self.routines_current

    @property
    def works(self) -> bool:
        """Whether this release can use it."""
        return verdict(self.version, self.works_from, self.expected, "") is None


def migrations() -> list[tuple[int, str, str]]:
    """Return number, name and text of every migration, in order, with the files that it includes, as in psql."""
    folder = resources.files("tallybook") / "sql"

    def included(match: re.Match[str]) -> str:
        return folder.joinpath(*match[1].split("/")).read_text("utf-8").rstrip()

    return [(n, name, commented(_INCLUDE.sub(included, file.read_text("utf-8")))) for n, name, file in _numbered()]


def _numbered() -> list[tuple[int, str, Traversable]]:
    folder = resources.files("tallybook") / "sql" / "migrations"
    found = ((re.fullmatch(r"(\d{4})_\w+\.sql", file.name), file) for file in folder.iterdir())
    return sorted((int(match[1]), file.name, file) for match, file in found if match)


def latest() -> int:
    """Return the schema version of this release."""
    return _numbered()[-1][0]


@cache
def routines() -> list[tuple[str, str]]:
    """Return path and text of each function and view, and of the generated rights, as applied: views last."""
    folder = resources.files("tallybook") / "sql"
    found = [file for room in _ROOMS for file in _files(folder / room, room)]
    found.append(("ops/roles/_rights.sql", rights([text for _, text in found])))
    return sorted((file for file in found if not _TABLES.search(file[0])), key=lambda file: "/views/" in file[0])


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of every SQL file below this folder, by name."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{path}/{entry.name}")
        elif entry.name.endswith(".sql"):
            yield f"{path}/{entry.name}", profiled(commented(entry.read_text("utf-8")))


@cache
def digest() -> str:
    """Return a fingerprint of all functions and views of this release."""
    text = "\n".join(f"{name}\n{body}" for name, body in routines())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def script(*, node: int = 0) -> str:
    """Return the whole installation as one SQL text, for people who apply SQL with their own tools."""
    parts = ["begin;", f"{PLAIN};", f"{_NO_PROPAGATION};", f"{_LOCK};", "set local check_function_bodies = off;"]
    parts += [f"-- {name}\n{aside(text).strip()}" for _, name, text in migrations()]
    parts += [f"-- {name}\n{text.strip()}" for name, text in routines()]
    parts.append(_recorded(node, first=True))
    return "\n\n".join([*parts, "commit;\n"])


_FIRST = """\
alter sequence tallybook.job_id minvalue {start} maxvalue {end} start {start} restart {start};
insert into tallybook.installation (version, routines, node, system_identifier)
select {version}, '{routines}', {node}, s.system_identifier from pg_control_system() s;"""
_AGAIN = """\
update tallybook.installation set version = {version}, routines = '{routines}', migrated_at = clock_timestamp();
select tallybook._roles_apply();"""


def _recorded(node: int, *, first: bool) -> str:
    """Return the statements that record the installation, or its new version."""
    ids = {"start": (node << 43) or 1, "end": ((node + 1) << 43) - 1}
    return (_FIRST if first else _AGAIN).format(version=latest(), routines=digest(), node=node, **ids)


def installed(conn: psycopg.Connection[Any]) -> dict[str, Any] | None:
    """Return the row of the installation, or None. As JSON, because other releases may have other columns.

    Raises SchemaUnreleased for a schema made before 0.1.0, which cannot be upgraded to a release.
    """
    there = conn.execute(_THERE).fetchone()
    if there == (False, False):
        return None
    row = conn.execute(_ROW if there == (True, True) else _TABLE_ROW).fetchone()
    found: dict[str, Any] | None = json.loads(row[0]) if row else None
    if found is not None and "routines" not in found:
        raise SchemaUnreleased(found["version"])
    return found


def is_installed(conn: psycopg.Connection[Any]) -> bool:
    """Whether this database has a schema of Tallybook, of any version; your own schema of that name does not count."""
    return conn.execute(_THERE).fetchone() in ((True, True), (False, True))


def verdict(version: int, works_from: int | None, expected: int, database: str) -> SchemaError | None:
    """Return why a release that expects this version cannot use a schema of that version; None if it can."""
    if version == 0:
        return SchemaMissing(database)
    if version < expected:
        return SchemaTooOld(version, expected)
    if version > expected and (works_from is None or works_from > expected):
        return SchemaTooNew(version, expected)
    return None


def refusal(conn: psycopg.Connection[Any], expected: int) -> SchemaError | None:
    """Return the verdict on a database: one short statement, outside a transaction."""
    try:
        row = conn.execute(_ROW).fetchone()
        found = json.loads(row[0]) if row else {"version": 0}
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        found = installed(conn) or {"version": 0}
    return verdict(found["version"], found.get("works_from"), expected, conn.info.dbname)


def info(conn: psycopg.Connection) -> SchemaInfo:
    """Return what is installed in this database."""
    server = conn.info.parameter_status("server_version") or "?"
    row = installed(conn) or {"version": 0, "routines": "", "node": 0}
    current = row["routines"] == digest()
    return SchemaInfo(row["version"], latest(), current, row["node"], server, row.get("works_from"))


def check(conn: psycopg.Connection) -> int:
    """Return the schema version that this release expects. Raises a SchemaError if it cannot use the schema."""
    found, expected = installed(conn) or {"version": 0}, latest()
    if error := verdict(found["version"], found.get("works_from"), expected, conn.info.dbname):
        raise error
    return expected


def migrate(
    conn: psycopg.Connection,
    *,
    node: int = 0,
    on_step: Callable[[str], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
    patience: timedelta = timedelta(minutes=5),
) -> list[str]:
    """Install or upgrade the schema. Returns the applied steps, an empty list if there was nothing to do.

    `node` (0 to 1023) is set once, at the first installation. The connection must be outside a transaction, before and
    after. Workers and producers may run meanwhile. If their transactions hold the tables for longer than a moment, the
    migration lets them pass, calls `on_wait` with their names and tries again. After `patience` it raises SchemaBusy.
    Raises SchemaTooNew if the schema is of a newer release and this one cannot use it; a newer schema that it can use
    is left unchanged.
    """
    until, patient = time.monotonic() + patience.total_seconds(), False
    while True:
        try:
            return _migrate(conn, node, on_step or (lambda _: None), patient)
        except BUSY:
            by, patient = holders(conn)
        if time.monotonic() >= until:
            raise SchemaBusy(by)
        if on_wait:
            on_wait(by)
        time.sleep(random.uniform(0.5, 1.5))  # everyone who waited behind this migration runs first


def _migrate(conn: psycopg.Connection, node: int, on_step: Callable[[str], None], patient: bool) -> list[str]:
    with conn.transaction():
        # Time-outs of a role must not apply here. Another migration holds no lock but this one: wait for it.
        conn.execute(f"{PLAIN}; {_NO_TIMEOUTS}".encode())
        conn.execute(_NO_PROPAGATION)
        conn.execute(_LOCK)
        found = info(conn)
        if found.version > found.expected and not found.works:
            raise SchemaTooNew(found.version, found.expected)
        if found.version > found.expected or found.current:
            return []
        steps = [(f"migrations/{name}", text) for number, name, text in migrations() if number > found.version]
        if found.version:
            for old in set_aside(conn):
                conn.execute(f"drop function {old}".encode())
            take(conn, altered(text for _, text in steps), patient=patient)
        # Functions name one another in any order.
        texts = ["set local check_function_bodies = off;", *(text for _, text in routines())]
        steps.append(("functions and views", "\n".join(texts)))
        for name, text in steps:
            on_step(name)
            conn.execute(aside(text).encode())
        conn.execute(_recorded(node, first=found.version == 0).encode())
    return [name for name, _ in steps]


def uninstall(conn: psycopg.Connection) -> bool:
    """Remove the schema with all its jobs. Returns False if there was none.

    If objects of yours depend on it (such as a view over tallybook.job), the removal fails with PostgreSQL's own error.
    """
    with conn.transaction():
        conn.execute(PLAIN)
        conn.execute(_NO_PROPAGATION)
        conn.execute(_LOCK)
        if not is_installed(conn):
            return False
        outside = conn.execute(
            "select distinct d.classid::regclass::text, pg_describe_object(d.classid, d.objid, d.objsubid)"
            " from pg_depend d join pg_rewrite r on d.classid = 'pg_rewrite'::regclass and r.oid = d.objid"
            " join pg_class v on v.oid = r.ev_class join pg_class t on t.oid = d.refobjid"
            " where t.relnamespace = 'tallybook'::regnamespace and v.relnamespace <> t.relnamespace"
        ).fetchall()
        if outside:
            names = ", ".join(str(row[1]) for row in outside)
            raise psycopg.errors.DependentObjectsStillExist(f"these depend on schema tallybook: {names}")
        conn.execute("drop schema tallybook cascade")
    return True
