"""tallybook subject list, show, push, upsert, forget, errors."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from tallybook._cli.common import DURATION, Conn, connect, dsn_option, json_option, print_json, print_pairs, print_table
from tallybook._cli.enqueue import INSTANT, args_text, unserved
from tallybook._cli.errors import Problem
from tallybook._cli.job_list import WHEN, short
from tallybook._cli.subject_file import rows_of
from tallybook._cli.text import clean, json_safe, local
from tallybook._db import subjects, sync
from tallybook._db.stored import loads
from tallybook._db.subjects import LISTED, STATES
from tallybook._model.options import Options, check_name
from tallybook._model.subject import SubjectCall, SubjectReport, check_subject

F = TypeVar("F", bound=Callable[..., Any])
_BATCH = 1000
_LOOKED = 1_000_000
"""Subjects that one command may pass over."""

_LIST = f"""\
select l.subject, l.cursor, (select to_json(s)::text from tallybook.subject s where s.task = l.task_name and s.subject = l.subject)
  from {LISTED.called()} with ordinality as l order by l.ordinality"""  # noqa: S608

_SHOW = "select to_json(s)::text from tallybook.subject s where s.task = %s and s.subject = %s"

_ERRORS = """\
select to_json(e)::text from tallybook.error e
 where (%(task)s::text is null or e.task = %(task)s) and (%(subject)s::text is null or e.subject = %(subject)s)
   and (%(since)s::timestamptz is null or e.ended_at >= %(since)s)
 order by e.ended_at desc limit %(limit)s"""

_limit = click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=50, show_default=True, help="At most so many."
)


@click.group()
def subject() -> None:
    """List, show, push, upsert and forget subjects.

    A subject is a job with a name that lives on.
    """


@subject.command("list")
@dsn_option
@click.option("--task", help="Of this task.")
@click.option("--queue", help="Of this queue.")
@click.option(
    "--state",
    "states",
    type=click.Choice(STATES),
    metavar="STATE",
    multiple=True,
    help=f"In this state; can be repeated: {', '.join(STATES)}.",
)
@click.option("--prefix", help="Whose name starts with this.")
@click.option("--after", metavar="CURSOR", help="Go on behind another list: what it has printed as its end.")
@_limit
@json_option
def list_(dsn: str | None, as_json: bool, after: str | None, limit: int, **given: Any) -> None:
    """List subjects by task and name; completed, killed and dead ones alone: the last one to stop first.

    Which have stopped, and why: tallybook subject list --state killed --state dead
    """
    with connect(dsn) as conn:
        rows, more = _read(conn, {**given, "states": given["states"] or None}, after, limit)
    if as_json:
        print_json(rows)
        return
    titles = ("task", "subject", "state", "iterations", "failures", "next", "last", "error")
    print_table(titles, [_line(loads(row)) for row in rows], empty="no such subjects")
    if len(rows) == limit:
        click.echo(f"the first {len(rows)}; --limit shows more", err=True)
    elif more is not None:
        click.echo(f"not all were looked at; --after {shlex.quote(more)} goes on", err=True)


def _read(conn: Conn, which: dict[str, Any], after: str | None, limit: int) -> tuple[list[str], str | None]:
    """The subjects as JSON, and where the list goes on, if it may."""
    rows: list[str] = []
    while len(rows) < limit:
        most = min(limit - len(rows), subjects.MOST)
        params = subjects.list_params(**which, after=after, max_subjects=most, max_looked=_LOOKED)
        found = conn.execute(_LIST.encode(), params).fetchall()
        after = found.pop()[1] if found and found[-1][0] is None else None
        rows += [row[-1] for row in found]
        if after is None or len(found) < most:
            break
    return rows, after


def _line(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["task"], row["subject"], row["state"], row["iterations"], row["failures"],
        local(row["next_run_at"]), local(row["last_at"]), short(row["last_error"] or "", 60),
    )  # fmt: skip


@subject.command()
@click.argument("task")
@click.argument("name")
@dsn_option
@json_option
def show(task: str, name: str, dsn: str | None, as_json: bool) -> None:
    """Show all about one subject, and its errors."""
    with connect(dsn) as conn:
        row = conn.execute(_SHOW, (task, name)).fetchone()
        found = {"task": task, "subject": name, "since": None, "limit": 10}
        errors = [error[0] for error in conn.execute(_ERRORS, found).fetchall()]
    if row is None:
        raise _none(task, name)
    if as_json:
        print_json(f'{row[0].rstrip().removesuffix("}")},"errors":[{",".join(errors)}]}}')
        return
    print_pairs([(title, _value(title, value)) for title, value in loads(row[0]).items()])
    if errors:
        click.echo()
        _print_errors(errors)


def _value(title: str, value: object) -> object:
    if value is None:
        return "-"
    if title.endswith("_at"):
        return local(str(value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


def _none(task: str, name: str) -> Problem:
    hint = "`tallybook subject list` shows those that there are"
    return Problem(f"task {task!r} has no subject {name!r}", hint=hint)


def _options(command: F) -> F:
    for option in reversed(
        (
            click.option(
                "--run-at", type=INSTANT, metavar="INSTANT", help="Not before, like 2026-01-31T09:00:00+01:00."
            ),
            click.option(
                "--delay", type=DURATION, metavar="DURATION", help='Not before so long from now, like "5 min".'
            ),
            click.option("--priority", type=click.IntRange(0, 32767), help="Lower runs first. [2]"),
            click.option(
                "--max-attempts",
                type=click.IntRange(1, 32767),
                help="Failures in a row until it is dead. [the task's, or 5]",
            ),
        )
    ):
        command = option(command)
    return command


@subject.command()
@click.argument("queue")
@click.argument("task")
@click.argument("name")
@click.argument("args", metavar="[ARGS_JSON]", default="{}")
@_options
@dsn_option
@json_option
def push(queue: str, task: str, name: str, args: str, dsn: str | None, as_json: bool, **given: Any) -> None:
    """Make the subject NAME of TASK, unless there is one.

    ARGS_JSON is one object: TASK's args by parameter name; "-" reads it from stdin.

    tallybook subject push prices refresh asset:42 '{"asset_id": 42}'
    """
    call = _call(queue, task, name, args, given)
    with connect(dsn) as conn:
        _told(sync.run(conn, subjects.push(call)), as_json)
        _note(conn, queue, task)


@subject.command()
@click.argument("queue")
@click.argument("task")
@click.argument("name", required=False)
@click.argument("args", metavar="[ARGS_JSON]", default="{}")
@click.option("--file", "path", metavar="FILE", help='CSV (by its name, .csv) or JSON lines; "-" is stdin.')
@_options
@dsn_option
@json_option
def upsert(
    queue: str, task: str, name: str | None, args: str, path: str | None, dsn: str | None, as_json: bool, **given: Any
) -> None:
    """Make the subject NAME of TASK, or change the one that is there; one that runs is not touched.

    With --file many: of CSV the columns, of JSON lines the members are subject, and as you like args (a JSON
    object), run_at, priority. They go in batches of 1,000, each a transaction; to say it again does no harm.

    tallybook subject upsert prices refresh --file assets.csv
    """
    if (name is None) == (path is None):
        raise click.UsageError("give either a name or --file")
    if path is not None:
        options = _checked(queue, task, given)
        _upsert_file(path, task, options, dsn, as_json)
        return
    call = _call(queue, task, str(name), args, given)
    with connect(dsn) as conn:
        _told(sync.run(conn, subjects.upsert(call)), as_json)
        _note(conn, queue, task)


def _checked(queue: str, task: str, given: dict[str, Any]) -> Options:
    check_name("task", task, 200)
    return Options().replaced({"queue": queue, **given})


def _call(queue: str, task: str, name: str, args: str, given: dict[str, Any]) -> SubjectCall:
    options = _checked(queue, task, given)
    return SubjectCall(task, check_subject(name), args_text(args, task), options)


_SAID = {
    "created": "is new",
    "updated": "was there, and is changed",
    "unchanged": "was there, and is as it was",
    "active": "runs: it was not touched",
    "completed": "is completed: it was not touched",
    "killed": "is killed: it was not touched",
    "dead": "is dead: it was not touched",
}


def _told(report: SubjectReport, as_json: bool) -> None:
    if as_json:
        print_json(_json(report))
        return
    at = f", runs at {local(report.new_run_at.isoformat())}" if report.new_run_at is not None else ""
    click.echo(f"subject {clean(report.subject)!r}, job {report.job_id}, {_SAID.get(report.report, report.report)}{at}")


def _json(report: SubjectReport) -> str:
    old, new = (at and at.isoformat() for at in (report.old_run_at, report.new_run_at))
    return json.dumps(
        {
            "subject": report.subject, "job_id": report.job_id, "report": report.report,
            "old_run_at": old, "new_run_at": new,
        }
    )  # fmt: skip


def _note(conn: Conn, queue: str, task: str) -> None:
    if unknown := unserved(conn, queue, task):
        click.echo(f"tallybook: note: {unknown}", err=True)


def _upsert_file(path: str, task: str, options: Options, dsn: str | None, as_json: bool) -> None:
    counts: Counter[str] = Counter()
    with connect(dsn) as conn, _opened(path) as (stream, size), _bar(size) as advance:
        separator, read, batch = "[", 0, list[SubjectCall]()

        def flush() -> None:
            nonlocal separator
            for report in sync.run(conn, subjects.upsert_many(batch)) if batch else ():
                counts[report.report] += 1
                if as_json:
                    click.echo(separator + json_safe(_json(report)), nl=False)
                    separator = ",\n "
            batch.clear()

        try:
            for row in rows_of(path, stream, task, options):
                batch.append(row.call)
                if len(batch) == _BATCH:
                    flush()
                    advance(row.read - read)
                    read = row.read
            flush()
            advance(max(0, size - read))
        except Problem:
            if done := counts.total():
                click.echo(f"the {done} subjects before it are in", err=True)
            raise
        finally:
            if as_json:
                click.echo("[]" if separator == "[" else "]")
        _note(conn, options.queue, task)
    if not as_json:
        said = ", ".join(f"{counts[word]} {word}" for word in _SAID if counts[word])
        click.echo(f"{counts.total()} subjects: {said}" if said else "no subjects in it")


@contextmanager
def _opened(path: str) -> Iterator[tuple[TextIO, int]]:
    """The file as text, and its size in bytes; 0 of stdin."""
    if path == "-":
        yield sys.stdin, 0
        return
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as stream:
            yield stream, Path(path).stat().st_size
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no UTF-8: {error.reason}"
        raise Problem(f"--file {path}: {reason}", exit_code=2) from None


@contextmanager
def _bar(size: int) -> Iterator[Callable[[int], object]]:
    """A progress bar on stderr, where a person looks."""
    if not size or not sys.stderr.isatty():
        yield lambda read: None
        return
    with click.progressbar(length=size, label="upsert", file=sys.stderr) as bar:
        yield bar.update


@subject.command()
@click.argument("task")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@dsn_option
def forget(task: str, names: Sequence[str], dsn: str | None) -> None:
    """Let names be free: the next push of one makes a new subject. Each for itself.

    What waits for its time will not run. One that runs is left alone: cancel its job first.
    """
    failed = False
    with connect(dsn) as conn:
        for name in dict.fromkeys(names):
            said = sync.run(conn, subjects.forget(task, name))
            failed = failed or said != "forgotten"
            click.echo(f"subject {clean(name)!r} {_FORGET.get(said, said)}", err=said != "forgotten")
    if failed:
        sys.exit(1)


_FORGET = {
    "forgotten": "is forgotten",
    "active": "runs: it is left alone; `tallybook job cancel` its job first",
    "unknown": "is unknown",
}


@subject.command("errors")
@dsn_option
@click.option("--task", help="Of this task.")
@click.option("--subject", "name", help="Of this subject.")
@click.option("--since", type=WHEN, metavar="WHEN", help="Since then: '2 hours' ago, or 2026-01-31T09:00Z.")
@_limit
@json_option
def errors_(
    dsn: str | None, task: str | None, name: str | None, since: datetime | None, limit: int, as_json: bool
) -> None:
    """List what went wrong, newest first."""
    with connect(dsn) as conn:
        given = {"task": task, "subject": name, "since": since, "limit": limit}
        rows = [row[0] for row in conn.execute(_ERRORS, given).fetchall()]
    if as_json:
        print_json(rows)
        return
    _print_errors(rows)


def _print_errors(rows: Sequence[str]) -> None:
    found = [loads(row) for row in rows]
    lines = [
        (
            local(row["ended_at"]), row["task"], row["subject"], row["attempt"], row["message"],
            "" if row["details"] is None else json.dumps(row["details"], ensure_ascii=False), row["ref_id"],
        )
        for row in found
    ]  # fmt: skip
    print_table(("ended", "task", "subject", "attempt", "message", "details", "ref"), lines, empty="no errors")
