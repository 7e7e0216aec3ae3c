"""tallybook node list, check, add, retire, remove, of, pin, unpin, plproxy."""

import os
from collections.abc import Sequence
from importlib.resources import files

import click

from tallybook._cli.common import command, dsn_option, fail
from tallybook._cli.database import Db, conninfo
from tallybook._cli.errors import Problem
from tallybook._cli.maintain import show_findings
from tallybook._cli.output import Columns, clean, print_rows
from tallybook._db import node_changes, node_check, nodes
from tallybook._db.driver import Conninfo, conninfo_to_dict, make_conninfo
from tallybook._db.link import dsn_for_people
from tallybook._db.node_changes import Changed

_SECRETS = {"password", "passfile", "sslpassword", "oauth_client_secret", "fallback_application_name"}

node = click.Group("node", help="List, check and change the databases of one app (nodes).")

_COLUMNS: Columns = {
    "node": "name",
    "number": lambda row: "unknown" if row["number"] is None else row["number"],
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

    Exit code 0 if every finding is ok or a note, 1 if there is a warning or a problem.
    """
    show_findings(node_check.check(db.conninfo), as_json)


@command(of=node)
@click.option(
    "--number", type=click.IntRange(0, 1023), help="Number in its job ids. [that of its schema, else the next free]"
)
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
@click.option("--anyway", is_flag=True, help="Remove it even if it has open jobs or pins, or does not respond.")
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


@node.command()
@dsn_option
@click.option("--cluster", default="tallybook", show_default=True, help="Name of the cluster, a foreign server.")
@click.option("--partitions", type=int, help="A power of two. [from the number of nodes]")
def plproxy(dsn: str | None, cluster: str, partitions: int | None) -> None:
    """Print the functions of a PL/Proxy cluster as SQL.

    Run them in the proxy's database: tallybook node plproxy | psql shop_proxy
    """
    click.echo(script(nodes.numbered(nodes.nodes(conninfo(dsn))), cluster, partitions), nl=False)


def script(found: Sequence[nodes.Node], cluster: str = "tallybook", partitions: int | None = None) -> str:
    """Return the SQL for these nodes, in the order of their numbers; they get the partitions in turn.

    PL/Proxy needs a power of two. More partitions than nodes balance the keys better: of 3 nodes, one has half of all
    keys with 4 partitions, and at most three eighths with 16. Raises Problem for another number, fewer partitions than
    nodes, or an invalid name.
    """
    if silent := [one.name for one in found if one.number is None]:
        hint = "Ids lead to nodes by their numbers: start the node, or install it with `tallybook migrate`"
        raise Problem(f"the number of node {silent[0]!r} is unknown", hint=hint)
    if not cluster.isidentifier() or not cluster.islower():
        raise Problem(f"--cluster: {cluster!r} is not a plain name", hint="Use a to z, digits and _", exit_code=2)
    count = _enough(len(found)) if partitions is None else partitions
    if count & (count - 1) or count < len(found):
        hint = f"PL/Proxy takes a power of two, and each of {len(found)} nodes needs one: {_enough(len(found))}"
        raise Problem(f"--partitions: {count} does not fit", hint=hint, exit_code=2)
    ordered = sorted(found, key=lambda one: one.number or 0)
    owners = [ordered[at % len(ordered)] for at in range(count)]
    words = {
        "cluster": cluster,
        "name": f"'{cluster}'",
        "count": str(count),
        "mask": str(count - 1),
        "map": "\n".join(_mapped(one, owners) for one in ordered),
        "empty": ", ".join(f"p{at} ''" for at in range(count)),
        "partitions": ",\n  ".join(f"set p{at} {_address(one)}" for at, one in enumerate(owners)),
        "cases": "\n    ".join(f"when {one.number} then return {at};" for at, one in enumerate(ordered)),
    }
    text = files("tallybook._cli").joinpath("node_plproxy.sql").read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def _enough(count: int) -> int:
    """One partition per node if that is a power of two; else the next power of two, times four."""
    power = 1 << (count - 1).bit_length()
    return power if power == count else 4 * power


def _mapped(one: nodes.Node, owners: Sequence[nodes.Node]) -> str:
    mine = ", ".join(f"p{at}" for at, owner in enumerate(owners) if owner == one)
    note = "" if one.state == "live" else f", is {one.state}: move its keys, then print this again"
    return f"--   node {one.number} ({one.name}): {mine}{note}"


def _address(one: nodes.Node) -> str:
    """Return the address for PL/Proxy, quoted and without secrets, with what PGHOST and its like add to it here."""
    here = {known.keyword.decode(): os.environ.get((known.envvar or b"").decode()) for known in Conninfo.get_defaults()}
    whole = {**here, **conninfo_to_dict(one.dsn)}
    given = {word: value for word, value in whole.items() if value is not None and word not in _SECRETS}
    return "'" + make_conninfo("", **given).replace("'", "''") + "'"
