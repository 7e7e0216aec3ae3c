"""Roles: who may do what in the schema, as `tallybook._rights` says it.

PostgreSQL's roles belong to the cluster, rights to the database. What the rights are stands above each function and view (see
rights.py), and SQL applies them (`_roles_apply.sql`), so that each migration can do it, too; here the roles are only created
and named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from tallybook.errors import ConfigError, RoleError

KINDS = ("producer", "worker", "operator", "reader", "metrics")
PREFIX = "tallybook_"
_LOCK = "select pg_advisory_xact_lock(1413565440, 0)"


@dataclass(frozen=True)
class Done:
    """What `create` did."""

    created: list[str]
    """Roles that were not there."""
    names: list[str]
    """All five, in the order of KINDS."""


def names(prefix: str = PREFIX) -> list[str]:
    """The five names, in the order of KINDS; ConfigError for a prefix that is no plain name."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,40}", prefix) or prefix.startswith("pg_"):
        raise ConfigError(
            "prefix",
            prefix,
            "has 1 to 41 small letters, digits and underscores, no digit first, and does not begin with pg_",
        )
    return [prefix + kind for kind in KINDS]


def statements(prefix: str, missing: list[str]) -> list[sql.Composed]:
    """What makes these roles and gives them their rights."""
    made: list[sql.Composed] = [sql.SQL("create role {} nologin").format(sql.Identifier(name)) for name in missing]
    used = sql.SQL(", ").join(map(sql.Literal, names(prefix)))
    return [*made, sql.SQL("select tallybook._roles_use({})").format(used)]


def script(prefix: str = PREFIX, *, existing: bool = False) -> str:
    """The same as one SQL text, for people who apply SQL by their own means."""
    listed = statements(prefix, [] if existing else names(prefix))
    return "".join(f"{line};\n" for line in ("begin", _LOCK, *(one.as_string(None) for one in listed), "commit"))


def create(conn: psycopg.Connection[Any], prefix: str = PREFIX, *, existing: bool = False) -> Done:
    """Create what is missing of the five roles, and give all of them exactly their rights; said again, it changes nothing.

    One transaction, as the schema's owner. `existing`: create none. RoleError where one is missing and cannot be created, or shall
    not be, and, unless `existing`, where one is there that is not on record here.
    """
    wanted = names(prefix)
    with conn.transaction():
        conn.execute("set local client_min_messages = warning")
        conn.execute(_LOCK)
        there = {
            row[0] for row in conn.execute("select rolname from pg_roles where rolname = any (%s::name[])", (wanted,))
        }
        ours = {row[0] for row in conn.execute("select name from tallybook.role")}
        missing = [name for name in wanted if name not in there]
        if existing and missing:
            raise RoleError(missing, "are not there", _by_administrator(missing))
        if not existing and (taken := [name for name in wanted if name in there and name not in ours]):
            reason = "are there already, and are not on record in this database"
            raise RoleError(
                taken, reason, "Say --existing to give them their rights here as well, or choose another --prefix"
            )
        listed = statements(prefix, missing)
        for statement in listed:
            try:
                with conn.transaction():
                    conn.execute(statement)
            except psycopg.errors.InsufficientPrivilege as error:
                if statement is listed[-1]:
                    raise
                reason = f"cannot be created by {conn.info.user}"
                raise RoleError(missing, reason, _by_administrator(missing)) from error
    return Done(missing, wanted)


def _by_administrator(missing: list[str]) -> str:
    made = " ".join(f"create role {name} nologin;" for name in missing)
    return f"Let an administrator run: {made} Then say --existing"


def forget(conn: psycopg.Connection[Any]) -> list[str]:
    """As if there had never been roles: takes their rights, and gives the functions back to PUBLIC. The roles stay."""
    with conn.transaction():
        conn.execute(_LOCK)
        found = [str(row[0]) for row in conn.execute("select name from tallybook.role order by kind")]
        conn.execute("select tallybook._roles_forget()")
    return found


def superuser_owner(conn: psycopg.Connection[Any]) -> str | None:
    """The owner of the schema, if that is a superuser: whose rights the functions then run with."""
    row = conn.execute(
        "select r.rolname from pg_namespace n join pg_roles r on r.oid = n.nspowner where n.nspname = 'tallybook' and r.rolsuper"
    ).fetchone()
    return str(row[0]) if row else None
