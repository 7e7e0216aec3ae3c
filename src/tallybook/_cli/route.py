"""tallybook provider route set, drop, list, which: which provider serves which kind of data."""

from __future__ import annotations

import click

from tallybook._cli.common import Columns, command, fail, listing
from tallybook._cli.database import Db
from tallybook._cli.text import clean
from tallybook._db import providers as calls

route = click.Group("route", help="Choose a provider by kind of data and symbol; one for a symbol comes first.")


@command("set", of=route, nodes="each")
@click.option("--symbol", help="Only for this symbol. [all symbols without their own route]")
@click.option("--active/--inactive", default=None, help="Whether the route applies.")
def set_(db: Db, data_type: str, name: str, symbol: str | None, active: bool | None) -> str:
    """Route a kind of data to a provider. Workers follow within seconds."""
    what = db.run(calls.route_set(data_type, name, symbol, active), name)
    return f"the route of {_shown(data_type, symbol)} is {what}"


@command(of=route, nodes="each")
@click.option("--symbol", help="The route of this symbol. [the general one]")
def drop(db: Db, data_type: str, symbol: str | None) -> str:
    """Remove a route. Exit code 1 if there is none."""
    if not db.run(calls.route_drop(data_type, symbol)):
        fail(f"there is no route of {_shown(data_type, symbol)}", err=True)
    return f"the route of {_shown(data_type, symbol)} is removed"


def _state(one: calls.Route) -> str:
    if not one.active:
        return "inactive"
    return "active" if one.in_force else "its provider is inactive"


_COLUMNS: Columns = {
    "data type": "data_type", "symbol": lambda one: one.symbol or "(all)", "provider": "provider", "state": _state,
}  # fmt: skip


@listing(_COLUMNS, of=route, empty="no routes")
def list_(db: Db, data_type: str | None) -> list[calls.Route]:
    """List the routes in the order in which they are tried."""
    return db.run(calls.routes(data_type))


@command(of=route)
def which(db: Db, data_type: str, symbol: str | None) -> str:
    """Print the provider of a kind of data and a symbol. Exit code 1 if there is none."""
    found = db.run(calls.resolve(data_type, symbol))
    if found is None:
        fail(f"no provider serves {_shown(data_type, symbol)}", err=True)
    return clean(found.name)


def _shown(data_type: str, symbol: str | None) -> str:
    return clean(data_type) + ("" if symbol is None else f" {clean(symbol)}")
