"""The command line: one file a noun, errors as a person expects them.

common   the DSN, loading an app, output that is safe on a terminal
errors   from an exception to one line and an exit code: 2 for usage and settings, 1 for the rest
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import click

from tallybook._cli import errors
from tallybook._cli.api_key import api_key
from tallybook._cli.audit import audit
from tallybook._cli.breaker import breaker
from tallybook._cli.counting import counts, event, recount, series, verify
from tallybook._cli.dead import dead
from tallybook._cli.demo import demo
from tallybook._cli.dev import dev
from tallybook._cli.doctor import doctor
from tallybook._cli.enqueue import enqueue
from tallybook._cli.job import job
from tallybook._cli.limit import limit
from tallybook._cli.migrate import info, migrate, uninstall
from tallybook._cli.provider import provider
from tallybook._cli.queue import queue
from tallybook._cli.retention import retention
from tallybook._cli.roles import roles
from tallybook._cli.schedule import schedule
from tallybook._cli.service import service
from tallybook._cli.subject import subject
from tallybook._cli.task import task
from tallybook._cli.top import top
from tallybook._cli.web import web, web_user
from tallybook._cli.why import trace
from tallybook._cli.worker import worker

__all__ = ["cli", "main"]


class _Cli(click.Group):
    """The group of all commands; what goes wrong below it ends as one line on stderr."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Never:
        """Run a command and leave with its exit code."""
        extra.pop("standalone_mode", None)
        try:
            code = super().main(args, prog_name or "tallybook", standalone_mode=False, **extra)
        except (Exception, KeyboardInterrupt) as error:
            code = errors.report(error)
        raise SystemExit(code if isinstance(code, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which a newcomer meets them."""
        return list(self.commands)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tallybook", message="tallybook %(version)s")
def cli() -> None:
    """Tallybook: background jobs inside your own PostgreSQL.

    The database is told by --dsn, else by TALLYBOOK_DSN, else by libpq's PG* variables. TALLYBOOK_DEBUG=1
    shows tracebacks.
    """


@click.command()
def version() -> None:
    """Print the version of this package."""
    from tallybook import __version__

    click.echo(f"tallybook {__version__}")


for _command in (
    dev,
    migrate,
    worker,
    web,
    web_user,
    enqueue,
    job,
    trace,
    queue,
    task,
    schedule,
    subject,
    limit,
    breaker,
    dead,
    provider,
    event,
    verify,
    recount,
    service,
    retention,
    audit,
    api_key,
    top,
    doctor,
    info,
    roles,
    demo,
    uninstall,
    version,
):
    cli.add_command(_command)
queue.add_command(counts)
queue.add_command(series)


def main() -> None:
    """The entry point of `tallybook`."""
    cli.main()
