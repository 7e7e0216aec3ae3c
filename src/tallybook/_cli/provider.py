"""tallybook provider add, set, list, show, set-secret, drop-secret, test, rotate, key, drop, route.

Secrets come from a hidden prompt, stdin or an environment variable, never as an argument: the shell's history has all
arguments, and every user can see them in the list of processes. So no message about a secret repeats its input, which
may be a secret passed by mistake.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

import click

from tallybook._cli.common import agreed, command, fail, json_object, listing
from tallybook._cli.database import Db, each
from tallybook._cli.errors import Problem
from tallybook._cli.output import Columns, clean, local, print_json, print_pairs, print_rows
from tallybook._db.sync import done
from tallybook._db.verb import Steps, drive
from tallybook._model.options import check_name
from tallybook._model.provider import Listed, Route, Secret, new_key
from tallybook.errors import UnknownProvider
from tallybook.extra.providers import steps
from tallybook.extra.providers.steps import KeySource, Tested

T = TypeVar("T")
Texts = tuple[str, ...]

_LOOSE = {"ignore_unknown_options": True}
"""An unknown option may be a secret that begins with a dash; `nothing_else` refuses it without printing it."""

provider = click.Group(
    "provider",
    help="Manage providers: settings, secrets, routes.\n\n"
    "A provider is a service that jobs call. Its secrets are encrypted.",
)


@command(of=provider, nodes=True, context_settings=_LOOSE)
@click.option("--kind", required=True, help="Its kind, in your own words, like market-data or smtp.")
@click.option("--settings", metavar="JSON", help="Settings that are not secret, one JSON object.")
@click.option(
    "--secret", "fields", metavar="FIELD", multiple=True, help="Prompt for this secret, or read a line of stdin."
)
@click.option("--secret-env", "variables", metavar="FIELD=VARIABLE", multiple=True, help="Read it from this variable.")
@click.option("--inactive", is_flag=True, help="Do not use it yet.")
@click.argument("more", nargs=-1, metavar="")
def add(
    db: Db, name: str, kind: str, settings: str | None, fields: Texts, variables: Texts, inactive: bool, more: Texts
) -> str | None:
    """Add a provider, with or without secrets; they are never arguments."""
    nothing_else(more)
    check_name("name", name, 64)
    known = json_object("--settings", settings) if settings else {}
    secrets = several(fields, variables)  # once, for all nodes

    def put(db: Db) -> str:
        with db.conn.transaction():  # no reader sees it without its secrets
            if any(one.name == name for one in db.run(steps.listed(name))):
                raise Problem(f"provider {name!r} exists already", hint="Change it by `tallybook provider set`")
            db.run(steps.set_(name, kind, known, not inactive))
            for field, secret in secrets.items():
                _do(db, steps.set_secret(name, field, secret, KeySource(), keep_previous=False))
        return f"provider {clean(name)!r} is added" + ("" if not inactive else ", and not active yet")

    return each(db, put)


@command("set", of=provider, nodes="each")
@click.option("--kind", help="Its kind.")
@click.option("--settings", metavar="JSON", help="Settings that are not secret, one JSON object; replaces the old one.")
@click.option("--active/--inactive", default=None, help="Whether it is used.")
def set_(db: Db, name: str, kind: str | None, settings: str | None, active: bool | None) -> str:
    """Change a provider's kind, settings or use; applies within seconds."""
    if kind is None and settings is None and active is None:
        raise click.UsageError("pass a change: --kind, --settings, --active or --inactive")
    known = None if settings is None else json_object("--settings", settings)
    _one(db, name)
    return f"provider {clean(name)!r} is {db.run(steps.set_(name, kind, known, active))}"


_COLUMNS: Columns = {
    "provider": "name",
    "kind": "kind",
    "state": lambda one: "active" if one.active else "inactive",
    "secrets": lambda one: ", ".join(found.field for found in one.fields if found.slot == "current"),
    "keys": lambda one: ", ".join(sorted({found.key_id for found in one.fields})),
    "routes": "routes",
}


@listing(_COLUMNS, of=provider, empty="no providers: add one by tallybook provider add")
def list_(db: Db) -> list[Listed]:
    """List the providers, with the names of their secrets."""
    return db.run(steps.listed())


_SECRETS: Columns = {"secret": "field", "slot": "slot", "key": "key_id", "set": "set_at", "encrypted": "sealed_at"}


@command(of=provider, json=True)
def show(db: Db, name: str, as_json: bool) -> None:
    """Show one provider: its settings, and names, keys and times of its secrets."""
    one = _one(db, name)
    routes = [found for found in db.run(steps.ROUTES()) if found.provider == name]
    if as_json:
        print_json({**asdict(one), "routes": [asdict(found) for found in routes]})
        return
    print_pairs({
        "provider": one.name, "kind": one.kind, "state": "active" if one.active else "inactive",
        "settings": json.dumps(one.settings, ensure_ascii=False), "changed": local(one.changed_at),
        "routes": ", ".join(f"{found.data_type} {found.symbol or '(all)'}" for found in routes),
    })  # fmt: skip
    click.echo()
    print_rows(_SECRETS, one.fields, empty="no secrets")


@command("set-secret", of=provider, nodes=True, context_settings=_LOOSE)
@click.option("--from-env", "variable", metavar="VARIABLE", help="Read it from this environment variable.")
@click.option("--no-previous", is_flag=True, help="Do not keep the old value, because it is lost or has leaked.")
@click.option("--drop-previous", is_flag=True, help="Set nothing; drop the previous value.")
@click.argument("more", nargs=-1, metavar="")
def set_secret(
    db: Db, name: str, field: str, variable: str | None, no_previous: bool, drop_previous: bool, more: Texts
) -> str | None:
    """Set a secret from a prompt, stdin or a variable; keep the old one as previous."""
    nothing_else(more)
    steps.check_field(field)
    secret = None if drop_previous else one_secret(field, variable)

    def put(db: Db) -> str:
        if secret is None:
            what = "is dropped" if _do(db, steps.drop_secret(name, field, previous_only=True)) else "does not exist"
            return f"the previous {clean(field)} of provider {clean(name)!r} {what}"
        what = _do(db, steps.set_secret(name, field, secret, KeySource(), keep_previous=not no_previous))
        return f"{clean(field)} of provider {clean(name)!r} is {what}"

    return each(db, put)


@command("drop-secret", of=provider, nodes="each")
def drop_secret(db: Db, name: str, field: str, yes: bool) -> str | None:
    """Drop a secret and its previous value."""
    steps.check_field(field)
    if not agreed(f"Drop {clean(field)} of provider {clean(name)!r}?", yes):
        return None
    dropped = _do(db, steps.drop_secret(name, field, previous_only=False))
    return f"{clean(field)} of provider {clean(name)!r} {'is dropped' if dropped else 'does not exist'}"


_TESTED: Columns = {
    "provider": "provider", "secret": "field", "slot": "slot", "key": "key_id",
    "result": lambda row: row["problem"] or "opens",
}  # fmt: skip


@command(of=provider, json=True)
def test(db: Db, name: str | None, as_json: bool) -> None:
    """Decrypt the secrets of a provider, or of all. Exit code 1 if one fails."""
    keys = KeySource()
    names = [name] if name is not None else db.run(steps.NAMES)
    found: list[Tested] = [tested for one in names for tested in _do(db, steps.test(one, keys))]
    rows = [{**asdict(one), "problem": one.problem and one.problem.reason} for one in found]
    print_rows(_TESTED, rows, empty="no secrets", as_json=as_json)
    if any(one.problem for one in found):
        raise SystemExit(1)


@command(of=provider, nodes="each")
def rotate(db: Db) -> str:
    """Encrypt all secrets with the current key. Exit code 1 if some are left."""
    done = _do(db, steps.rotate(KeySource()))
    for problem in done.problems:
        click.echo(f"left: {clean(problem)}", err=True)
    click.echo(f"{done.rotated} secrets are encrypted with key {clean(done.key_id)!r}")
    if done.left:
        left = ", ".join(f"{n} with key {clean(key_id)!r}" for key_id, n in sorted(done.left.items()))
        click.echo(f"left: {left}", err=True)
        raise SystemExit(1)
    return "no other key is needed"


@provider.command()
@click.option("--id", "key_id", metavar="ID", help="Its id. [random]")
def key(key_id: str | None) -> None:
    """Print a new random key, ID:KEY, for TALLYBOOK_KEYS. It is stored nowhere."""
    click.echo(new_key(key_id))


@command(of=provider, nodes="each")
def drop(db: Db, name: str, yes: bool) -> str | None:
    """Drop a provider with its secrets. Drop its routes first."""
    one = _one(db, name)
    if not agreed(f"Remove provider {clean(name)!r} ({clean(one.kind)}) with its secrets?", yes):
        return None
    db.run(steps.DROP(name))
    return f"provider {clean(name)!r} is removed"


def _one(db: Db, name: str) -> Listed:
    if not (found := db.run(steps.listed(name))):
        known = db.run(steps.NAMES)
        raise UnknownProvider(name, known)
    return found[0]


def _do(db: Db, made: Steps[T]) -> T:
    return done(drive(made, db.run))


@provider.group()
def route() -> None:
    """Route kinds of data to providers. A route for a symbol takes precedence."""


@command("set", of=route, nodes="each")
@click.option("--symbol", help="Only for this symbol. [all symbols without their own route]")
@click.option("--active/--inactive", default=None, help="Whether the route applies.")
def set_route(db: Db, data_type: str, name: str, symbol: str | None, active: bool | None) -> str:
    """Route a kind of data to a provider; applies within seconds."""
    what = db.run(steps.SET_ROUTE(data_type, name, symbol, active), name)
    return f"the route of {_said(data_type, symbol)} is {what}"


@command("drop", of=route, nodes="each")
@click.option("--symbol", help="The route of this symbol. [the general one]")
def drop_route(db: Db, data_type: str, symbol: str | None) -> str:
    """Remove a route. Exit code 1 if there is none."""
    if not db.run(steps.DROP_ROUTE(data_type, symbol)):
        fail(f"there is no route of {_said(data_type, symbol)}", err=True)
    return f"the route of {_said(data_type, symbol)} is removed"


_ROUTES: Columns = {
    "data type": "data_type", "symbol": lambda one: one.symbol or "(all)", "provider": "provider",
    "state": lambda one: ("active" if one.in_force else "its provider is inactive") if one.active else "inactive",
}  # fmt: skip


@listing(_ROUTES, of=route, empty="no routes")
def list_routes(db: Db, data_type: str | None) -> list[Route]:
    """List the routes in the order in which they are tried."""
    return db.run(steps.ROUTES(data_type))


@command(of=route)
def which(db: Db, data_type: str, symbol: str | None) -> str:
    """Print the provider of a kind of data and a symbol. Exit code 1 if there is none."""
    found = db.run(steps.selected(data_type, symbol))
    if found is None:
        fail(f"no provider serves {_said(data_type, symbol)}", err=True)
    return clean(found.name)


def _said(data_type: str, symbol: str | None) -> str:
    return clean(data_type) + ("" if symbol is None else f" {clean(symbol)}")


def nothing_else(more: Sequence[str]) -> None:
    """Raise a usage error for extra arguments without printing them: one of them may be the secret."""
    if more:
        hint = "Pass a secret at the prompt, on stdin, or by --from-env"
        raise click.UsageError(f"too many arguments, or an unknown option (not shown). {hint}")


def one_secret(field: str, variable: str | None) -> Secret:
    """Return the secret from this variable, from a prompt on a terminal, or from stdin without the final newline."""
    return _typed(field, sys.stdin.read) if variable is None else given(field, variable, "--from-env")


def several(fields: Sequence[str], variables: Sequence[str]) -> dict[str, Secret]:
    """Return secrets by field: of --secret FIELD (a prompt or a line of stdin) and --secret-env FIELD=VARIABLE."""
    found: dict[str, Secret] = {}
    for pair in variables:
        field, equals, variable = pair.partition("=")
        if not equals:
            raise click.UsageError("--secret-env is FIELD=VARIABLE, the name of a variable that holds the secret")
        steps.check_field(field)
        found[field] = given(field, variable, "--secret-env")
    for field in fields:
        steps.check_field(field)
        found[field] = _typed(field, sys.stdin.readline)
    return found


def given(field: str, variable: str, option: str) -> Secret:
    if variable not in os.environ:  # its name is not shown: it may be the secret
        raise click.UsageError(f"{option} for {field}: there is no environment variable of that name (not shown)")
    return Secret(os.environ[variable])


def _typed(field: str, read: Callable[[], str]) -> Secret:
    if sys.stdin.isatty():
        return Secret(click.prompt(field, hide_input=True, confirmation_prompt=True, err=True))
    return Secret(read().removesuffix("\n").removesuffix("\r"))
