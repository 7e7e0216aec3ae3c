"""tallybook node plproxy: the functions that PL/Proxy needs to reach all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import click

from tallybook._cli.common import dsn_option
from tallybook._cli.database import conninfo
from tallybook._cli.errors import Problem
from tallybook._db.driver import conninfo_to_dict, make_conninfo
from tallybook._db.nodes import Node, nodes, numbered

_SECRETS = {"password", "passfile", "sslpassword", "oauth_client_secret", "fallback_application_name"}


@click.command()
@dsn_option
@click.option("--cluster", default="tallybook", show_default=True, help="Name of the cluster, a foreign server.")
@click.option("--partitions", type=int, help="A power of two. [from the number of nodes]")
def plproxy(dsn: str | None, cluster: str, partitions: int | None) -> None:
    """Print the functions of a PL/Proxy cluster as SQL.

    Run them in the proxy's database: tallybook node plproxy | psql shop_proxy
    """
    click.echo(script(numbered(nodes(conninfo(dsn))), cluster, partitions), nl=False)


def script(found: Sequence[Node], cluster: str = "tallybook", partitions: int | None = None) -> str:
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
    count = partitions or _enough(len(found))
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
        "partitions": ",\n  ".join(f"set p{at} {_quoted(_address(one))}" for at, one in enumerate(owners)),
        "cases": "\n    ".join(f"when {one.number} then return {at};" for at, one in enumerate(ordered)),
    }
    text = files("tallybook._cli").joinpath("node_plproxy.sql").read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def _enough(nodes: int) -> int:
    """One partition per node if that is a power of two; else the next power of two, times four."""
    power = 1 << (nodes - 1).bit_length()
    return power if power == nodes else 4 * power


def _mapped(one: Node, owners: Sequence[Node]) -> str:
    mine = ", ".join(f"p{at}" for at, owner in enumerate(owners) if owner == one)
    note = "" if one.state == "live" else f", is {one.state}: move its keys, then print this again"
    return f"--   node {one.number} ({one.name}): {mine}{note}"


def _address(one: Node) -> str:
    """Return the address for PL/Proxy, without secrets."""
    given = {word: value for word, value in conninfo_to_dict(one.dsn).items() if word not in _SECRETS}
    return make_conninfo("", **given)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
