"""tallybook provider add, set, list, show, set-secret, drop-secret, test, rotate, key, drop, and its routes (_cli/route.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import click

from tallybook._cli.common import (
    Conn,
    agreed,
    connect,
    dsn_option,
    json_object,
    json_option,
    print_json,
    print_pairs,
    print_table,
)
from tallybook._cli.errors import Problem
from tallybook._cli.route import route
from tallybook._cli.secret_input import nothing_else, one_secret, several
from tallybook._cli.text import clean, local
from tallybook._db import providers as calls
from tallybook._db import sync
from tallybook._db.providers import Listed
from tallybook._model.keyring import new_key
from tallybook._model.options import check_name
from tallybook.errors import UnknownProvider
from tallybook.extra.providers import steps
from tallybook.extra.providers.keys import KeySource
from tallybook.extra.providers.steps import Steps, Tested

T = TypeVar("T")

_LOOSE = {"ignore_unknown_options": True}
"""What looks like an option may be a secret that begins with a dash; `nothing_else` refuses it without printing it."""


@click.group()
def provider() -> None:
    """Keep those whom jobs call, and their secrets.

    Their settings, their secrets, encrypted, and the routes that choose among them.
    """


provider.add_command(route)


@provider.command(context_settings=_LOOSE)
@click.argument("name")
@click.option("--kind", required=True, help="What it is for, in your own words, like market-data or smtp.")
@click.option("--settings", metavar="JSON", help="What anybody may read, one JSON object.")
@click.option(
    "--secret", "fields", metavar="FIELD", multiple=True, help="Ask for this secret, or read a line of stdin."
)
@click.option("--secret-env", "variables", metavar="FIELD=VARIABLE", multiple=True, help="Take it from this variable.")
@click.option("--inactive", is_flag=True, help="Do not use it yet.")
@click.argument("more", nargs=-1, metavar="")
@dsn_option
def add(
    name: str,
    kind: str,
    settings: str | None,
    fields: tuple[str, ...],
    variables: tuple[str, ...],
    inactive: bool,
    more: tuple[str, ...],
    dsn: str | None,
) -> None:
    """Add a provider, with its secrets if you like, which are never given as arguments."""
    nothing_else(more)
    check_name("name", name, 64)
    known = json_object("--settings", settings) if settings else {}
    secrets = several(fields, variables)
    with connect(dsn) as conn, conn.transaction():  # nobody sees it without its secrets
        if any(one.name == name for one in sync.run(conn, calls.listed(name))):
            raise Problem(f"there is a provider {name!r} already", hint="Change it by `tallybook provider set`")
        sync.run(conn, calls.set_(name, kind, known, not inactive))
        for field, secret in secrets.items():
            _do(conn, steps.set_secret(name, field, secret, KeySource(), keep_previous=False))
    click.echo(f"provider {clean(name)!r} is added" + ("" if not inactive else ", and not active yet"))


@provider.command("set")
@click.argument("name")
@click.option("--kind", help="What it is for.")
@click.option("--settings", metavar="JSON", help="What anybody may read, one JSON object: it replaces the former one.")
@click.option("--active/--inactive", default=None, help="Whether it is used.")
@dsn_option
def set_(name: str, kind: str | None, settings: str | None, active: bool | None, dsn: str | None) -> None:
    """Change a provider: its kind, its settings, whether it is used. Running workers follow within seconds."""
    if kind is None and settings is None and active is None:
        raise click.UsageError("say what to change: --kind, --settings, --active or --inactive")
    known = None if settings is None else json_object("--settings", settings)
    with connect(dsn) as conn:
        _one(conn, name)
        what = sync.run(conn, calls.set_(name, kind, known, active))
    click.echo(f"provider {clean(name)!r} is {what}")


@provider.command("list")
@dsn_option
@json_option
def list_(dsn: str | None, as_json: bool) -> None:
    """List the providers, with the names of their secrets."""
    with connect(dsn) as conn:
        found = sync.run(conn, calls.listed())
    if as_json:
        print_json([_json(asdict(one)) for one in found])
        return
    rows = [
        (one.name, one.kind, "active" if one.active else "inactive", _fields(one), _keys(one), one.routes)
        for one in found
    ]
    empty = "no providers: add one by tallybook provider add"
    print_table(("provider", "kind", "state", "secrets", "keys", "routes"), rows, empty=empty)


def _fields(one: Listed) -> str:
    return ", ".join(found.field for found in one.fields if found.slot == "current")


def _keys(one: Listed) -> str:
    return ", ".join(sorted({found.key_id for found in one.fields}))


@provider.command()
@click.argument("name")
@dsn_option
@json_option
def show(name: str, dsn: str | None, as_json: bool) -> None:
    """Show one provider: its settings, and of its secrets the names, the keys and the times."""
    with connect(dsn) as conn:
        one = _one(conn, name)
        routes = [found for found in sync.run(conn, calls.routes()) if found.provider == name]
    if as_json:
        print_json(_json({**asdict(one), "routes": [asdict(found) for found in routes]}))
        return
    print_pairs(
        [
            ("provider", one.name),
            ("kind", one.kind),
            ("state", "active" if one.active else "inactive"),
            ("settings", json.dumps(one.settings, ensure_ascii=False)),
            ("changed", local(one.changed_at.isoformat())),
            ("routes", ", ".join(f"{found.data_type} {found.symbol or '(all)'}" for found in routes)),
        ]
    )
    click.echo()
    rows = [
        (found.field, found.slot, found.key_id, local(found.set_at.isoformat()), local(found.sealed_at.isoformat()))
        for found in one.fields
    ]
    print_table(("secret", "slot", "key", "set", "encrypted"), rows, empty="no secrets")


@provider.command("set-secret", context_settings=_LOOSE)
@click.argument("name")
@click.argument("field")
@click.option("--from-env", "variable", metavar="VARIABLE", help="Take it from this environment variable.")
@click.option("--no-previous", is_flag=True, help="Do not keep the former one: it is lost, or known to others.")
@click.option("--drop-previous", is_flag=True, help="Set nothing; forget the former one, which is no longer good.")
@click.argument("more", nargs=-1, metavar="")
@dsn_option
def set_secret(
    name: str,
    field: str,
    variable: str | None,
    no_previous: bool,
    drop_previous: bool,
    more: tuple[str, ...],
    dsn: str | None,
) -> None:
    """Set a secret: asked for, or all of stdin, or a variable's. The former one is kept as the previous one."""
    nothing_else(more)
    steps.check_field(field)
    secret = None if drop_previous else one_secret(field, variable)
    with connect(dsn) as conn:
        if secret is None:
            dropped = _do(conn, steps.drop_secret(name, field, previous_only=True))
            what = "forgotten" if dropped else "not there"
            click.echo(f"the previous {clean(field)} of provider {clean(name)!r} is {what}")
            return
        what = _do(conn, steps.set_secret(name, field, secret, KeySource(), keep_previous=not no_previous))
    click.echo(f"{clean(field)} of provider {clean(name)!r} is {what}")


@provider.command("drop-secret")
@click.argument("name")
@click.argument("field")
@click.option("--yes", is_flag=True, help="Do not ask.")
@dsn_option
def drop_secret(name: str, field: str, yes: bool, dsn: str | None) -> None:
    """Forget a secret, and what it was before."""
    steps.check_field(field)
    with connect(dsn) as conn:
        if not agreed(f"Forget {clean(field)} of provider {clean(name)!r}?", yes):
            return
        dropped = _do(conn, steps.drop_secret(name, field, previous_only=False))
    click.echo(f"{clean(field)} of provider {clean(name)!r} is {'forgotten' if dropped else 'not there'}")


@provider.command()
@click.argument("name", required=False)
@dsn_option
@json_option
def test(name: str | None, dsn: str | None, as_json: bool) -> None:
    """Decrypt every secret of a provider, or of all, and say which of them open here. Exit code 1 if one does not."""
    keys = KeySource()
    with connect(dsn) as conn:
        names = [name] if name is not None else sync.run(conn, calls.names())
        found: list[Tested] = [tested for one in names for tested in _do(conn, steps.test(one, keys))]
    if as_json:
        print_json([_json({**asdict(one), "problem": one.problem and one.problem.reason}) for one in found])
    else:
        rows = [
            (one.provider, one.field, one.slot, one.key_id, "opens" if one.problem is None else one.problem.reason)
            for one in found
        ]
        print_table(("provider", "secret", "slot", "key", "result"), rows, empty="no secrets")
    if any(one.problem for one in found):
        raise SystemExit(1)


@provider.command()
@dsn_option
def rotate(dsn: str | None) -> None:
    """Encrypt all secrets with the current key, while workers run. Exit code 1 if some are left under another one."""
    with connect(dsn) as conn:
        done = _do(conn, steps.rotate(KeySource()))
    for problem in done.problems:
        click.echo(f"left: {clean(problem)}", err=True)
    click.echo(f"{done.rotated} secrets are encrypted anew, with key {clean(done.key_id)!r}")
    if done.left:
        left = ", ".join(f"{n} with key {clean(key_id)!r}" for key_id, n in sorted(done.left.items()))
        click.echo(f"left: {left}", err=True)
        raise SystemExit(1)
    click.echo("no other key is needed any more")


@provider.command()
@click.option("--id", "key_id", metavar="ID", help="Its id; without it a random one.")
def key(key_id: str | None) -> None:
    """Print a new random key, ID:KEY, for TALLYBOOK_KEYS or the file of TALLYBOOK_KEYS_FILE. It is stored nowhere."""
    click.echo(new_key(key_id))


@provider.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@dsn_option
def drop(name: str, yes: bool, dsn: str | None) -> None:
    """Remove a provider with its secrets. Its routes have to be gone before."""
    with connect(dsn) as conn:
        one = _one(conn, name)
        if not agreed(f"Remove provider {clean(name)!r} ({clean(one.kind)}) with its secrets?", yes):
            return
        sync.run(conn, calls.drop(name))
    click.echo(f"provider {clean(name)!r} is removed")


def _one(conn: Conn, name: str) -> Listed:
    found = sync.run(conn, calls.listed(name))
    if not found:
        known = sync.run(conn, calls.names())
        raise UnknownProvider(name, known)
    return found[0]


def _do(conn: Conn, made: Steps[T]) -> T:
    return steps.drive_sync(made, partial(sync.run, conn))


def _json(columns: Mapping[str, Any]) -> str:
    def plain(value: object) -> object:
        if isinstance(value, datetime):
            return value.isoformat()
        raise TypeError(type(value).__name__)

    return json.dumps(columns, default=plain, ensure_ascii=False)
