"""manage.py tallybook ...: the command line, with the database and the App of the settings."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tallybook._cli import cli
from tallybook.contrib.django import _settings

_WORKER = "tallybook.contrib.django.worker:app"


class Command(BaseCommand):
    """Runs the command line. This and child processes get the password by the environment, never as an argument."""

    help = "Tallybook's command line: worker, migrate, job, queue, web, top, doctor and the others."
    requires_system_checks: Sequence[str] = []

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass on everything but Django's own options."""
        parser = CommandParser(add_help=False, allow_abbrev=False)
        for option in ("--settings", "--pythonpath", "--database"):  # Django has read the first two already
            parser.add_argument(option)
        told, words = parser.parse_known_args(argv[2:])
        self._prepare(told.database, told.pythonpath)
        cli.main(words, prog_name=f"{Path(argv[0]).name} {argv[1]}")

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Print the help of our own commands, for `manage.py help tallybook`."""
        cli.main(["--help"], prog_name=f"{Path(prog_name).name} {subcommand}")

    def add_arguments(self, parser: CommandParser) -> None:
        """For call_command("tallybook", "migrate")."""
        parser.add_argument("--database")
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def handle(self, *args: Any, words: list[str], database: str | None = None, **options: Any) -> None:
        """Run one command in this process. Raises CommandError if it fails."""
        self._prepare(database, None)
        with ExitStack() as stack:
            for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
                if options.get(name):
                    stack.enter_context(redirect(options[name]))
            try:
                cli.main(words, prog_name="manage.py tallybook")
            except SystemExit as end:
                if end.code:
                    raise CommandError(f"tallybook {' '.join(words)} has failed", returncode=int(end.code)) from None

    def _prepare(self, database: str | None, pythonpath: str | None) -> None:
        if database is not None:
            os.environ[_settings.DATABASE] = database
        os.environ["TALLYBOOK_DSN"] = _settings.dsn(_settings.read().database)
        os.environ.setdefault("TALLYBOOK_APP", _WORKER)
        # Processes that a command starts must find the project where manage.py has found it.
        found = [str(Path(path).resolve()) for path in sys.path[: 2 if pythonpath else 1]]
        if paths := os.environ.get("PYTHONPATH"):
            found += paths.split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(found))
