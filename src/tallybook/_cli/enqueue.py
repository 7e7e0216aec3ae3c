"""tallybook enqueue: enqueue one job from a shell."""

import json
import sys
from datetime import datetime
from difflib import get_close_matches
from typing import Any

import click

from tallybook._cli.common import command, duration, options
from tallybook._cli.database import Db
from tallybook._cli.errors import Problem
from tallybook._cli.output import clean, print_json
from tallybook._db import calls
from tallybook._db.driver import InsufficientPrivilege
from tallybook._model.job import JobCall
from tallybook._model.options import Options, check_name
from tallybook._model.payload import encode, parse


def instant(value: str) -> datetime:
    """The type of an option: an ISO 8601 time with a zone."""
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a date and time. Write 2026-01-31T09:00:00+01:00") from None
    if at.utcoffset() is None:
        raise ValueError(f"{value!r} has no zone. Write {at.isoformat()}Z for UTC, or {at.isoformat()}+01:00")
    return at


job_options = options(
    click.argument("args", metavar="[ARGS_JSON]", default="{}"),
    click.option("--run-at", type=instant, help="Earliest start, like 2026-01-31T09:00:00+01:00."),
    click.option("--delay", type=duration, help='Start after this time, like "5 min".'),
    click.option("--priority", type=click.IntRange(0, 32767), help="Lower runs first. [2]"),
    click.option(
        "--max-attempts", type=click.IntRange(1, 32767), help="Failures until the job is dead. [task, queue, or 5]"
    ),
)


@command(json=True)
@job_options
@click.option("--unique", metavar="KEY", help="Unique key: at most one live job of the task has it.")
def enqueue(db: Db, queue: str, task: str, args: str, unique: str | None, as_json: bool, **given: Any) -> None:
    """Enqueue one job.

    ARGS_JSON is one object: TASK's args by parameter name; "-" reads it from stdin.

    tallybook enqueue mail send_welcome '{"user_id": 42}' --delay "5 min"
    """
    if task.lstrip().startswith(("{", "[")):
        raise click.UsageError("the args come third: QUEUE TASK ARGS_JSON")
    options = checked_options(queue, task, {**given, "unique": unique})
    job = db.run(calls.enqueue(JobCall(task, args_text(args, task), unique, options)))
    if as_json:
        print_json({"id": job.id, "created": job.created})
    elif job.created:
        click.echo(f"job {job.id} is in queue {clean(queue)!r}")
    else:
        click.echo(f"nothing enqueued: job {job.id} has the unique key {clean(unique)!r}")
    note_unserved(db, queue, task)


def checked_options(queue: str, task: str, given: dict[str, Any]) -> Options:
    """Check the options of a job or a subject, and the name of the task. Raises ConfigError."""
    found = Options().replaced({"queue": queue, **given})
    check_name("task", task, 200)
    return found


def args_text(args: str, task: str) -> str:
    """Return ARGS_JSON as it is stored; "-" reads stdin. Raises Problem for invalid args."""
    text = sys.stdin.read() if args == "-" else args
    try:
        found = parse(text)
    except json.JSONDecodeError as error:
        raise _bad_json(text, error) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _wrong(f"ARGS_JSON: {reason}") from None
    if not isinstance(found, dict):
        raise _wrong(f"ARGS_JSON must be one object, not {_KINDS.get(type(found), 'a number')}")
    return encode(found, task=task)


_KINDS = {list: "an array", str: "a string", bool: "a truth value", type(None): "null"}
_EXAMPLE = """Args go by parameter name: '{"user_id": 42}'"""


def _wrong(message: str, hint: str = _EXAMPLE) -> Problem:
    return Problem(message, hint=hint, exit_code=2)


def _bad_json(text: str, error: json.JSONDecodeError) -> Problem:
    """Describe the error, with the text at its position and an arrow."""
    line = text.splitlines()[error.lineno - 1] if text.strip() else ""
    start = max(0, error.colno - 31)
    around = clean(line[start : error.colno - 1]) + " >>> " + clean(line[error.colno - 1 : error.colno + 20])
    where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
    shown = f": {around.strip()}" if line else ""
    quotes = "JSON has double quotes, so put single ones around it for the shell"
    hint = quotes if "double quotes" in error.msg else _EXAMPLE
    return _wrong(f"ARGS_JSON is not JSON: {error.msg[:1].lower()}{error.msg[1:]} at {where}{shown}", hint)


def note_unserved(db: Db, queue: str, task: str) -> None:
    """Print a note if there are workers, but none of them can run the job."""
    try:
        rows = db.conn.execute("select w.queues, w.tasks from tallybook.workers w where w.ended_at is null").fetchall()
    except InsufficientPrivilege:  # a producer by its role
        return
    if not rows or any(queue in queues and task in tasks for queues, tasks in rows):
        return
    tasks = {name for _, names in rows for name in names}
    note = f"no living worker that knows task {clean(task)!r} serves queue {clean(queue)!r}"
    if task not in tasks:
        near = get_close_matches(task, tasks, 1)
        note = f"no living worker knows task {clean(task)!r}" + (f"; did you mean {clean(near[0])!r}?" if near else "")
    click.echo(f"tallybook: note: {note}", err=True)
