"""The databases of one app (nodes): reading their list, the node of an id or a key, and one query to all of them.

`nodes(dsn)` reads them from TALLYBOOK_NODES, else from the table `tallybook.node` of the database at `dsn`, else from
Citus' pg_dist_node; else the database at `dsn` is the only one.
"""

import hashlib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tallybook._db.declared import Call, Simple, T
from tallybook._db.link import CONNECT, ThreadSocketTimeout, daemon, dsn_for_people
from tallybook._db.policy import first_line, unreached
from tallybook._db.source import Source
from tallybook._db.texts import READER, loads
from tallybook.errors import ConfigError, QueueUnavailable, UnknownJob, UnknownNode

VARIABLE = "TALLYBOOK_NODES"
_NUMBER_BITS = 43
ANSWER = 10.0  # seconds that the database with the list has to return it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
_TWO_DSNS = re.compile(r"\b(host|port|dbname|user)\s*=.*\b\1\s*=|://.*://")
"""A list on one line, of which libpq would use the last values."""
_LINES = "Write name=DSN, one per line, or the path of a TOML file with a table [nodes]"

_THERE = """\
select to_regclass('tallybook.nodes') is not null, to_regclass('pg_catalog.pg_dist_node') is not null,
       current_database()"""
_TABLE = "select n.name, n.number, n.address, n.state, n.home from tallybook.nodes n order by n.number"
_CITUS = """\
select n.nodename, n.nodeport, n.groupid = l.groupid
  from pg_catalog.pg_dist_node n cross join pg_catalog.pg_dist_local_group l
 where n.isactive and n.noderole = 'primary' order by n.groupid"""
_IS_COORDINATOR = "select groupid = 0 from pg_catalog.pg_dist_local_group"
_FIRST_ID = """\
select i.node, s.seqmin
  from tallybook.installed i, pg_sequence s where s.seqrelid = to_regclass('tallybook.job_id')"""

TWINS = (
    "If they are one database, list it once. A number is set once: to change that of a database without jobs to keep, "
    "run `tallybook uninstall --dsn ...`, which removes its jobs, and `tallybook migrate --node N --dsn ...`"
)
"""What to do if two nodes have one number."""

add = Simple("node_add(name text, address text, number int, system_identifier bigint) -> text", str)
retire = Simple("node_retire(name text) -> text", str, unknown=UnknownNode)
remove = Simple("node_remove(name text, anyway boolean) -> text", str, unknown=UnknownNode)
pin = Simple("node_pin(key text, node text) -> text", str, unknown=UnknownNode)
unpin = Simple("node_unpin(key text) -> boolean", bool)
_PINS = """\
select cast(coalesce(json_object_agg(p.key, p.node order by p.key), '{}') as text) from tallybook.node_pins as p
 where p.key = coalesce(cast(%(key)s as text), p.key)"""


@dataclass(frozen=True, slots=True)
class Node:
    """One database of an app."""

    name: str
    number: int | None
    """The ten bits in the ids of its jobs; None: the list has none, so the node itself is asked (`numbered`)."""
    dsn: str = field(repr=False)
    """The whole connection string. It may contain secrets."""
    state: str = "live"
    """live; retiring: no key is routed there; gone: removed."""
    home: bool = False
    """Whether it has the schedules: the live node with the lowest number, else the first in the list."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """The answer of one node: `value`, or None with the reason in `error`."""

    node: Node
    value: T | None
    error: str | None = None

    @property
    def name(self) -> str:
        return self.node.name


def nodes(dsn: str, which: str = "all") -> tuple[Node, ...]:
    """Return the nodes of the app with its database at `dsn`: all that are not gone, or some, like "north,south".

    This call blocks: use `asyncio.to_thread` in a coroutine. Raises QueueUnavailable if the list is in a database that
    cannot be reached, UnknownNode for a name, and ConfigError for a bad file or variable.
    """
    return chosen([node for node in written(dsn) if node.state != "gone"], which)


def chosen(found: Sequence[Node], which: str, *, again: bool = False) -> tuple[Node, ...]:
    """Return all of these nodes, or some, like "north,south". Raises UnknownNode, or skips the name if `again`."""
    if which == "all":
        return tuple(found)
    known = {node.name for node in found} | {"home" for node in found if node.home}
    names = [name.strip() for name in which.split(",")]
    return tuple(named(found, name) for name in dict.fromkeys(names) if name in known or not again)


def named(among: Sequence[Node], name: str) -> Node:
    """Return the node of this name, or the home for "home". Raises UnknownNode."""
    for node in among:
        if node.name == name or (node.home and name == "home"):
            return node
    raise UnknownNode(name, [node.name for node in among])


def written(dsn: str) -> list[Node]:
    """Return all listed nodes, including those that are gone: of the variable, the table, Citus, or `dsn` itself."""
    if given := os.environ.get(VARIABLE, "").strip():
        return _given(given)
    try:
        with psycopg.connect(dsn, **CONNECT) as conn, ThreadSocketTimeout(conn, ANSWER):
            table, citus, database = conn.execute(_THERE).fetchone() or (False, False, "")
            if table and (rows := conn.execute(_TABLE).fetchall()):
                return [Node(name, number, at(dsn, to), state, home) for name, number, to, state, home in rows]
            if citus and (found := _citus(conn, dsn)):
                return found
            return [Node(database, number(conn), dsn, home=True)]
    except psycopg.OperationalError as error:
        raise QueueUnavailable(dsn_for_people(dsn), unreached(error)) from error


def _given(text: str) -> list[Node]:
    """Return the nodes of the variable: lines, or the path of a file."""
    pairs = _lines(text) if "\n" in text or "=" in text else _file(text)
    found: dict[str, Node] = {}
    for name, dsn in pairs:
        if not _NAME.fullmatch(name):
            raise ConfigError(VARIABLE, _shown(name), "a node's name has letters, digits and _ . : -", hint=_LINES)
        if name in ("all", "home"):
            raise ConfigError(VARIABLE, name, "is reserved", hint="Give the node another name")
        if name in found:
            raise ConfigError(VARIABLE, name, "is listed twice", hint="Give each node its own name")
        if _TWO_DSNS.search(dsn):
            raise ConfigError(VARIABLE, name, "has two DSNs", hint=_LINES)
        try:
            conninfo = Source("nodes", None).conninfo(dsn)
        except ConfigError as error:
            raise ConfigError(VARIABLE, name, "its DSN is not a connection string", hint=error.hint) from None
        found[name] = Node(name, None, conninfo, home=not found)
    if not found:
        raise ConfigError(VARIABLE, "(not shown)", "names no node", hint=_LINES)
    return list(found.values())


def _lines(text: str) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        name, _, dsn = (part.strip() for part in line.partition("="))
        if not name.startswith("#") and line.strip():
            if not dsn:  # the line may hold a password
                raise ConfigError(VARIABLE, f"line {number}", "is not name=DSN", hint=_LINES)
            pairs.append((name, dsn))
    return pairs


def _shown(text: str) -> str:
    """Return a name or a path for messages, unless it may be a connection string, which may contain a password."""
    return "(not shown)" if "@" in text or "://" in text else text


def _file(path: str) -> list[tuple[str, str]]:
    try:
        table = tomllib.loads(Path(path).read_text("utf-8")).get("nodes")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)  # without the path
        raise ConfigError(VARIABLE, _shown(path), f"cannot be read: {reason}", hint=_LINES) from None
    if not isinstance(table, dict) or not all(isinstance(dsn, str) and dsn.strip() for dsn in table.values()):
        raise ConfigError(VARIABLE, _shown(path), "has no table [nodes] of names and DSNs", hint=_LINES)
    return list(table.items())


def _citus(conn: psycopg.Connection[Any], dsn: str) -> list[Node]:
    """Return the nodes of pg_dist_node, and the coordinator if it is not registered."""
    rows = conn.execute(_CITUS).fetchall()
    found = [
        Node(f"{host}:{port}", None, dsn if here else at(dsn, f"host={host} port={port}")) for host, port, here in rows
    ]
    if found and conn.execute(_IS_COORDINATOR).fetchone() == (True,) and not any(here for *_, here in rows):
        found.insert(0, Node("coordinator", None, dsn))
    return [replace(node, home=place == 0) for place, node in enumerate(found)]


def at(dsn: str, address: str) -> str:
    """Return the connection string of an address: `dsn` with the values of the address. Raises ConfigError."""
    try:
        given, base = conninfo_to_dict(address), conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:  # its text, and the value, may contain a password
        hint = "Write what differs from the DSN, like 'host=north dbname=shop'"
        raise ConfigError("address", "(not shown)", "not a connection string", hint=hint) from None
    if "host" in given:
        base.pop("hostaddr", None)
    return make_conninfo("", **{**base, **given})


def node_of(job_id: int) -> int:
    """Return the number of the node that assigned this id."""
    return job_id >> _NUMBER_BITS


def of_job(among: Sequence[Node], job_id: int) -> Node:
    """Return the node of a job. Raises UnknownJob if none of them has the number in its id."""
    for node in among:
        if node.number == node_of(job_id):
            return node
    said = ", ".join(f"{node.name} ({'no answer' if node.number is None else node.number})" for node in among)
    raise UnknownJob(job_id, hint=f"Its id is of node {node_of(job_id)}; the nodes are {said}")


def route(key: str, among: Sequence[Node], pins: Mapping[str, str] = {}) -> Node:
    """Return the node for the jobs of a key: its pinned one, else the live one with the highest hash of name and key.

    Adding or removing a node moves only the keys that it gains or loses. Raises UnknownNode for a pin to no node.
    """
    if key in pins:
        return named(among, pins[key])
    live = [node for node in among if node.state == "live"]
    if not live:
        raise ConfigError("nodes", [node.name for node in among], "none is live", hint="Add one: `tallybook node add`")
    return max(live, key=lambda node: hashlib.sha256(f"{node.name}\0{key}".encode()).digest())


def asked(
    among: Iterable[Node], question: Callable[[psycopg.Connection[Any]], T], *, seconds: float = 2.0
) -> list[Answer[T]]:
    """Run a query on all of these nodes in parallel; returns the answers in the same order.

    Each runs in its own daemon thread and transaction, whose statements the server ends after `seconds`. A node that
    cannot be reached, fails or is silent has an error instead of a value. No node delays the call any longer.
    """
    places = list(among)
    asks = [daemon(_ask, node.dsn, question, seconds, name=f"tallybook node {node.name}") for node in places]
    wait(asks, seconds)
    answers: list[Answer[T]] = []
    for node, ask in zip(places, asks, strict=True):
        if not ask.done():
            answers.append(Answer(node, None, f"no answer within {seconds:g} s"))
        elif error := ask.exception():
            answers.append(Answer(node, None, unreached(error)))
        else:
            answers.append(Answer(node, ask.result()))
    return answers


def _ask(dsn: str, question: Callable[[psycopg.Connection[Any]], T], seconds: float) -> T:
    limits = {**CONNECT, "connect_timeout": max(2, round(seconds))}
    with (
        psycopg.Connection.connect(dsn, **limits, context=READER) as conn,
        ThreadSocketTimeout(conn, seconds),
        conn.transaction(),
    ):
        limit = f"set local statement_timeout = {round(seconds * 1000)}"
        styles = "set local timezone = 'UTC'; set local datestyle = 'ISO'; set local intervalstyle = 'postgres'"
        conn.execute(f"{limit}; {styles}; set local jit = off".encode())
        return question(conn)


def numbered(among: Sequence[Node]) -> tuple[Node, ...]:
    """Return the same nodes with numbers. Nodes without a number are asked; no answer or no schema leaves None.

    Raises ConfigError if two have the same number: ids would lead to the wrong one.
    """
    open_ = [node for node in among if node.number is None]
    said = {answer.node: answer.value for answer in asked(open_, number)} if open_ else {}
    found = tuple(replace(node, number=said.get(node, node.number)) for node in among)
    first: dict[int, Node] = {}
    for node in found:
        if node.number is not None and (other := first.setdefault(node.number, node)) is not node:
            reason = f"nodes {other.name!r} and {node.name!r} both have it, so ids of jobs lead to the wrong one"
            raise ConfigError("number of a node", node.number, reason, hint=TWINS)
    return found


def number_for(node: Node, among: Sequence[Node]) -> int:
    """Return a node's number, or the next free one. Raises ConfigError if other nodes do not answer."""
    known = numbered(among)
    own = named(known, node.name).number
    if own is not None:
        return own
    silent = [one.node.name for one in asked([other for other in known if other.number is None], number) if one.error]
    if silent:
        hint = "Start them, or give this node its number by `tallybook migrate --node N --dsn ...`"
        reason = f"the next free number is unknown while these do not answer: {', '.join(silent)}"
        raise ConfigError("number of a node", node.name, reason, hint=hint)
    return max((other.number for other in known if other.number is not None), default=-1) + 1


def number(conn: psycopg.Connection[Any]) -> int | None:
    """Return the number of this installation; None without a schema."""
    row = conn.execute("select node from tallybook.installed").fetchone() if has_schema(conn) else None
    return None if row is None else int(row[0])


def has_schema(conn: psycopg.Connection[Any]) -> bool:
    return conn.execute("select to_regclass('tallybook.installed') is not null").fetchone() == (True,)


def foreign_ids(conn: psycopg.Connection[Any]) -> tuple[str, str] | None:
    """Return the problem and the remedy if the ids of new jobs have the number of another node than this one."""
    node, first = conn.execute(_FIRST_ID).fetchone() or (0, 0)
    if node == node_of(first):
        return None
    start, end = (node << 43) or 1, ((node + 1) << 43) - 1
    return (
        f"the number of this node is {node}, but new job ids have number {node_of(first)}",
        f"Run: alter sequence tallybook.job_id minvalue {start} maxvalue {end} start {start} restart N, with an N "
        "above the last job id of the database from which the data came.",
    )


def pins(key: str | None = None) -> Call[dict[str, str]]:
    """Return the nodes of pinned keys: of all keys, or of this one if it is pinned."""
    return Call("node_pins", _PINS, {"key": key}, loads)
