"""The command line: one file per noun, and errors for people.

common   the DSN, loading an app, terminal-safe output
errors   one line and an exit code for an exception: 2 for usage and settings, 1 for the rest
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import click

from tallybook._cli import errors
from tallybook._cli.audit import audit
from tallybook._cli.breaker import breaker
from tallybook._cli.common import DSN, dsn_before
from tallybook._cli.counting import count, event
from tallybook._cli.dead import dead
from tallybook._cli.demo import demo
from tallybook._cli.dev import dev
from tallybook._cli.doctor import doctor
from tallybook._cli.enqueue import enqueue
from tallybook._cli.history import history
from tallybook._cli.job import job
from tallybook._cli.limit import limit
from tallybook._cli.mcp import mcp
from tallybook._cli.migrate import info, migrate, uninstall
from tallybook._cli.node import node
from tallybook._cli.provider import provider
from tallybook._cli.queue import queue
from tallybook._cli.roles import roles
from tallybook._cli.schedule import schedule
from tallybook._cli.service import service
from tallybook._cli.subject import subject
from tallybook._cli.task import task
from tallybook._cli.top import top
from tallybook._cli.web import web
from tallybook._cli.worker import worker

__all__ = ["GROUPS", "cli", "main"]

GROUPS: dict[str, tuple[click.Command, ...]] = {
    "Run": (dev, worker, web, mcp, demo),
    "Look": (top, job, dead, count, event, task, audit, doctor),
    "Change": (enqueue, queue, schedule, subject, limit, breaker, provider),
    "Maintain": (migrate, info, node, service, history, roles, uninstall),
}
"""The groups of commands in the help."""


class _Cli(click.Group):
    """The group of all commands; prints errors of commands as one line on stderr."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Never:
        """Run a command and exit with its exit code."""
        extra.pop("standalone_mode", None)
        try:
            code = super().main(args, prog_name or "tallybook", standalone_mode=False, **extra)
        except (Exception, KeyboardInterrupt) as error:
            code = errors.report(error)
        raise SystemExit(code if isinstance(code, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order in which a new user needs them."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each of the four groups under its heading."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(str(one.name), one.get_short_help_str(width)) for one in commands])


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--dsn", metavar="DSN", expose_value=False, callback=dsn_before, help=DSN)
@click.version_option(package_name="tallybook", message="tallybook %(version)s")
def cli() -> None:
    """Tallybook: background jobs inside your own PostgreSQL.

    --dsn works before and after the command. TALLYBOOK_DEBUG=1 shows tracebacks.
    """


for _command in (command for commands in GROUPS.values() for command in commands):
    cli.add_command(_command)


def main() -> None:
    """The entry point of `tallybook`."""
    cli.main()
