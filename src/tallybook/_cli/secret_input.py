"""How the command line is given a secret: by a hidden prompt, by stdin, or by a variable's name; never as an argument.

What stands on a command line is in the shell's history and in everybody's list of processes. What is there by mistake is at
least not printed once more: no message here repeats what it was given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import click

from tallybook._model.secret import Secret
from tallybook.extra.providers.steps import check_field


def nothing_else(more: Sequence[str]) -> None:
    """A usage error for words that are too many: one of them may be the secret."""
    if more:
        raise click.UsageError(
            "too many words, or an unknown option (not shown). A secret is asked for, read from stdin, or from --from-env"
        )


def one_secret(field: str, variable: str | None) -> Secret:
    """The secret: of this variable, asked for on a terminal, or all of stdin without the line's end."""
    check_field(field)
    if variable is not None:
        return given(field, variable, "--from-env")
    if sys.stdin.isatty():
        return _asked(field)
    return _without_end(sys.stdin.read)


def several(fields: Sequence[str], variables: Sequence[str]) -> dict[str, Secret]:
    """Secrets by field: those of --secret FIELD, asked for or one line of stdin each, and of --secret-env FIELD=VARIABLE."""
    found: dict[str, Secret] = {}
    for pair in variables:
        field, equals, variable = pair.partition("=")
        if not equals:
            raise click.UsageError("--secret-env is FIELD=VARIABLE, the name of a variable that holds the secret")
        check_field(field)
        found[field] = given(field, variable, "--secret-env")
    for field in fields:
        check_field(field)
        found[field] = _asked(field) if sys.stdin.isatty() else _without_end(sys.stdin.readline)
    return found


def given(field: str, variable: str, option: str) -> Secret:
    """The secret in an environment variable."""
    if variable not in os.environ:  # whose name is not shown: it may be the secret
        raise click.UsageError(f"{option} for {field}: there is no environment variable of that name (not shown)")
    return Secret(os.environ[variable])


def _asked(field: str) -> Secret:
    return Secret(click.prompt(field, hide_input=True, confirmation_prompt=True, err=True))


def _without_end(read: Callable[[], str]) -> Secret:
    return Secret(read().removesuffix("\n").removesuffix("\r"))
