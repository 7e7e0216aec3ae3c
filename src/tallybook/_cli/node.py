"""tallybook node list, check, add, retire, remove, of, pin, unpin; plproxy is in node_plproxy.py."""

from __future__ import annotations

import click

from tallybook._cli.common import Columns, command, fail, print_rows
from tallybook._cli.database import Db
from tallybook._cli.doctor import show_findings
from tallybook._cli.node_plproxy import plproxy
from tallybook._cli.text import clean
from tallybook._db import node_changes, node_check, nodes
from tallybook._db.link import dsn_for_people
from tallybook._db.node_changes import Changed

node = click.Group("node", help="List, check and change the databases of one app (nodes).")

node.add_command(plproxy)

_COLUMNS: Columns = {
    "node": "name",
    "number": lambda row: "no answer" if row["number"] is None else row["number"],
    "state": lambda row: f"{row['state']}, home" if row["home"] else row["state"],
    "address": "address",
}


@command("list", of=node, json=True)
def list_(db: Db, as_json: bool) -> None:
    """List the nodes, removed ones included."""
    named = ("name", "number", "state", "home")
    rows = [
        {**{name: getattr(one, name) for name in named}, "address": dsn_for_people(one.dsn)}
        for one in nodes.numbered(nodes.written(db.conninfo))
    ]
    print_rows(_COLUMNS, rows, empty="no nodes", as_json=as_json)


@command(of=node, json=True)
def check(db: Db, as_json: bool) -> None:
    """Check every node: identity, state and workers.

    Exit code 0 if all is ok or a note, 1 if there is a warning or a problem.
    """
    show_findings(node_check.check(db.conninfo), as_json)


@command(of=node)
@click.option("--number", type=click.IntRange(0, 1023), help="In its job ids. [that of its schema, else the next free]")
def add(db: Db, name: str, address: str, number: int | None) -> str:
    """Add a node, or change its ADDRESS, like 'host=north dbname=shop'.

    The DSN supplies user, password and everything else that ADDRESS leaves out. A retired node becomes live again. The
    first call makes the database of the DSN a node too.
    """
    done = node_changes.add(db.conninfo, name, address, number)
    if not done.installed:
        click.echo(f"it has no schema yet, or does not answer: tallybook migrate --nodes {clean(name)}", err=True)
    return _said(done)


@command(of=node)
def retire(db: Db, name: str) -> str:
    """Send no more keys to a node, and move its schedules to the home.

    Its jobs still run, and workers serve it.
    """
    return _said(node_changes.retire(db.conninfo, name))


@command(of=node)
@click.option("--anyway", is_flag=True, help="Remove it despite open jobs or pins, or if it is silent.")
def remove(db: Db, name: str, anyway: bool) -> str:
    """Remove a node from the list, and move its schedules to the home.

    Its jobs and their history stay in its database.
    """
    return _said(node_changes.remove(db.conninfo, name, anyway=anyway))


def _said(done: Changed) -> str:
    moved = f"; {done.schedules} schedules moved to the home" if done.schedules else ""
    return f"node {clean(done.node.name)!r} ({done.node.number}) is {done.what}{moved}"


@command(of=node)
def of(db: Db, key: str) -> str:
    """Show the node of a key."""
    pins = db.run(nodes.pins(key))
    found = nodes.route(key, nodes.nodes(db.conninfo), pins)
    return f"{clean(found.name)}{' (pinned)' if key in pins else ''}"


@command(of=node)
def pin(db: Db, key: str, name: str) -> str:
    """Pin the jobs of a key to this node. Existing jobs stay where they are."""
    return f"the pin of {clean(key)!r} to node {clean(name)!r} is {node_changes.pin(db.conninfo, key, name)}"


@command(of=node)
def unpin(db: Db, key: str) -> str:
    """Unpin a key: the hash chooses its node again."""
    if not node_changes.unpin(db.conninfo, key):
        fail(f"{clean(key)!r} is not pinned")
    return f"{clean(key)!r} is no longer pinned"
