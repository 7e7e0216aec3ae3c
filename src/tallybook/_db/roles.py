"""Roles: who may do what in the schema, according to `tallybook._rights`.

PostgreSQL's roles belong to the cluster, rights to the database. The rights are declared above each function and view
(see sql_lines.py). SQL applies them (`_roles_apply.sql`), so that each migration can do it, too. This module only
creates and names the roles.
"""

import re
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from tallybook._db.migrate import PLAIN
from tallybook.errors import ConfigError, RoleError

KINDS = ("producer", "worker", "operator", "reader", "metrics")
PREFIX = "tallybook_"
_LOCK = "select pg_advisory_xact_lock(1413565440, 0)"


@dataclass(frozen=True)
class Done:
    """The result of `create`."""

    created: list[str]  # roles that did not exist
    names: list[str]  # all five roles, in the order of KINDS


def names(prefix: str = PREFIX) -> list[str]:
    """Return the five names, in the order of KINDS. Raises ConfigError for an invalid prefix."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,40}", prefix) or prefix.startswith("pg_"):
        rule = "must have 1 to 41 lower-case letters, digits and underscores, and not begin with a digit or pg_"
        raise ConfigError("prefix", prefix, rule)
    return [prefix + kind for kind in KINDS]


def statements(prefix: str, missing: list[str]) -> list[sql.Composed]:
    """Return the statements that create these roles and grant their rights."""
    made: list[sql.Composed] = [sql.SQL("create role {} nologin").format(sql.Identifier(name)) for name in missing]
    used = sql.SQL(", ").join(map(sql.Literal, names(prefix)))
    return [*made, sql.SQL("select tallybook._roles_use({})").format(used)]


def script(prefix: str = PREFIX, *, existing: bool = False) -> str:
    """Return them as one SQL text, for people who apply SQL with their own tools."""
    listed = statements(prefix, [] if existing else names(prefix))
    return "".join(f"{line};\n" for line in ("begin", PLAIN, _LOCK, *(one.as_string(None) for one in listed), "commit"))


def create(conn: psycopg.Connection[Any], prefix: str = PREFIX, *, existing: bool = False) -> Done:
    """Create the missing ones of the five roles, and grant all of them exactly their rights; may be repeated.

    Runs in one transaction, as the schema's owner. With `existing`, it creates no role. Raises RoleError if a role is
    missing and cannot or must not be created; without `existing` also if a role exists but is not used here.
    """
    wanted = names(prefix)
    with conn.transaction():
        conn.execute(PLAIN)
        conn.execute(_LOCK)
        rows = conn.execute("select rolname from pg_roles where rolname = any (%s::name[])", (wanted,))
        there = {row[0] for row in rows}
        ours = {row[0] for row in conn.execute("select name from tallybook.role")}
        missing = [name for name in wanted if name not in there]
        if existing and missing:
            raise RoleError(missing, "do not exist", _by_administrator(missing))
        if not existing and (taken := [name for name in wanted if name in there and name not in ours]):
            hint = "Pass --existing to grant them their rights here as well, or choose another --prefix"
            raise RoleError(taken, "exist already, but are not used by this database", hint)
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
    return f"Let an administrator run: {made} Then pass --existing"


def forget(conn: psycopg.Connection[Any]) -> list[str]:
    """Revoke the rights of all roles and grant the functions to PUBLIC again. The roles themselves remain."""
    with conn.transaction():
        conn.execute(PLAIN)
        conn.execute(_LOCK)
        found = [str(row[0]) for row in conn.execute("select name from tallybook.role order by kind")]
        conn.execute("select tallybook._roles_forget()")
    return found


def superuser_owner(conn: psycopg.Connection[Any]) -> str | None:
    """Return the owner of the schema if that is a superuser, since the functions run with its rights."""
    row = conn.execute(
        "select r.rolname from pg_namespace n join pg_roles r on r.oid = n.nspowner"
        " where n.nspname = 'tallybook' and r.rolsuper"
    ).fetchone()
    return str(row[0]) if row else None
