"""tallybook subject list, show, push, upsert, forget, errors."""

import csv
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import click

from tallybook._app.subjects import LISTED, STATES
from tallybook._cli.common import command, limit_option, listing, state_option, text
from tallybook._cli.database import APP, Db
from tallybook._cli.enqueue import args_text, checked_options, job_options, note_unserved
from tallybook._cli.errors import Problem
from tallybook._cli.job import value_of, when
from tallybook._cli.output import Columns, clean, json_safe, local, print_json, print_pairs, print_rows, row_json, short
from tallybook._db import subjects
from tallybook._db.subjects import NAMED
from tallybook._db.texts import loads
from tallybook._model.options import Options
from tallybook._model.payload import encode
from tallybook._model.subject import SubjectCall, SubjectReport, check_subject
from tallybook.errors import TallybookError

_BATCH = 1000

_LIST = f"""\
select l.subject, l.cursor,
       (select to_json(s)::text from tallybook.subject s
         where s.task = l.task_name and s.subject = l.subject and s.job_id = l.job_id)
  from {LISTED.called(max_looked="1000000")} with ordinality as l order by l.ordinality"""  # noqa: S608

_SHOW = f"select to_json(s)::text from {NAMED}"  # noqa: S608

_ERRORS = """\
select to_json(e)::text from tallybook.error e
 where e.subject is not null
   and (%(task)s::text is null or e.task = %(task)s) and (%(subject)s::text is null or e.subject = %(subject)s)
   and (%(since)s::timestamptz is null or e.ended_at >= %(since)s) and (%(queue)s::text is null or e.queue = %(queue)s)
 order by e.ended_at desc limit %(limit)s"""

subject = click.Group(
    "subject", help="List, show, push, upsert and forget subjects.\n\nA subject is a recurring job with a name."
)

_COLUMNS: Columns = {
    "task": "task", "subject": "subject", "state": "state", "iterations": "iterations", "failures": "failures",
    "next": "next_run_at", "last": "last_at", "error": lambda row: short(row["last_error"] or "", 60),
}  # fmt: skip


@command("list", of=subject, json=True)
@click.option("--task", type=text, help="Only this task.")
@click.option("--queue", type=text, help="Only this queue.")
@state_option(*STATES)
@click.option("--prefix", help="Only names that start with this.")
@click.option("--after", metavar="CURSOR", help="Continue a list: the value that its last page printed at the end.")
@limit_option()
def list_(db: Db, as_json: bool, after: str | None, limit: int, **given: Any) -> None:
    """List subjects by task and name.

    With only the states completed, killed and dead, subjects are listed by the time of their end, newest first.

    tallybook subject list --state killed
    """
    verb = partial(APP.subjects.list, **{**given, "states": given["states"] or None})
    found, last = db.paged(_LIST, verb, "max_subjects", after, limit)
    rows = [row[-1] for row in found]
    print_rows(_COLUMNS, rows, empty="no such subjects", as_json=as_json)
    if last is None:
        return
    cursor = shlex.quote(last[1])
    if len(rows) == limit:
        click.echo(f"the first {len(rows)}; --limit shows more, --after {cursor} the next", err=True)
    else:
        click.echo(f"not all were searched; --after {cursor} continues", err=True)


_FAILED: Columns = {
    "ended": "ended_at", "task": "task", "subject": "subject", "attempt": "attempt", "message": "message",
    "details": lambda row: "" if row["details"] is None else json.dumps(row["details"], ensure_ascii=False),
    "ref": "ref_id",
}  # fmt: skip

_queue_option = click.option("--queue", type=text, help="The queue whose names to use, if queues have own names.")


@command(of=subject, json=True)
@_queue_option
def show(db: Db, task: str, name: str, queue: str | None, as_json: bool) -> None:
    """Show all details of one subject, and its errors."""
    which = {"task": task, "subject": name, "queue": queue}
    row = db.texts(_SHOW, which)
    if not row:
        raise Problem(f"task {task!r} has no subject {name!r}", hint="`tallybook subject list` shows the existing ones")
    found = loads(row[0])
    errors = db.texts(_ERRORS, {**which, "queue": found["scope"] or None, "since": None, "limit": 10})
    if as_json:
        print_json(f'{row[0].rstrip().removesuffix("}")},"errors":[{",".join(errors)}]}}')
        return
    print_pairs({title: value_of(title, value) for title, value in found.items()})
    if errors:
        click.echo()
        print_rows(_FAILED, errors, empty="no errors")


@command(of=subject, json=True)
@job_options
def push(db: Db, queue: str, task: str, name: str, args: str, as_json: bool, **given: Any) -> None:
    """Create the subject NAME of TASK, unless it exists.

    ARGS_JSON is one object: TASK's args by parameter name; "-" reads it from stdin.

    tallybook subject push prices refresh asset:42 '{"asset_id": 42}'
    """
    options = checked_options(queue, task, given)
    call = SubjectCall(task, check_subject(name), args_text(args, task), options)
    _told(db.run(subjects.push(call)), as_json)
    note_unserved(db, queue, task)


@command(of=subject, json=True)
@click.option("--file", "path", metavar="FILE", help='CSV (by its name, .csv) or JSON lines; "-" is stdin.')
@job_options
def upsert(
    db: Db, queue: str, task: str, name: str | None, args: str, path: str | None, as_json: bool, **given: Any
) -> None:
    """Create or change the subject NAME of TASK, unless it is running, dead or killed.

    --file reads many subjects. The CSV columns or JSON members are subject and, optionally, args (a JSON object),
    run_at and priority. Each 1,000 subjects are one transaction. You can safely run the command again.

    tallybook subject upsert prices refresh --file assets.csv
    """
    if (name is None) == (path is None):
        raise click.UsageError("pass either a name or --file")
    options = checked_options(queue, task, given)
    if path is not None:
        _upsert_file(db, path, task, options, as_json)
    else:
        call = SubjectCall(task, check_subject(name), args_text(args, task), options)
        _told(db.run(subjects.upsert(call)), as_json)
    note_unserved(db, queue, task)


_SAID = {
    "created": "is new",
    "updated": "is changed",
    "unchanged": "is unchanged",
    "active": "runs: not changed",
    "completed": "is completed: not changed",
    "killed": "is killed: not changed",
    "dead": "is dead: not changed",
}


def _told(report: SubjectReport, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    at = f", runs at {local(report.new_run_at)}" if report.new_run_at is not None else ""
    click.echo(f"subject {clean(report.subject)!r}, job {report.job_id}, {_SAID.get(report.report, report.report)}{at}")


def _upsert_file(db: Db, path: str, task: str, options: Options, as_json: bool) -> None:
    counts: Counter[str] = Counter()
    with (
        _opened(path) as (stream, size),
        click.progressbar(
            length=size, label="upsert", file=sys.stderr, hidden=not (size and sys.stderr.isatty())
        ) as bar,
    ):
        found = _csv(path, stream) if Path(path).suffix.lower() == ".csv" else _json_lines(path, stream)
        separator, rows = "[", (_at(path, number, _call, fields, task, options) for number, fields in found)
        try:
            while batch := list(islice(rows, _BATCH)):
                for report in db.run(subjects.upsert_many(batch)):
                    counts[report.report] += 1
                    if as_json:
                        click.echo(separator + json_safe(row_json(report)), nl=False)
                        separator = ",\n "
                bar.update(stream.buffer.tell() - bar.pos if size else 0)
            bar.update(size - bar.pos)
        except Problem:
            if counts:
                click.echo(f"the {counts.total()} subjects before it are stored", err=True)
            raise
        finally:
            if as_json:
                click.echo("[]" if separator == "[" else "]")
    if not as_json:
        said = ", ".join(f"{counts[word]} {word}" for word in _SAID if counts[word])
        click.echo(f"{counts.total()} subjects: {said}" if said else "no subjects in it")


@contextmanager
def _opened(path: str) -> Iterator[tuple[TextIO, int]]:
    """Open the file as text; yield it and its size in bytes, 0 for stdin."""
    if path == "-":
        yield sys.stdin, 0
        return
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as stream:
            yield stream, Path(path).stat().st_size
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error.reason}"
        raise Problem(f"--file {path}: {reason}", exit_code=2) from None


_FIELDS = ("subject", "args", "run_at", "priority")
_READ: Mapping[str, Callable[[str], object]] = {"run_at": datetime.fromisoformat, "priority": int}
_FORMS = (
    """Write CSV with the header `subject,args`, or lines like '{"subject": "asset:42", "args": {"asset_id": 42}}'"""
)


def _csv(path: str, lines: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    before = csv.field_size_limit(2_000_000)  # args have up to 1 MB; the limit is the whole process's
    reader = csv.DictReader(lines, strict=True)
    try:
        titles = _at(path, 1, lambda: reader.fieldnames) or ()
        if "subject" not in titles or set(titles) - set(_FIELDS):
            odd = next((title for title in titles if title not in _FIELDS), None)
            what = "there is no column `subject`"
            if odd is not None:
                what = f"unknown column {odd!r}; the known columns are {', '.join(_FIELDS)}"
            hint = "Write args to one column `args`, as a JSON object"
            raise Problem(f"{path}: line 1: {what}", hint=hint, exit_code=2)
        while (row := _at(path, reader.line_num + 1, next, reader, None)) is not None:
            if None in row or None in row.values():
                raise Problem(f"{path}: line {reader.line_num}: it does not have {len(titles)} columns", exit_code=2)
            fields: dict[str, Any] = {name: value for name, value in row.items() if value != ""}
            if "args" in fields:
                fields["args"] = _at(path, reader.line_num, json.loads, fields["args"])
            yield reader.line_num, fields
    finally:
        csv.field_size_limit(before)


def _json_lines(path: str, lines: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = _at(path, number, json.loads, line)
        if not isinstance(fields, dict) or "subject" not in fields or set(fields) - set(_FIELDS):
            what = f"one JSON object with subject, and optionally {', '.join(_FIELDS[1:])}, is expected"
            raise Problem(f"{path}: line {number}: {what}", hint=_FORMS, exit_code=2)
        yield number, fields


def _at(path: str, number: int, read: Callable[..., Any], *given: Any) -> Any:
    """Return the result of `read`. Raises Problem with the number of the line for an error of it."""
    try:
        return read(*given)
    except (ValueError, RecursionError, csv.Error, TallybookError) as error:
        raise Problem(f"{path}: line {number}: {error}", exit_code=2) from None


def _call(fields: Mapping[str, Any], task: str, options: Options) -> SubjectCall:
    args = fields.get("args")
    if not isinstance(args, dict | None):
        raise ValueError("args must be one JSON object")
    given = {name: fields[name] for name in _READ if fields.get(name) is not None}
    given |= {name: _READ[name](value) for name, value in given.items() if isinstance(value, str)}
    if "run_at" in given and options.delay is not None:
        options = replace(options, delay=None)
    subject = check_subject(fields["subject"])
    return SubjectCall(task, subject, encode(args or {}, task=task), options.replaced(given) if given else options)


_FORGET = {
    "forgotten": "is forgotten",
    "active": "runs: not changed; `tallybook job cancel` its job first",
    "unknown": "is unknown",
}


@command(of=subject)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@_queue_option
def forget(db: Db, task: str, names: Sequence[str], queue: str | None) -> None:
    """Forget subjects: the next push of such a name creates a new one.

    A planned or pending subject will not run. A running one is not forgotten: cancel its job first.
    """
    failed = False
    for name in dict.fromkeys(names):
        said = db.run(subjects.forget(task, name, queue))
        failed = failed or said != "forgotten"
        click.echo(f"subject {clean(name)!r} {_FORGET.get(said, said)}", err=said != "forgotten")
    if failed:
        raise SystemExit(1)


@listing(_FAILED, name="errors", of=subject, empty="no errors")
@click.option("--task", type=text, help="Only this task.")
@click.option("--subject", type=text, help="Only this subject.")
@click.option("--queue", type=text, help="Only this queue.")
@click.option("--since", type=when, help="Since then, like '2 hours' (ago) or 2026-01-31T09:00Z.")
@limit_option()
def errors_(db: Db, **given: Any) -> list[str]:
    """List the errors of subjects, newest first."""
    return db.texts(_ERRORS, given)
