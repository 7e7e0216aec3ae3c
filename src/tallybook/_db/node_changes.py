"""Changes to the list of nodes that need answers from the nodes, and the schedules that move with the home."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psycopg

from tallybook._db import migrate, nodes, numbers, sync
from tallybook._db.declared import Declared
from tallybook._db.link import CONNECT, dsn_for_people
from tallybook._db.nodes import VARIABLE, Node, asked, at, named, written
from tallybook._db.policy import unreached
from tallybook.errors import ConfigError, QueueUnavailable, TallybookError

_GIVE = Declared("_schedules_give() -> jsonb")
_TAKE = Declared("_schedules_take(p_schedules jsonb) -> int")
_SELF = """\
select c.system_identifier, d.oid
  from pg_control_system() c, pg_database d where d.datname = current_database()"""
_CITUS = "select to_regclass('pg_catalog.pg_dist_node') is not null and not exists (select from tallybook.nodes)"


@dataclass(frozen=True, slots=True)
class Changed:
    """The change to a node."""

    what: str  # created, changed, retired, removed or unchanged
    node: Node
    schedules: int = 0  # the number of schedules that moved to the home
    installed: bool = True  # whether the node has the schema


@dataclass(frozen=True, slots=True)
class _Identity:
    """The identity of a database. Databases of servers from one image differ only in their numbers."""

    cluster: int
    database: int
    number: int | None


def add(dsn: str, name: str, address: str, number: int | None = None) -> Changed:
    """Add a node to the list in the database at `dsn`. The first time, that database is added as a node, too.

    Without `number`, the number is that of the node's installation, else the next free one. Raises ConfigError and
    InvalidArgument, and QueueUnavailable if the node does not answer and has no given number.
    """
    _in_table(dsn)
    seen = _seen(at(dsn, address), needed=number is None)
    installed = seen.number if seen else None
    if installed is not None and number not in (None, installed):
        reason = f"its installation has number {installed}, which is part of its job ids"
        raise ConfigError("number", number, reason, hint="Leave --number out")
    here = _seen(dsn, needed=True)
    assert here is not None
    with psycopg.connect(dsn, **CONNECT) as conn:
        listed = {name for (name,) in conn.execute("select n.name from tallybook.nodes n")}
        before = [node for node in written(dsn) if node.name in listed]
        if not before and seen != here:
            own = re.sub(r"[^A-Za-z0-9_.:-]", "-", conn.info.dbname).strip("-_.:") or "first"
            if name == own:
                reason = "the first call also lists the database of the DSN, under this name"
                hint = "Choose another name, or list that database first: `tallybook node add NAME ''`"
                raise ConfigError("node", name, reason, hint=hint)
            sync.run(conn, nodes.add(own, "", here.number or 0, here.cluster))
            before = written(dsn)
        if number is None:
            listed_as = next((node.number for node in before if node.name == name), None)
            free = max((node.number for node in before if node.number is not None), default=-1) + 1
            number = next(one for one in (installed, listed_as, free) if one is not None)
        home = next((node for node in before if node.home), None)
        if home is not None and number < (home.number or 0):
            if installed is None:
                reason = "it would be the home, as the lowest number, but has no schema"
                raise ConfigError("node", name, reason, hint=f"Run `tallybook migrate --node {number}` on it first")
            _move(home, Node(name, number, at(dsn, address)), trial=True)
        what = sync.run(conn, nodes.add(name, address, number, seen.cluster if seen else None))
    node = named(written(dsn), name)
    if what == "unchanged":  # a repetition, perhaps of a call that could not move them: the home before is the next one
        home = _next(before, node)
    moved = _move(home, node) if node.home and home and home.name != name else 0
    return Changed(what, node, moved, installed is not None)


def retire(dsn: str, name: str) -> Changed:
    """Stop routing keys to a node, and move its schedules to the home. UnknownNode; QueueUnavailable: call it again."""
    listed = _in_table(dsn)
    node = named(listed, name)
    if home := _next(listed, node):
        _move(node, home, trial=True)
    with psycopg.connect(dsn, **CONNECT) as conn:
        what = sync.run(conn, nodes.retire(node.name))
    return Changed(what, node, _move(node, named(nodes.nodes(dsn), "home")))


def remove(dsn: str, name: str, *, anyway: bool = False) -> Changed:
    """Remove a node from the list. Raises ConfigError if it has open jobs or does not answer, unless `anyway`."""
    listed = _in_table(dsn)
    node = named(listed, name)
    (answer,) = asked([node], _open)
    if node.state != "gone" and not anyway:
        if answer.value is None:
            hint = "Pass --anyway to remove it nevertheless"
            raise ConfigError("node", name, f"its open jobs are unknown: {answer.error}", hint=hint)
        if answer.value:
            hint = "Retire it and let its workers finish them; with --anyway they stay there"
            raise ConfigError("node", name, f"{answer.value} jobs are open there", hint=hint)
        if home := _next(listed, node):
            _move(node, home, trial=True)
    with psycopg.connect(dsn, **CONNECT) as conn:
        what = sync.run(conn, nodes.remove(node.name, anyway))
    return Changed(what, node, 0 if answer.value is None else _move(node, named(nodes.nodes(dsn), "home")))


def pin(dsn: str, key: str, node: str) -> str:
    """Route the jobs of a key to this node; returns created, changed or unchanged. Raises UnknownNode."""
    found = named(nodes.nodes(dsn), node)
    with _connected(dsn) as conn:
        return sync.run(conn, nodes.pin(key, found.name))


def unpin(dsn: str, key: str) -> bool:
    """Route a key by its hash again; returns False if it was not pinned."""
    with _connected(dsn) as conn:
        return sync.run(conn, nodes.unpin(key))


def _open(conn: psycopg.Connection[Any]) -> int:
    """Return the number of jobs that have not ended, 0 without a schema."""
    return sum(one.open for one in sync.run(conn, numbers.COUNTS())) if nodes.has_schema(conn) else 0


@contextmanager
def _connected(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """Open a connection to the database with the table. Raises QueueUnavailable, and SchemaError without a schema."""
    try:
        conn = psycopg.connect(dsn, **CONNECT)
    except psycopg.OperationalError as error:
        raise QueueUnavailable(dsn_for_people(dsn), unreached(error)) from error
    with conn:
        migrate.check(conn)
        yield conn


def _in_table(dsn: str) -> list[Node]:
    """Return all listed nodes. Raises ConfigError if they are listed elsewhere: the table would hide that list."""
    if os.environ.get(VARIABLE):
        reason = "the nodes are listed in this variable, not in the table"
        raise ConfigError(VARIABLE, "(set)", reason, hint="Change it there, or unset it to use the table")
    listed = written(dsn)
    with _connected(dsn) as conn:
        is_citus = conn.execute(_CITUS).fetchone() == (True,)
    if is_citus:
        hint = f"Change it by functions of Citus such as citus_update_node, or list all nodes in {VARIABLE}"
        raise ConfigError("nodes", "pg_dist_node", "Citus has the list, and the table would hide it", hint=hint)
    return listed


def _next(among: list[Node], without: Node) -> Node | None:
    """Return the node that is the home if this one is not."""
    live = [node for node in among if node.state == "live" and node.name != without.name]
    return min(live, key=lambda node: node.number or 0, default=None)


def _seen(dsn: str, *, needed: bool) -> _Identity | None:
    """Return the identity of the database and its number, or None if it does not answer and is not needed."""
    try:
        with psycopg.connect(dsn, **CONNECT) as conn:
            return _identity(conn)
    except psycopg.OperationalError as error:
        if needed:
            hint = "Pass its number with --number to add a node that does not answer"
            raise QueueUnavailable(dsn_for_people(dsn), unreached(error), hint=hint) from error
        return None


def _identity(conn: psycopg.Connection[Any]) -> _Identity:
    ((cluster, database),) = conn.execute(_SELF).fetchall()
    return _Identity(cluster, database, nodes.number(conn))


def _move(old: Node, home: Node, *, trial: bool = False) -> int:
    """Move all schedules of a node to the home; returns their number.

    They are removed in a transaction that stays open until the home has them. So no tick fires twice or is lost, unless
    this program is killed between two commits. Then both nodes have them until this is run again. `trial`: roll back,
    to raise what would prevent the move before the list changes. A node that is away prevents no change of the list.
    """
    if old.name == home.name:
        return 0
    try:
        with psycopg.connect(old.dsn, **CONNECT) as giving:
            there = giving.execute("select to_regclass('tallybook.schedules') is not null").fetchone() == (True,)
            if not there or giving.execute("select from tallybook.schedules limit 1").rowcount == 0:
                return 0
            with psycopg.connect(home.dsn, **CONNECT) as taking:
                if not nodes.has_schema(taking):
                    hint = f"Run `tallybook migrate --nodes {home.name}`, and repeat this"
                    raise ConfigError("node", home.name, "it would get the schedules, but has no schema", hint=hint)
                if _identity(giving) == _identity(taking):  # one database, listed twice
                    return 0
                undone = taking.transaction(force_rollback=True) if trial else nullcontext()
                with giving.transaction(force_rollback=trial), undone:
                    return sync.run(taking, _TAKE.call(int, schedules=sync.run(giving, _GIVE.call(str))))
    except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction) as error:
        if trial:
            return 0
        stayed = f"The list has changed, but the schedules on {old.name!r} have not moved"
        hint = f"{stayed}: repeat it when both nodes answer"
        raise QueueUnavailable(f"node {old.name!r} or {home.name!r}", unreached(error), hint=hint) from error
    except psycopg.Error as error:
        text = f"the schedules of node {old.name!r} cannot move to {home.name!r}: {unreached(error)}"
        done = "Nothing has changed" if trial else "The list has changed, but they have not moved"
        raise TallybookError(text, hint=f"{done}: repeat it as the owner of the schema on both nodes") from error
