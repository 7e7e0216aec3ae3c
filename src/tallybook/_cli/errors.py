"""Errors for people: one line for the problem and one for the remedy."""

import errno
import os
import re
import sys
import traceback
from datetime import timedelta
from difflib import get_close_matches

import click

from tallybook._cli.output import clean
from tallybook._db.driver import Error
from tallybook._db.policy import is_final
from tallybook._model.durations import format_duration
from tallybook.errors import ConfigError, PayloadError, QueueUnavailable, SchemaError, SignatureError, TallybookError

APP_FORM = "Write -A module:app, as in -A shop.jobs:app for `app = App(...)` in shop/jobs.py"


class Problem(click.ClickException):
    """A user error: a line, a hint and an exit code."""

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = exit_code


def say(message: str, hint: str | None = None) -> None:
    """Print an error without ending the program."""
    click.echo(f"tallybook: error: {clean(message)}", err=True)
    if hint:
        click.echo(f"  hint: {clean(hint)}", err=True)


def report(error: BaseException) -> int:
    """Print an error and return the exit code; raise an unexpected error again."""
    if os.environ.get("TALLYBOOK_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return 2
    if isinstance(error, click.Abort | KeyboardInterrupt):
        click.echo("tallybook: interrupted", err=True)
        return 130
    found = problem(error)
    if found is None:
        raise error
    say(found.message, found.hint)
    return found.code


def problem(error: BaseException) -> Problem | None:
    """Convert an error to a Problem; None for an unexpected error, which is a defect of Tallybook."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "tallybook"
        hint = near(error) or f"See `{where} --help`"
        if isinstance(error, click.MissingParameter) and error.param and error.param.name == "target":
            hint = APP_FORM
        # Click's own suggestion of an option is left out: the hint has ours.
        text = error.message if isinstance(error, click.NoSuchOption) else error.format_message()
        text = text.removesuffix(".").replace("is not a valid integer range", "is not a valid integer")
        return Problem(text, hint=hint, exit_code=2)
    if isinstance(error, click.ClickException):
        return Problem(error.format_message(), exit_code=error.exit_code)
    if isinstance(error, TallybookError):
        return _of_tallybook(error)
    return _of_postgres(error) if isinstance(error, Error) else _of_python(error)


def _of_python(error: BaseException) -> Problem | None:
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        # Without the value, which may be a DSN with a password.
        return Problem("an argument, the input or an environment variable is not valid UTF-8", exit_code=2)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Problem(f"cannot write: {error.strerror}")
    return None


_MEANT = {  # states of other libraries, and ours
    "failed": "dead or retrying", "failure": "dead or retrying", "error": "dead or retrying", "discarded": "dead",
    "pending": "available or scheduled", "queued": "available", "ready": "available", "todo": "available",
    "active": "running", "executing": "running", "processing": "running", "doing": "running", "started": "running",
    "done": "completed", "success": "completed", "succeeded": "completed", "finished": "completed",
    "aborted": "cancelled", "revoked": "cancelled", "delayed": "scheduled", "blocked": "waiting",
}  # fmt: skip

_OPTIONS = {  # options of other libraries' commands, and ours; one of the command itself has precedence
    "--concurrency": "--queues default=10", "--queue": "--queues", "--workers": "--processes",
    "--loglevel": "--log-level", "--status": "--state", "--at": "--run-at", "--eta": "--run-at", "--in": "--delay",
    "--countdown": "--delay",
}  # fmt: skip


def near(error: click.UsageError) -> str | None:
    """Suggest the nearest option or choice, or a noun with this command or option. Click suggests misspelt commands."""
    if error.ctx is None:
        return None
    command = error.ctx.command
    quoted = re.match(r"(No such command )?'([^']*)'", error.message)
    if quoted and quoted[1] and isinstance(command, click.Group):
        word, nouns = quoted[2], command.commands.items() if error.ctx.parent is None else ()
        found = [f"`tallybook {noun} {word}`" for noun, one in nouns if word in getattr(one, "commands", {})]
        found += [f"`tallybook {noun} --{word}`" for noun, one in nouns for of in one.params if f"--{word}" in of.opts]
        return f"Did you mean {' or '.join(found)}?" if 0 < len(found) < 4 else None
    if isinstance(error, click.NoSuchOption):
        options = command.get_params(error.ctx)
        given, known = error.option_name, [name for one in options for name in (*one.opts, *one.secondary_opts)]
        if given.removeprefix("--") in known:
            return f"{given.removeprefix('--').upper()} is an argument: write its value without a name"
        if re.match(r"-\d", given):
            return "A value that begins with - is read as an option: write -- before it"
        known = [name for name in known if name.startswith("--")]
        theirs = {name: ours for name, ours in _OPTIONS.items() if ours.split()[0] in known}
    elif quoted and isinstance(kind := getattr(getattr(error, "param", None), "type", None), click.Choice):
        given, known = quoted[2], [str(choice) for choice in kind.choices]
        theirs = _MEANT if "dead" in known else {}
    else:
        return None
    # Without the dashes, which all options share.
    names = {name.removeprefix("--"): ours for name, ours in (theirs | {name: name for name in known}).items()}
    close = get_close_matches(given.removeprefix("--"), names, 1)
    return f"Did you mean {names[close[0]]}?" if close else None


def _of_tallybook(error: TallybookError) -> Problem:
    text, hint = str(error), error.hint
    if hint and (at := text.rfind(hint.strip().removesuffix("."))) > 0:
        text = text[:at].rstrip(". ")
    usage = isinstance(error, ConfigError | PayloadError | SchemaError | SignatureError)
    if isinstance(error, ConfigError) and isinstance(error.value, timedelta):
        text = f"{error.option}: {format_duration(error.value)!r}: {error.reason}"
    elif isinstance(error, QueueUnavailable):
        usage = error.__cause__ is not None and is_final(error.__cause__)
        hint = hint or (f"Check {_WHERE}" if usage else _IS_IT_UP)
        text = f"cannot reach PostgreSQL at {error.server}: {short(error.reason or '')}"
    return Problem(text, hint=hint, exit_code=2 if usage else 1)


def short(reason: str) -> str:
    """Return libpq's message about a failed connection, without the address, which we print ourselves."""
    lines = reason.strip().splitlines() or ["no reason given"]
    for line in lines:
        if match := re.search(r"failed: (?:FATAL:\s+)?(?!connection to server|FATAL)(.+)$", line):
            return match[1]
    return lines[0].removeprefix("connection failed: ")


_WHERE = "--dsn, TALLYBOOK_DSN and the PG* variables (in Django: DATABASES)"
_IS_IT_UP = f"Is the server running there? See {_WHERE}"


def _of_postgres(error: Error) -> Problem:
    primary = error.diag.message_primary
    if primary is None:  # the connection's, not the server's
        return Problem(f"PostgreSQL: {short(str(error) or type(error).__name__)}")
    text = f"PostgreSQL: {primary}"
    if error.diag.message_detail:
        text += f" ({error.diag.message_detail.rstrip('.')})"
    hint = error.diag.message_hint
    if error.sqlstate == "42501" and not hint:
        hint = "The database user lacks a privilege; connect as a user who has it"
    return Problem(text, hint=hint)
