"""tallybook mcp."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import click

from tallybook._cli.common import dsn_option, duration, me
from tallybook._cli.database import connect, conninfo
from tallybook._cli.errors import Problem


@click.command()
@dsn_option
@click.option("--allow", metavar="VERB", multiple=True, help="Allow this verb, like retry_job; repeatable. [none]")
@click.option("--by", metavar="NAME", help="The agent's name in the audit. [user@host]")
@click.option(
    "--confirm-within",
    "lifetime",
    type=duration,
    default="5 min",
    show_default=True,
    help="How long a preview can be confirmed.",
)
def mcp(dsn: str | None, allow: tuple[str, ...], by: str | None, lifetime: timedelta) -> None:
    """Serve an agent over MCP, on stdin and stdout.

    It changes nothing unless you allow verbs. Each change is previewed, confirmed and recorded in the audit.
    """
    from tallybook._app import App

    try:
        from tallybook.extra.mcp.server import Tools
    except ImportError as error:
        hint = "pip install 'tallybook[mcp]'"
        raise Problem(f"the MCP server needs more packages: {error}", hint=hint, exit_code=2) from error
    tools = Tools(App("tallybook", dsn=conninfo(dsn)), by=by or me(), allow=allow, lifetime=lifetime)
    with connect(dsn):
        pass  # a wrong DSN, or a database without the schema, is named here
    if sys.stdin.isatty():
        click.echo("waiting for an MCP client on stdin (press Ctrl-C to quit)", err=True)
    asyncio.run(tools.serve())
