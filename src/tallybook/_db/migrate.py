"""Installing, upgrading and removing the schema `tallybook`.

Numbered files in `sql/migrations` make tables and types, each once; functions and views are applied again as a whole
whenever one of their files has changed. All of it happens in one transaction behind one transaction-level advisory lock,
so two migrations at once follow each other, a failed one leaves nothing behind, and a pooler is no obstacle.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import LiteralString, cast

import psycopg
from psycopg import sql

from tallybook.errors import SchemaMissing, SchemaTooNew, SchemaTooOld

_LOCK = "select pg_advisory_xact_lock(1413565440, 0)"
_FOLDERS = ("functions", "views")


@dataclass(frozen=True)
class SchemaInfo:
    """What is installed in one database, beside what this release brings."""

    version: int
    """Of the schema in the database; 0: none is installed."""
    expected: int
    """Of the schema that this release brings."""
    functions_current: bool
    """Whether functions and views are those of this release."""
    node: int
    """The number that makes this database's job ids its own."""
    server: str
    """PostgreSQL's version."""

    @property
    def current(self) -> bool:
        """Whether a migration would change nothing."""
        return self.version == self.expected and self.functions_current


def migrations() -> list[tuple[int, str, str]]:
    """Number, name and text of every migration that this release brings, in order."""
    folder = resources.files("tallybook") / "sql" / "migrations"
    found = []
    for file in folder.iterdir():
        if match := re.fullmatch(r"(\d{4})_\w+\.sql", file.name):
            found.append((int(match[1]), file.name, file.read_text("utf-8")))
    return sorted(found)


def latest() -> int:
    """The schema version that this release works with."""
    return migrations()[-1][0]


def routines() -> list[tuple[str, str]]:
    """Name and text of every function and view file, in the order in which they are applied."""
    found: list[tuple[str, str]] = []
    for folder in _FOLDERS:
        files = sorted((resources.files("tallybook") / "sql" / folder).iterdir(), key=lambda file: file.name)
        found += [(f"{folder}/{file.name}", file.read_text("utf-8")) for file in files if file.name.endswith(".sql")]
    return found


def digest() -> str:
    """A fingerprint of all functions and views of this release."""
    text = "\n".join(f"{name}\n{body}" for name, body in routines())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def script(*, node: int = 0, since: int = 0) -> str:
    """The whole installation as one SQL text, for people who apply SQL by their own means."""
    parts = ["begin;", f"{_LOCK};", "set local check_function_bodies = off;"]
    parts += [f"-- {name}\n{text.strip()}" for number, name, text in migrations() if number > since]
    parts += [f"-- {name}\n{text.strip()}" for name, text in routines()]
    if since == 0:
        parts.append(_FIRST.format(version=latest(), functions=digest(), node=node, start=_start(node), end=_end(node)))
    else:
        parts.append(_AGAIN.format(version=latest(), functions=digest()))
    return "\n\n".join([*parts, "commit;\n"])


_FIRST = """\
alter sequence tallybook.job_id minvalue {start} maxvalue {end} start {start} restart {start};
insert into tallybook.installation (version, functions, node, system_identifier)
select {version}, '{functions}', {node}, s.system_identifier from pg_control_system() s;"""
_AGAIN = """\
update tallybook.installation set version = {version}, functions = '{functions}', migrated_at = clock_timestamp();"""


def _start(node: int) -> int:
    return (node << 43) or 1


def _end(node: int) -> int:
    return (node << 43) + (1 << 43) - 1


def info(conn: psycopg.Connection) -> SchemaInfo:
    """What is installed in this database."""
    server = conn.info.parameter_status("server_version") or "?"
    row = None
    if conn.execute("select to_regclass('tallybook.installation') is not null").fetchone() == (True,):
        row = conn.execute("select version, functions, node from tallybook.installation").fetchone()
    version, functions, node = cast("tuple[int, str, int]", row) if row else (0, "", 0)
    return SchemaInfo(version, latest(), functions == digest(), node, server)


def check(conn: psycopg.Connection) -> SchemaInfo:
    """Like `info`; raises SchemaMissing, SchemaTooOld or SchemaTooNew unless this release can work with what is there."""
    found = info(conn)
    if found.version == 0:
        raise SchemaMissing(conn.info.dbname)
    if found.version < found.expected:
        raise SchemaTooOld(found.version, found.expected)
    if found.version > found.expected:
        raise SchemaTooNew(found.version, found.expected)
    return found


def migrate(conn: psycopg.Connection, *, node: int = 0, on_step: Callable[[str], None] | None = None) -> list[str]:
    """Install or upgrade the schema; returns what was done, an empty list if it was all there.

    `node` (0 to 1023) is set once, at the first installation. Raises SchemaTooNew where a newer release has been here.
    The connection must not be inside a transaction; it is left outside of one.
    """
    done: list[str] = []
    with conn.transaction():
        conn.execute("set local client_min_messages = warning")
        conn.execute(_LOCK)
        found = info(conn)
        if found.version > found.expected:
            raise SchemaTooNew(found.version, found.expected)
        if found.current:
            return []
        for name, text in _steps(found):
            if on_step:
                on_step(name)
            conn.execute(_trusted(text))
            done.append(name)
        first = found.version == 0
        last = _FIRST if first else _AGAIN
        conn.execute(
            _trusted(last.format(version=latest(), functions=digest(), node=node, start=_start(node), end=_end(node)))
        )
    return done


def _steps(found: SchemaInfo) -> Iterator[tuple[str, str]]:
    for number, name, text in migrations():
        if number > found.version:
            yield f"migrations/{name}", text
    # Functions name one another in any order.
    yield (
        "functions and views",
        "\n".join(["set local check_function_bodies = off;", *(text for _, text in routines())]),
    )


def uninstall(conn: psycopg.Connection) -> bool:
    """Remove the schema with all jobs in it. False: there was none.

    What of yours depends on it (a view over tallybook.job, say) stops the removal with PostgreSQL's own error.
    """
    with conn.transaction():
        conn.execute("set local client_min_messages = warning")
        conn.execute(_LOCK)
        if info(conn).version == 0:
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
        conn.execute(sql.SQL("drop schema tallybook cascade"))
    return True


def _trusted(text: str) -> LiteralString:
    """Text that this package ships, and that holds no value from outside."""
    return text
