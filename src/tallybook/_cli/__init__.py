"""The command line: one file per noun or for several small ones, and errors for people.

common   the command decorators and the DSN; output: tables, pairs and JSON
errors   one line and an exit code for an exception: 2 for usage and settings, 1 for the rest
"""

import os
import sys
from collections import UserDict
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Never

import click

from tallybook._cli import errors
from tallybook._cli.common import dsn_option

__all__ = ["GROUPS", "cli", "main"]

GROUPS: dict[str, tuple[str, ...]] = {  # as the help shows them
    "Run": ("dev", "worker", "web", "mcp", "demo"),
    "Look": ("top", "job", "dead", "count", "event", "task", "audit", "doctor"),
    "Change": ("enqueue", "queue", "schedule", "subject", "limit", "breaker", "provider"),
    "Maintain": ("migrate", "node", "service", "history", "roles", "uninstall"),
}
_FILES = {  # of the commands that have none with their own name
    "demo": "dev", "mcp": "web", "count": "counting", "event": "counting", "breaker": "limit", "migrate": "maintain",
    "uninstall": "maintain", "doctor": "maintain", "service": "maintain", "history": "maintain", "audit": "maintain",
    "roles": "maintain",
}  # fmt: skip


class _Commands(UserDict[str, Any]):
    """The commands by name. The file of a command is imported when it is used, so that the others cost no time."""

    def __getitem__(self, name: str) -> click.Command:
        if self.data[name] is None:
            self.data[name] = getattr(import_module(f"tallybook._cli.{_FILES.get(name, name)}"), name)
        found: click.Command = self.data[name]
        return found


_COMMANDS = _Commands(dict.fromkeys(name for names in GROUPS.values() for name in names))


class _Cli(click.Group):
    """The group of all commands; prints errors of commands as one line on stderr."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Never:
        extra.pop("standalone_mode", None)
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # the shell has closed it, as by <&-
                setattr(sys, name, open(os.devnull, mode, errors="replace"))  # noqa: SIM115, PTH123
        try:
            code = super().main(args, prog_name or "tallybook", standalone_mode=False, **extra)
        except (Exception, KeyboardInterrupt) as error:
            code = errors.report(error)
        raise SystemExit(code if isinstance(code, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order in which a new user needs them."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


@click.group(
    cls=_Cli, commands=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@dsn_option
@click.version_option(package_name="tallybook", message="tallybook %(version)s")
def cli(dsn: str | None) -> None:
    """Tallybook: background jobs inside your own PostgreSQL.

    --dsn works before and after the command. TALLYBOOK_DEBUG=1 shows tracebacks.
    """


def main() -> None:
    if sys.stdin:  # bytes that are not UTF-8 are read as in arguments, and refused in the same way
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    try:
        cli.main()
    finally:
        try:
            click.echo(nl=False)  # flushes
        except OSError:  # reported already; Python would write the rest at its exit, and report it again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
