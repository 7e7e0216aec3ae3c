"""The tests' databases: made from a template in a separate thread, and used again for the next test after a reset.

A reset database has the rows and sequences of the template, and one session that earlier tests have used: its plans
are made already, which saves half of a short test's CPU time. If a test has changed the catalog, left a session or a
prepared transaction behind or stored many rows, its database is dropped instead.
"""

import secrets
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from support.database import Connection

CREATE = sql.SQL("create database {} template {} strategy file_copy")
DROP = sql.SQL("drop database if exists {} with (force)")
MOST_ROWS, MOST_TESTS = 1000, 100
"""A database with more rows, or of more tests, is not used again: its tables have grown."""
_CATALOGS = (
    "pg_class", "pg_attribute", "pg_attrdef", "pg_proc", "pg_type", "pg_constraint", "pg_trigger", "pg_rewrite",
    "pg_namespace", "pg_policy", "pg_extension", "pg_event_trigger", "pg_publication", "pg_publication_rel",
    "pg_publication_namespace", "pg_default_acl", "pg_statistic_ext", "pg_cast", "pg_operator",
)  # fmt: skip
# How many changes of the catalogs are on record: none in a copy of the template.
_CHANGES = """\
select sum(pg_stat_get_tuples_inserted(c) + pg_stat_get_tuples_updated(c) + pg_stat_get_tuples_deleted(c))::bigint
  from unnest(%s::regclass[]) c"""
# What is set for the database; what ANALYZE found.
_SETTINGS = """\
select datconnlimit, datdba, datacl::text,
       (select count(*) from pg_db_role_setting s where s.setdatabase = d.oid),
       (select sum(c.reltuples) from pg_class c where c.relnamespace = 'tallybook'::regnamespace)
  from pg_database d where datname = current_database()"""
_LEFT = """\
select (select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
           and backend_type = 'client backend'),
       (select count(*) from pg_prepared_xacts where database = current_database())"""
_SESSION = """\
set session authorization default; reset role; reset all; close all; unlisten *; select pg_advisory_unlock_all();
discard temp; discard sequences; select pg_stat_force_next_flush()"""
_TABLES = """\
select relname, relkind from pg_class
 where relnamespace = 'tallybook'::regnamespace and relkind in ('r', 'S') order by 1"""


class Used(Exception):
    """The database cannot be used again: the message says why."""


@dataclass
class Database:
    """One test's database; `session` is the one that its last test has left in good order."""

    name: str
    dsn: str
    session: Connection | None = None
    tests: int = 0


class Template:
    """The database that the tests' databases are copies of, and what a copy must be like before its next test."""

    def __init__(self, name: str, conn: Connection) -> None:
        self.name = name
        found = conn.execute(_TABLES).fetchall()
        self._tables = [sql.Identifier("tallybook", table) for table, kind in found if kind == "r"]
        sequences = [sql.Identifier("tallybook", sequence) for sequence, kind in found if kind == "S"]
        self._restart = sql.SQL("select ") + sql.SQL(", ").join(
            sql.SQL("setval({}, {}, {})").format(
                sql.Literal(one.as_string(conn)),
                *map(sql.Literal, conn.execute(sql.SQL("select last_value, is_called from {}").format(one)).fetchone()),
            )
            for one in sequences
        )
        self._rows = {at: rows for at, table in enumerate(self._tables) if (rows := self._copied(conn, table))}
        self._filled = sql.SQL("select array_remove(array[{}], null)").format(
            sql.SQL(", ").join(self._differs(conn, at, table) for at, table in enumerate(self._tables))
        )
        self._settings = conn.execute(_SETTINGS).fetchone()

    @staticmethod
    def _copied(conn: Connection, table: sql.Identifier) -> bytes:
        with conn.cursor().copy(sql.SQL("copy {} to stdout").format(table)) as copy:
            return b"".join(bytes(part) for part in copy)

    def _differs(self, conn: Connection, at: int, table: sql.Identifier) -> sql.Composable:
        """An expression: `at` if the table has other rows than in the template, else null."""
        other = sql.SQL("exists (select from {})").format(table)
        if at in self._rows:
            rows = sql.SQL("(select md5(string_agg(t::text, '' order by t::text)) from {} t)").format(table)
            (here,) = conn.execute(sql.SQL("select {}").format(rows)).fetchone()
            other = sql.SQL("{} is distinct from {}").format(rows, sql.Literal(here))
        return sql.SQL("case when {} then {} end").format(other, sql.Literal(at))

    def reset(self, database: Database) -> None:
        """Give it the rows and sequences of the template, or raise Used."""
        if (conn := database.session) is None:
            conn = database.session = psycopg.connect(database.dsn, autocommit=True)
        conn.execute(_SESSION)
        self._alone(conn)
        (changes,) = conn.execute(_CHANGES, (list(_CATALOGS),), prepare=True).fetchone()
        found = conn.execute(_SETTINGS, prepare=True).fetchone()
        if changes or found != self._settings:
            raise Used(f"the catalog was changed: {changes} rows; settings {found}")
        filled = conn.execute(self._filled, prepare=True).fetchone()[0]
        delete = [sql.SQL("delete from {}").format(self._tables[at]) for at in filled]
        with conn.pipeline():
            conn.execute("set session_replication_role = 'replica'")  # no triggers, foreign keys included
            gone = [conn.execute(statement) for statement in (*delete, self._restart)]
        for at in self._rows.keys() & set(filled):
            with conn.cursor().copy(sql.SQL("copy {} from stdin").format(self._tables[at])) as copy:
                copy.write(self._rows[at])
        conn.execute("reset session_replication_role")
        database.tests += 1
        if database.tests == MOST_TESTS or sum(cursor.rowcount for cursor in gone) > MOST_ROWS:
            raise Used("its tables have grown")

    def _alone(self, conn: Connection) -> None:
        """Wait until the sessions of the last test have ended."""
        for _ in range(200):
            sessions, prepared = conn.execute(_LEFT).fetchone()
            if prepared:
                raise Used("a prepared transaction is left")
            if not sessions:
                return
            time.sleep(0.005)
        raise Used("a session is left")


class Aside:
    """Make, reset and drop the tests' databases in a separate thread, so that no test waits for it."""

    def __init__(self, server: Any, template: Template, *, again: bool) -> None:
        self._server, self.template, self._again = server, template, again
        self._conn = psycopg.connect(server.dsn(), autocommit=True)
        self._thread = ThreadPoolExecutor(1)
        self._ready = deque([self._thread.submit(self._make)])
        self._drops: deque[Future[None]] = deque()

    def take(self, *, new: bool = False) -> Database:
        """A database with Tallybook installed and without jobs; `new`: that no test has used."""
        taken = self._thread.submit(self._make) if new else self._ready.popleft()
        if not self._ready:
            self._ready.append(self._thread.submit(self._make))
        return taken.result()

    def give(self, database: Database) -> None:
        """Reset it for the next test, or drop it."""
        if self._again and len(self._ready) < 2:
            self._ready.append(self._thread.submit(self._next, database))
        else:
            self.drop(database)

    def drop(self, database: Database) -> None:
        """Drop it; an error in dropping an earlier one is raised here."""
        self._drops.append(self._thread.submit(self._drop, database))
        while len(self._drops) > 1 and self._drops[0].done():
            self._drops.popleft().result()

    def close(self) -> None:
        """Drop what is left."""
        for ready in self._ready:
            self.drop(ready.result())
        self._thread.shutdown()
        for drop in self._drops:
            drop.result()
        self._conn.close()

    def _make(self) -> Database:
        name = f"tallybook_test_{secrets.token_hex(6)}"
        self._conn.execute(CREATE.format(sql.Identifier(name), sql.Identifier(self.template.name)))
        return Database(name, self._server.dsn(name))

    def _next(self, database: Database) -> Database:
        try:
            self.template.reset(database)
        except (Used, psycopg.Error):
            self._drop(database)
            return self._make()
        return database

    def _drop(self, database: Database) -> None:
        """Drop it, after a rollback of the prepared transactions that would keep it."""
        if database.session is not None:
            with suppress(psycopg.Error):
                database.session.close()
        left = self._conn.execute("select gid from pg_prepared_xacts where database = %s", [database.name]).fetchall()
        if left:
            with psycopg.connect(database.dsn, autocommit=True) as conn:
                for (gid,) in left:
                    conn.execute(sql.SQL("rollback prepared {}").format(sql.Literal(gid)))
        self._conn.execute(DROP.format(sql.Identifier(database.name)))
