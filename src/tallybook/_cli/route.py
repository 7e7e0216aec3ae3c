"""tallybook provider route set, drop, list, which: which provider serves which kind of data."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from tallybook._cli.common import connect, dsn_option, json_option, print_json, print_table
from tallybook._cli.text import clean
from tallybook._db import providers as calls
from tallybook._db import sync
from tallybook.errors import UnknownProvider


@click.group()
def route() -> None:
    """Choose a provider by the kind of data, and by symbol: a rule for one symbol goes before the one for all."""


@route.command("set")
@click.argument("data_type")
@click.argument("name")
@click.option("--symbol", help="Only for this one; without it for all that have no route of their own.")
@click.option("--active/--inactive", default=None, help="Whether it counts.")
@dsn_option
def set_(data_type: str, name: str, symbol: str | None, active: bool | None, dsn: str | None) -> None:
    """Lead a kind of data to a provider. Running workers follow within seconds."""
    with connect(dsn) as conn:
        try:
            what = sync.run(conn, calls.route_set(data_type, name, symbol, active))
        except UnknownProvider:
            known = sync.run(conn, calls.names())
            raise UnknownProvider(name, known) from None
    click.echo(f"the route of {_shown(data_type, symbol)} is {what}")


@route.command()
@click.argument("data_type")
@click.option("--symbol", help="The route of this one; without it the one for all.")
@dsn_option
def drop(data_type: str, symbol: str | None, dsn: str | None) -> None:
    """Remove a route. Exit code 1 if there is none."""
    with connect(dsn) as conn:
        dropped = sync.run(conn, calls.route_drop(data_type, symbol))
    if not dropped:
        click.echo(f"there is no route of {_shown(data_type, symbol)}", err=True)
        raise SystemExit(1)
    click.echo(f"the route of {_shown(data_type, symbol)} is removed")


@route.command("list")
@click.argument("data_type", required=False)
@dsn_option
@json_option
def list_(data_type: str | None, dsn: str | None, as_json: bool) -> None:
    """List the routes in the order in which they are tried."""
    with connect(dsn) as conn:
        found = sync.run(conn, calls.routes(data_type))
    if as_json:
        print_json([json.dumps(asdict(one), ensure_ascii=False) for one in found])
        return
    rows = [(one.data_type, one.symbol or "(all)", one.provider, _state(one)) for one in found]
    print_table(("data type", "symbol", "provider", "state"), rows, empty="no routes")


def _state(one: calls.Route) -> str:
    if not one.active:
        return "inactive"
    return "active" if one.in_force else "its provider is inactive"


@route.command()
@click.argument("data_type")
@click.argument("symbol", required=False)
@dsn_option
def which(data_type: str, symbol: str | None, dsn: str | None) -> None:
    """Print the provider that a kind of data, and a symbol, leads to. Exit code 1 if there is none."""
    with connect(dsn) as conn:
        found = sync.run(conn, calls.resolve(data_type, symbol))
    if found is None:
        click.echo(f"no provider serves {_shown(data_type, symbol)}", err=True)
        raise SystemExit(1)
    click.echo(clean(found.name))


def _shown(data_type: str, symbol: str | None) -> str:
    return clean(data_type) + ("" if symbol is None else f" {clean(symbol)}")
