"""tallybook web, web user, web key: the dashboard in its own process, and its users; tallybook mcp."""

import asyncio
import errno
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from tallybook._app import App
from tallybook._cli.common import dsn_option, duration, me, read_dsn_option
from tallybook._cli.database import check_schema, connect, conninfo, nodes_option, standby_of
from tallybook._cli.errors import Problem
from tallybook._cli.loading import load_app
from tallybook._cli.provider import one_secret
from tallybook._db.nodes import nodes, numbered
from tallybook.errors import ConfigError


@click.group(invoke_without_command=True)
@click.option(
    "-A", "--app", "target", metavar="MODULE:APP", envvar="TALLYBOOK_APP", help="The App whose name it shows. [none]"
)
@dsn_option
@nodes_option
@read_dsn_option
@click.option(
    "--host", default="127.0.0.1", show_default=True,
    help="Address to listen on; if not loopback, pass --users or --api-keys.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8420, show_default=True, help="Port; 0 is any free one."
)
@click.option("--users", type=click.Path(path_type=Path), help="TOML file of users; see `tallybook web user`.")
@click.option("--operate", is_flag=True, help="Without users: allow changes from this machine.")
@click.option("--read-only", is_flag=True, help="Allow no changes.")
@click.option(
    "--api-keys", type=click.Path(path_type=Path), help="Serve the operator API at /api/v1; see `tallybook web key`."
)
@click.option("--behind-proxy", metavar="ADDRESS", help="Trust this proxy's headers about client and scheme.")
@click.pass_context
def web(
    context: click.Context,
    target: str | None,
    dsn: str | None,
    nodes_: str | None,
    read_dsn: str | None,
    host: str,
    port: int,
    users: Path | None,
    operate: bool,
    read_only: bool,
    api_keys: Path | None,
    behind_proxy: str | None,
) -> None:
    """Serve the dashboard.

    By default it accepts only connections from this machine, and no changes. TALLYBOOK_WEB_SECRET (32 characters or
    more) signs the sessions; without it, a restart ends them. TALLYBOOK_METRICS_TOKEN lets a scraper read /metrics.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        import uvicorn

        from tallybook.extra.dashboard.access import is_loopback
        from tallybook.extra.operator.serve import beside
        from tallybook.web import dashboard, operator_api
    except ImportError as error:
        hint = "pip install 'tallybook[web]'"
        raise Problem(f"the dashboard needs more packages: {error}", hint=hint, exit_code=2) from error
    if operate and (users or read_only):
        raise click.UsageError("--operate is for a dashboard without --users and without --read-only")
    if users is None and api_keys is None and not is_loopback(host):  # it shows pages to this machine only
        hint = "Pass --users FILE; `tallybook web user NAME` prints its lines"
        raise ConfigError("host", host, "other machines could reach it without a login", hint=hint)
    app = load_app(target) if target else App("tallybook")
    site = dashboard(
        app, users=users, read_only=read_only or (users is None and not operate),
        secret=os.environ.get("TALLYBOOK_WEB_SECRET") or None,
        metrics_token=os.environ.get("TALLYBOOK_METRICS_TOKEN") or None,
        dsn=dsn, nodes=nodes_, read_dsn=read_dsn,
    )  # fmt: skip
    served: Any = site
    if api_keys is not None:
        served = beside(site, operator_api(app, keys=api_keys, dsn=dsn, read_only=read_only, nodes=nodes_))
    if nodes_ is None:
        check_schema(site.nodes.first.conninfo)
        if read_dsn is not None:
            with connect(read_dsn) as conn:
                click.echo(standby_of(conn), err=True)
    else:
        numbered(nodes(site.nodes.first.conninfo, nodes_))  # reports unknown names and duplicate numbers
    config = uvicorn.Config(
        served, host=host, port=port, log_level="warning", server_header=False, timeout_graceful_shutdown=3,
        proxy_headers=behind_proxy is not None, forwarded_allow_ips=behind_proxy or "", lifespan="on",
    )  # fmt: skip
    server = _server(uvicorn.Server, config, host)
    with _listening(host, port) as listening:
        server.run(sockets=[listening])
    sys.exit(0 if server.started else 1)


def _listening(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(found[4][:2], family=found[0], backlog=2048)
        # Connections inherit it. Without it every body waits 40 ms for the client's acknowledgement of the headers.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        hint = "Pass another --port, or --port 0 for any" if error.errno == errno.EADDRINUSE else None
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError("port", port, f"cannot listen on {host}: {why}", hint=hint) from error


def _server(kind: type[Any], config: Any, host: str) -> Any:
    class Server(kind):  # type: ignore[misc]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for one in sockets or ():
                shown = f"[{host}]" if ":" in host else host
                click.echo(f"the dashboard is at http://{shown}:{one.getsockname()[1]}/  (press Ctrl-C to quit)")

    return Server(config)


@web.command()
@click.argument("name")
@click.option("--operate", is_flag=True, help="The user may also change things.")
def user(name: str, operate: bool) -> None:
    """Print a user as lines for the user file.

    Enter the password at the prompt, or pipe it to stdin. Append the lines to the file that `tallybook web --users`
    reads: `tallybook web user ada >> users.toml; chmod 600 users.toml`
    """
    from tallybook.extra.dashboard.users import hashed, is_name

    if not is_name(name):
        raise ConfigError("name", name, "a name has 1 to 64 letters, digits, or any of _ . @ + -")
    password = one_secret("password", None).reveal()
    if len(password) < 8:
        raise ConfigError("password", "(not shown)", "it has fewer than 8 characters")
    click.echo(f'[users."{name}"]\npassword = "{hashed(password)}"\noperate = {str(operate).lower()}')


@web.command()
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, required=True, type=click.Choice(("read", "enqueue", "operate", "admin")),
    help="Scope of the key; repeatable. admin allows all, and shows args and errors.",
)  # fmt: skip
@click.option("--queue", "queues", multiple=True, metavar="QUEUE", help="Limit the key to this queue; repeatable.")
def key(name: str, scopes: tuple[str, ...], queues: tuple[str, ...]) -> None:
    """Print a new key with its secret, as lines for the key file.

    (umask 077; tallybook web key deploy --scope read --scope operate >> keys.toml)
    """
    from tallybook.extra.operator.keys import key_block

    click.echo(key_block(name, scopes, queues), nl=False)


@click.command()
@dsn_option
@click.option("--allow", metavar="VERB", multiple=True, help="Allow this verb, like retry_job; repeatable. [none]")
@click.option("--by", metavar="NAME", help="The agent's name in the audit. [user@host]")
@click.option(
    "--confirm-within", "lifetime", type=duration, default="5 min", show_default=True,
    help="How long a preview can be confirmed.",
)  # fmt: skip
def mcp(dsn: str | None, allow: tuple[str, ...], by: str | None, lifetime: timedelta) -> None:
    """Serve an agent over MCP, on stdin and stdout.

    It changes nothing unless you allow verbs. Each change is previewed, confirmed and recorded in the audit.
    """
    try:
        from tallybook.extra.mcp import Tools
    except ImportError as error:
        hint = "pip install 'tallybook[mcp]'"
        raise Problem(f"the MCP server needs more packages: {error}", hint=hint, exit_code=2) from error
    tools = Tools(App("tallybook", dsn=conninfo(dsn)), by=by or me(), allow=allow, lifetime=lifetime)
    check_schema(dsn)
    if sys.stdin.isatty():
        click.echo("waiting for an MCP client on stdin (press Ctrl-C to quit)", err=True)
    asyncio.run(tools.serve())
