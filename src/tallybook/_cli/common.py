"""Shared code of the commands: the command decorators, shared options, questions.

@command(of=breaker)                                   fn(db, ...) returns the line to print
@listing({"key": "name", ...}, of=breaker, empty=...)  fn(db, ...) returns rows: a table, or with --json a document
"""

import getpass
import json
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import wraps
from inspect import signature
from typing import Any, Literal, Never, TypeVar

import click

from tallybook._cli.database import Db, Found, Merge, each, gathered, nodes_option
from tallybook._cli.output import Columns, print_rows
from tallybook._model.durations import parse_duration
from tallybook.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
Made = Callable[[Callable[..., Any]], click.Command]


def text(value: str) -> str:
    """The type of an option: a text that is not empty, as an unset variable of the shell would be."""
    if not value:
        raise ValueError("it is empty. Is a variable of the shell not set?")
    return value


# After or before the command. Click must not read the environment: an App's dsn has precedence over it.
dsn_option = click.option(
    "--dsn", metavar="DSN", type=text, help="Connection string or URL; else TALLYBOOK_DSN, else the PG* variables.",
    callback=lambda context, _, value: value or context.find_root().params.get("dsn"),
)  # fmt: skip
read_dsn_option = click.option(
    "--read-dsn", metavar="DSN", type=text, help="Read from this hot standby; its lag is shown. [the primary]"
)
queues_option = click.option(
    "--queues", metavar="LIST", type=text,
    help="Queues and slots, like mail=10,default. [all of the app's tasks, 10 each]",
)  # fmt: skip
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def options(*given: Callable[[Any], Any]) -> Callable[[F], F]:
    def added(command: F) -> F:
        for option in reversed(given):
            command = option(command)
        return command

    return added


def state_option(*states: str) -> Callable[[F], F]:
    kind = click.Choice(states)
    return click.option("--state", "states", multiple=True, type=kind, metavar="STATE", help=f"{', '.join(states)}.")


def limit_option(
    most: int = 1_000_000, default: int = 50, says: str = "Show at most this many.", names: Sequence[str] = ("--limit",)
) -> Callable[[F], F]:
    return click.option(*names, type=click.IntRange(1, most), default=default, show_default=True, help=says)


def duration(value: str | timedelta) -> timedelta:
    """The type of an option or argument: a duration in PostgreSQL's syntax."""
    try:
        return parse_duration(value)
    except ConfigError as error:
        hint = "" if error.hint is None else f". {error.hint.removesuffix(', or pass a timedelta')}"
        raise ValueError(f"{value!r}: {error.reason}{hint}") from None


def command(
    name: str | None = None,
    *,
    of: click.Group | None = None,
    json: bool = False,
    schema: bool = True,
    nodes: bool | Literal["each"] = False,
    home: bool = False,
    reads: bool = False,
    **settings: Any,
) -> Made:
    """Make a command from a function of a Db that returns the line to print, or None.

    A parameter without an option is an argument; `by` and `yes` have theirs. With `json` the function gets `as_json`.
    Without `schema` the database need not have a supported schema. `nodes` adds the option --nodes for its Db; with
    "each" it runs on each node in turn. With `home` it uses the home node of several. With `reads` it can read from a
    standby.
    """

    def made(fn: Callable[..., Any]) -> click.Command:
        _add_parameters(fn)

        @wraps(fn)
        def run(dsn: str | None, nodes_: str | None = None, read_dsn: str | None = None, **given: Any) -> None:
            with ExitStack() as stack:
                db = Db(dsn, stack, schema, nodes_, home=home, read_dsn=read_dsn)
                if nodes == "each":
                    line = each(db, lambda one: fn(one, **given), as_json=given.get("as_json", False))
                else:
                    line = fn(db, **given)
            if line is not None:
                click.echo(line)

        found = dsn_option(_json_option(run) if json else run)
        found = read_dsn_option(found) if reads else found
        return (click.command if of is None else of.command)(name, **settings)(nodes_option(found) if nodes else found)

    return made


_ARGUMENTS: dict[object, dict[str, Any]] = {
    str: {}, int: {"type": int}, timedelta: {"type": duration},
    str | None: {"required": False}, timedelta | None: {"type": duration, "required": False},
}  # fmt: skip

_OPTIONS = {
    "by": click.Option(
        ["--by"], metavar="WHO", help="Your name for the record. [user@host]", callback=lambda _, on, by: by or me()
    ),
    "yes": click.Option(["--yes"], is_flag=True, help="Do not ask for confirmation."),
}


def _add_parameters(fn: Callable[..., Any]) -> None:
    """Add --by, --yes, or an argument of its annotation's type, for each parameter that no decorator declares."""
    declared = {one.name: one for one in reversed(getattr(fn, "__click_params__", []))}
    arguments: list[click.Parameter] = []
    for one in list(signature(fn).parameters.values())[1:]:
        known = declared.get(one.name) or _OPTIONS.get(one.name)
        if known is None and one.name != "as_json" and one.kind is not one.VAR_KEYWORD:
            default = {} if one.default is one.empty else {"default": one.default}
            known = click.Argument([one.name], **_ARGUMENTS[one.annotation], **default)
        if isinstance(known, click.Argument):
            arguments.append(known)
        elif known is not None:
            declared[one.name] = known
    others = [one for one in declared.values() if one not in arguments]
    fn.__click_params__ = [*arguments, *others][::-1]  # type: ignore[attr-defined]


def listing(
    shown: Columns,
    *,
    empty: str,
    name: str | None = "list",
    of: click.Group | None = None,
    newest: bool = False,
    plain: Callable[[Any], object] | None = None,
    merge: Merge | None = None,
    home: bool = False,
) -> Made:
    """Make a command from a function of a Db that returns rows: dataclasses, dicts, or JSON texts of the server.

    With `newest` a full page mentions --limit. `plain` converts values that JSON does not support; by default times
    become ISO 8601 and durations become seconds. `merge` merges the lists of all nodes; by default they are
    concatenated.
    """

    def made(fn: Callable[..., Any]) -> click.Command:
        @wraps(fn)
        def run(db: Db, as_json: bool, **given: Any) -> None:
            found: Found = []
            if db.nodes:
                found = [(node, row) for node, rows in gathered(db, lambda one: fn(one, **given)) for row in rows]
                found = found if merge is None else merge(found, given)
            rows = [row for _, row in found] if db.nodes else fn(db, **given)
            print_rows(shown, rows, empty=empty, nodes=[node for node, _ in found], as_json=as_json, plain=plain)
            if newest and not as_json and len(rows) == given["limit"]:
                click.echo(f"the newest {len(rows)}; --limit shows more", err=True)

        return command(name, of=of, json=True, nodes=True, home=home, reads=True)(run)

    return made


def me() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def fail(line: str, *, err: bool = False) -> Never:
    click.echo(line, err=err)
    raise SystemExit(1)


def json_object(option: str, text: str) -> dict[str, Any]:
    """Parse the JSON object of an option; raise a usage error that names the option for anything else."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{option} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"{option} must be one JSON object, like '{{\"user_id\": 42}}'")
    return found


def agreed(question: str, yes: bool) -> bool:
    """Ask for confirmation and return the answer; without a terminal, only --yes confirms."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Pass --yes where there is no terminal to ask on")
    return click.confirm(question, err=True)
