"""tallybook job why, job trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from tallybook._cli.common import F, command, limit_option, listing
from tallybook._cli.database import Db
from tallybook._cli.output import print_json
from tallybook._cli.over_nodes import Found, newest
from tallybook._cli.text import Columns, clean, local, short
from tallybook._db import jobs as verbs
from tallybook._model.job_info import Reason, TraceEvent
from tallybook.errors import InvalidArgument

_DO = {
    "queue_paused": "resume it: tallybook queue resume {queue}",
    "no_worker": "start one: tallybook worker",
    "unknown_task": "start a worker whose program has this task, or enqueue it under a task name that a worker has",
    "unknown_version": "start a worker of the newer release",
    "breaker": "once the service works again: tallybook breaker close {key}",
    "concurrency_limit": "see who holds a permit: tallybook job show ID; raise the limit: tallybook limit at-once",
    "unknown_limit": "create the limit before the job starts, or cancel the job",
    "dead": "see its errors: tallybook job show {job}; retry it: tallybook job retry {job}",
    "cancelled": "retry it: tallybook job retry {job}",
    "cancel_pending": "retry it: tallybook job retry {job}",
    "not_rebased": "start a worker",
    "service_pending": "nothing, if a worker runs; see tallybook service list",
}


def _read_links(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str] | None:
    """Parse KIND=KEY as links; raise a usage error for anything else."""
    for text in value:
        if "=" not in text:
            raise click.BadParameter(f"{text!r} is not KIND=KEY, like submission=42", ctx, param)
    return {kind: key for kind, _, key in (text.partition("=") for text in value)} or None


def link_option(says: str) -> Callable[[F], F]:
    return click.option("--link", "links", metavar="KIND=KEY", multiple=True, callback=_read_links, help=says)


def said_of(error: object) -> str:
    """Format an error as one line."""
    if not isinstance(error, dict):
        return str(error)
    return ": ".join(str(error[key]) for key in ("type", "message") if error.get(key))


@command(json=True, nodes=True, reads=True)
@click.argument("job_id", metavar="ID", type=int)
def why(db: Db, job_id: int, as_json: bool) -> None:
    """Explain why a job does not run. Exit code 1 if there is no such job."""
    found = db.of(job_id).run(verbs.why(job_id))
    if as_json:
        print_json(found)
    else:
        _print(job_id, found)
    if found[0].state is None:
        raise SystemExit(1)


def _print(job_id: int, found: Sequence[Reason]) -> None:
    click.echo(f"job {job_id}: {found[0].state or 'unknown'}")
    for one in found:
        click.echo(f"- {clean(one.explanation)} [{one.reason}]")
        if todo := _DO.get(one.reason):
            known = {name: clean(value) for name, value in one.details.items()}
            click.echo(f"  {todo.format(**{'job': job_id, 'queue': '', 'key': '', **known})}")


def _note(one: TraceEvent) -> str:
    if one.error:
        text = said_of(one.error)
    elif one.event == "scheduled" and one.details:
        text = f"for {local(str(one.details['run_at']))}"
    else:
        said = {name: value for name, value in (one.details or {}).items() if value is not None}
        text = str(said["reason"]) if list(said) == ["reason"] else json.dumps(said, ensure_ascii=False) if said else ""
    return short(text)


_EVENTS: Columns = {
    "at": "at", "job": "job", "queue": "queue", "task": "task", "attempt": "attempt", "event": "event", "worker": "worker",
    "note": _note,
}  # fmt: skip


def _merged(found: Found, given: Mapping[str, Any]) -> Found:
    """Merge in order of time, as one node lists them."""
    merged = newest("at", "job")(found[::-1], given)
    return merged if given["newest_first"] else merged[::-1]


@listing(_EVENTS, name="trace", empty="no events", newest=True, merge=_merged)
@click.argument("job", metavar="[ID]", type=click.IntRange(1, (1 << 63) - 1), required=False)
@click.option("--subject", help="Of the jobs of this subject.")
@click.option("--unique", metavar="KEY", help="Of the jobs that have had this unique key.")
@link_option("Of the jobs with this link, like submission=42; of several, with all of them.")
@click.option("--task", help="Only this task.")
@limit_option(10_000, 1000, "Show at most this many, the newest.")
@click.option("--newest-first", is_flag=True, help="Newest first.")
def trace(db: Db, limit: int, **which: Any) -> list[TraceEvent]:
    """List the events of a job, subject, unique key or link, in order of time."""
    try:
        call = verbs.trace(**which, max_events=limit)
    except InvalidArgument:
        raise click.UsageError("pass one of ID, --subject, --unique, --link") from None
    return db.run(call)
