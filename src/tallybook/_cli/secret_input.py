"""Input of secrets: by a hidden prompt, from stdin, or from an environment variable; never as an argument.

The shell's history has all arguments, and every user can see them in the list of processes. So no message here repeats
its input, which may be a secret passed by mistake.
"""

import os
import sys
from collections.abc import Callable, Sequence

import click

from tallybook._model.provider import Secret
from tallybook.extra.providers.steps import check_field


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
        check_field(field)
        found[field] = given(field, variable, "--secret-env")
    for field in fields:
        check_field(field)
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
