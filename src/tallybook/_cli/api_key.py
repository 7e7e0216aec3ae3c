"""tallybook api-key new."""

from __future__ import annotations

import click

__all__ = ["api_key"]


@click.group("api-key")
def api_key() -> None:
    """Make keys for the operator API."""


@api_key.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice(("read", "enqueue", "operate", "admin")),
    help="What it may do; several times for several. admin may do all, and see args and errors.",
)
@click.option(
    "--queue", "queues", multiple=True, metavar="QUEUE", help="Limit it to this queue; several times for several."
)
def new(name: str, scopes: tuple[str, ...], queues: tuple[str, ...]) -> None:
    """Print a new key with a fresh secret, as lines for the file of keys. Nothing else ever shows the secret.

    (umask 077; tallybook api-key new deploy --scope read --scope operate >> keys.toml)
    """
    from tallybook.extra.operator.keys import key_block

    click.echo(key_block(name, scopes, queues), nl=False)
