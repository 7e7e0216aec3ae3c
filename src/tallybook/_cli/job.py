"""tallybook job list, why, trace, show, cancel, retry."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from shlex import quote
from typing import Any

import click

from tallybook._app.jobs import CANCELLABLE, JOBS, STATES
from tallybook._cli.common import F, agreed, command, duration, json_object, limit_option, listing, state_option, text
from tallybook._cli.database import APP, Db, Found, each, gathered, newest
from tallybook._cli.enqueue import instant
from tallybook._cli.errors import problem, say
from tallybook._cli.output import Columns, clean, local, print_json, print_pairs, print_rows, short
from tallybook._db import calls
from tallybook._db.declared import Call
from tallybook._db.driver import Rollback
from tallybook._db.node_source import unknown
from tallybook._db.texts import loads
from tallybook._model.job_info import Cancelled, JobInfo, TraceEvent
from tallybook._model.merged import Part, Row, goes_on, merged, places
from tallybook.errors import InvalidArgument, TallybookError

MANY = 2**31 - 1

job = click.Group("job", help="List, show, explain, trace, cancel and retry jobs.")


def _read_links(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str] | None:
    for one in value:
        if "=" not in one:
            raise click.BadParameter(f"{one!r} is not KIND=KEY, like submission=42", ctx, param)
    return {kind: key for kind, _, key in (one.partition("=") for one in value)} or None


def link_option(says: str) -> Callable[[F], F]:
    return click.option("--link", "links", metavar="KIND=KEY", multiple=True, callback=_read_links, help=says)


def said_of(error: object) -> str:
    if not isinstance(error, dict):
        return str(error)
    return ": ".join(str(error[key]) for key in ("type", "message") if error.get(key))


_LOOKED = 1_000_000  # the most rows that one command reads: about a second
# All columns of the view, except those that need a search in the history of each job: `job show` has them.
_READ = ", ".join(f"j.{one.name}" for one in fields(JobInfo) if one.name not in ("updated_at", "last_attempt_at"))
_LIST = f"""\
select r.id, r.cursor, r.enqueued_at, r.looked_to,
       (select to_json(s)::text from (select {_READ} from tallybook.job j where j.id = r.id) s)
  from {JOBS.called()} with ordinality as r order by r.ordinality"""  # noqa: S608


def when(value: str) -> datetime:
    """The type of an option: a time, or a duration before now."""
    try:
        return instant(value)
    except ValueError as error:
        try:
            return datetime.now(UTC) - duration(value)
        except (ValueError, OverflowError):
            raise ValueError(f"{error}, or '2 hours' for two hours ago") from None


@command("list", of=job, json=True, nodes=True, reads=True)
@click.option("--queue", type=text, help="Only this queue.")
@click.option("--task", type=text, help="Only this task.")
@state_option(*STATES)
@click.option("--unserved", is_flag=True, help="Only jobs whose task or args version no live worker knows.")
@link_option("With this link; repeatable.")
@click.option("--error", metavar="TEXT", type=text, help="Only if the last error contains this text, ignoring case.")
@click.option("--since", type=when, help="Enqueued since then, like '2 hours' (ago) or 2026-01-31T09:00Z.")
@click.option("--before", type=when, help="Enqueued before then.")
@click.option("--after", metavar="CURSOR", help="Continue a list: the value that its last page printed at the end.")
@limit_option()
def list_(db: Db, as_json: bool, after: str | None, limit: int, **given: Any) -> None:
    """List jobs, newest first."""
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value}
    names = list[str]()
    if db.nodes:
        at = places(after)

        def read_on(one: Db) -> Part[Row[str]]:
            name = one.node or ""
            return _read(one, chosen, at.get(name), limit) if goes_on(at, name) else ([], None, None)

        pairs, more, looked_to = merged(dict(gathered(db, read_on)), at, limit)
        names, rows = [name for name, _ in pairs], [row.shown for _, row in pairs]
    else:
        found, more, looked_to = _read(db, chosen, after, limit)
        rows = [row.shown for row in found]
    empty = ("no such jobs" if chosen or after else "no jobs") + ("" if more is None else " so far")
    print_rows(_LISTED, rows, empty=empty, nodes=names, as_json=as_json)
    if more is not None and len(rows) == limit:
        click.echo(f"the newest {len(rows)}; --limit shows more, --after {more} the next", err=True)
    elif more is not None:
        click.echo(f"searched back to {local(looked_to)}; --after {more} continues", err=True)


def _read(db: Db, which: dict[str, Any], after: str | None, limit: int) -> Part[Row[str]]:
    """Return the jobs, the cursor of the next page if there may be one, and the time back to which it has searched."""
    verb = partial(APP.jobs.list, **which, max_looked=_LOOKED)
    found, last = db.paged(_LIST, verb, "max_jobs", after, limit)
    rows = [Row(job, at, cursor, text) for job, cursor, at, _, text in found]
    return rows, *((last[1], last[3]) if last else (None, None))


def _note(row: dict[str, Any]) -> str:
    if row.get("unserved"):
        version = (row.get("options") or {}).get("version")
        return f"unserved: no living worker knows {'its task' if version is None else f'version {version} of its args'}"
    notes = {
        "scheduled": f"at {local(row['run_at'])}",
        "retrying": f"at {local(row['run_at'])}; last error: {row['last_error']}",
        "running": f"on {row['worker']} since {local(row['started_at'])}",
        "dead": f"{row['reason']}: {row['last_error']}",
        "cancelled": row["reason"] or "",
        "waiting": row["reason"] or "",
    }
    note = notes.get(row["state"], "")
    if row["state"] == "running" and (row.get("progress") is not None or row.get("progress_message")):
        done = "" if row["progress"] is None else f"{row['progress']:.0%} "
        note = f"{done}{row['progress_message'] or ''}, {note}"
    return f"{row['summary']} - {note}".removesuffix(" - ") if row.get("summary") else note


_LISTED: Columns = {
    "id": "id", "state": "state", "queue": "queue", "task": "task", "prio": "priority", "attempts": "attempts",
    "enqueued": "enqueued_at", "note": lambda row: short(_note(row)),
}  # fmt: skip

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
    "cancel_pending": "undo that: tallybook job retry {job}",
    "not_rebased": "start a worker",
    "service_pending": "nothing, if a worker runs; see tallybook service list",
}


@command(of=job, json=True, nodes=True, reads=True)
@click.argument("job_id", metavar="ID", type=int)
def why(db: Db, job_id: int, as_json: bool) -> None:
    """Explain why a job does not run. Exit code 1 if there is no such job."""
    found = db.of(job_id).run(APP.jobs.why(job_id))
    if as_json:
        print_json(found)
    else:
        click.echo(f"job {job_id}: {found[0].state or found[0].reason}")
        for one in found:
            click.echo(f"- {clean(one.explanation)} [{one.reason}]")
            if todo := _DO.get(one.reason):
                known = {name: quote(clean(value)) for name, value in one.details.items()}
                click.echo(f"  {todo.format(**{'job': job_id, 'queue': '', 'key': '', **known})}")
    if found[0].state is None:
        raise SystemExit(1)


def _happened(one: TraceEvent) -> str:
    if one.error:
        text = said_of(one.error)
    elif one.event == "scheduled" and one.details:
        text = f"for {local(str(one.details['run_at']))}"
    else:
        said = {name: value for name, value in (one.details or {}).items() if value is not None}
        text = str(said["reason"]) if list(said) == ["reason"] else json.dumps(said, ensure_ascii=False) if said else ""
    return short(text)


_EVENTS: Columns = {
    "at": "at", "job": "job", "queue": "queue", "task": "task", "attempt": "attempt", "event": "event",
    "worker": "worker", "note": _happened,
}  # fmt: skip


def _in_order(found: Found, given: Mapping[str, Any]) -> Found:
    """Merge in order of time, as one node lists them."""
    merged = newest("at", "job")(found[::-1], given)
    return merged if given["newest_first"] else merged[::-1]


@listing(_EVENTS, name="trace", of=job, empty="no events", newest=True, merge=_in_order)
@click.argument("job", metavar="[ID]", type=click.IntRange(1, (1 << 63) - 1), required=False)
@click.option("--subject", type=text, help="Of the jobs of this subject.")
@click.option("--unique", metavar="KEY", type=text, help="Of the jobs that have had this unique key.")
@link_option("Of the jobs with this link, like submission=42; of several, with all of them.")
@click.option("--task", type=text, help="Only this task.")
@limit_option(10_000, 1000, "Show at most this many, the newest.")
@click.option("--newest-first", is_flag=True, help="Newest first.")
def trace(db: Db, limit: int, **which: Any) -> list[TraceEvent]:
    """List the events of a job, subject, unique key or link, in order of time."""
    try:
        verb = APP.jobs.trace(**which, max_events=limit)
    except InvalidArgument:
        raise click.UsageError("pass one of ID, --subject, --unique, --link") from None
    return db.run(verb)


# The effective value of a job: its own, else that of its task, then of its queue.
_SHOW = """\
select to_json(jsonb_populate_record(j, jsonb_build_object('max_attempts', coalesce(j.max_attempts,
         (select (t.definition ->> 'max_attempts')::int from tallybook.tasks t where j.task = any (t.aliases || t.name)
           order by t.name <> j.task limit 1),
         (select q.max_attempts from tallybook.queues q where q.name = j.queue), 5))))::text,
       (select coalesce(json_agg(to_jsonb(a) - 'job_id' order by a.attempt), '[]')::text
          from tallybook.attempt a where a.job_id = j.id)
  from tallybook.job j where j.id = %s"""

_ATTEMPTS: Columns = {
    "attempt": "attempt", "state": "state", "started": "started_at", "ended": "ended_at", "worker": "worker",
    "error": lambda one: short(said_of(one["error"] or {})),
}  # fmt: skip


@command(of=job, json=True, nodes=True, reads=True)
@click.argument("job_id", metavar="ID", type=int)
def show(db: Db, job_id: int, as_json: bool) -> None:
    """Show one job: its columns, errors and attempts."""
    row = db.of(job_id).conn.execute(_SHOW, (job_id,)).fetchone()
    if row is None:
        raise unknown(db.conninfo, job_id)
    if as_json:
        print_json(f'{row[0].rstrip().removesuffix("}")},"history":{row[1]}}}')
        return
    found, history = loads(row[0]), loads(row[1])
    errors = found.pop("errors") or []
    first = {"id": found["id"], "state": found["state"]}
    if errors and found["state"] in ("dead", "retrying"):
        first["error"] = said_of(errors[-1])
    print_pairs({name: value_of(name, value) for name, value in {**first, **found}.items()})
    if history:
        click.echo()
        print_rows(_ATTEMPTS, history, empty="")
    for error in errors:
        _print_error(error)


def value_of(name: str, value: object) -> object:
    """Format a column of a JSON row for people."""
    if value is None:
        return "-"
    if name.endswith("_at"):
        return local(str(value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


def _print_error(error: object) -> None:
    """Print one entry of the error history; each line of its traceback is cleaned."""
    if not isinstance(error, dict):
        click.echo(f"\nerror: {clean(error)}")
        return
    at = local(str(error.get("at") or error.get("timestamp") or ""))
    attempt, kind, message = (clean(error.get(name)) for name in ("attempt", "type", "message"))
    click.echo(f"\nattempt {attempt} {at} {kind}: {message}")
    for line in str(error.get("traceback") or error.get("trace") or "").splitlines():
        click.echo("  " + line[: len(line) - len(line.lstrip(" "))] + clean(line.strip()))


@command(of=job, json=True, nodes=True)
@click.argument("job_ids", metavar="[ID...]", type=int, nargs=-1)
@click.option("--reason", help="Reason, shown with the job.")
@click.option("--queue", type=text, help="Instead of ids: open jobs of this queue.")
@click.option("--task", type=text, help="Only this task.")
@click.option("--key", "unique", type=text, help="Only jobs with this unique key.")
@click.option("--order-key", type=text, help="Only jobs with this order key.")
@click.option("--args", metavar="JSON", type=text, help="Only if the args contain this JSON object.")
@state_option(*CANCELLABLE)
def cancel(db: Db, job_ids: Sequence[int], reason: str | None, yes: bool, as_json: bool, **which: Any) -> None:
    """Cancel jobs; running ones are asked to stop.

    Pass ids, or filters for all open jobs that match every one of them. Dead jobs need --state dead.
    """
    filtered = any(which.values())
    if filtered == bool(job_ids):
        raise click.UsageError("pass either ids or filters (--queue, --task, --key, --order-key, --args)")
    if filtered:
        each(db, lambda one: _cancel_many(one, reason, yes, as_json, dict(which)), as_json=as_json)
    else:
        _each(db, job_ids, lambda one: calls.cancel(one, reason), as_json, "state", lambda it: _CANCELLED.get(it, it))


def _cancel_many(db: Db, reason: str | None, yes: bool, as_json: bool, which: dict[str, Any]) -> None:
    which["args"] = None if which["args"] is None else json_object("--args", which["args"])
    which["states"] = which["states"] or None
    if "dead" in (which["states"] or ()) and not yes:
        # Other sessions would wait for the rows of dead letters meanwhile: count them first, and release them.
        with db.conn.transaction(force_rollback=True):
            found = db.run(APP.jobs.cancel_matching(**which, reason=reason, max_jobs=MANY))
        if not (yes := _may_cancel(db, found)):
            return
    # Only intents are written, which block no other session: they can be counted first, and rolled back.
    with db.conn.transaction() as transaction:
        done = db.run(APP.jobs.cancel_matching(**which, reason=reason, max_jobs=MANY))
        if not (yes := yes or _may_cancel(db, done)):
            raise Rollback(transaction)
    if yes and as_json:
        print_json({"cancelled": done.cancelled, "cancelling": done.cancelling})
    elif yes:
        click.echo(f"{done.cancelled} jobs will not start, {done.cancelling} run and are asked to stop")


def _may_cancel(db: Db, found: Cancelled) -> bool:
    """Return True if there is nothing to confirm, or the user confirms."""
    total = found.cancelled + found.cancelling
    if not total or agreed(db.named(f"cancel {total} jobs, {found.cancelling} of them running?"), yes=False):
        return True
    click.echo("nothing done", err=True)
    return False


_CANCELLED = {
    "cancelled": "cancelled",
    "cancelling": "is running and is asked to stop",
    "completed": "not changed: it is completed already",
    "dead": "not changed: it is dead, and its dead letter was dropped",
}


@command(of=job, json=True, nodes=True)
@click.argument("job_ids", metavar="ID...", type=int, nargs=-1, required=True)
def retry(db: Db, job_ids: Sequence[int], as_json: bool) -> None:
    """Retry dead or cancelled jobs now, each in its own transaction."""
    _each(db, job_ids, calls.retry, as_json, "attempt", "retried, attempt {}".format)


def _each(
    db: Db, ids: Sequence[int], verb: Callable[[int], Call[Any]], as_json: bool, key: str, told: Callable[[Any], str]
) -> None:
    """Call `verb` for each job; print a failure and continue with the others. Exit code 1 if any failed."""
    _ = db.nodes or db.conn  # a problem of the database is not an error of one job
    done: list[str] = []
    failed = False
    for job_id in dict.fromkeys(ids):
        try:
            result = db.of(job_id).run(verb(job_id))
        except TallybookError as error:
            failed = True
            if as_json:
                done.append(json.dumps({"id": job_id, "error": str(error)}))
            elif found := problem(error):
                say(found.message, found.hint)
        else:
            done.append(json.dumps({"id": job_id, key: result}))
            if not as_json:
                click.echo(f"job {job_id}: {clean(told(result))}")
    if as_json:
        print_json(done)
    if failed:
        raise SystemExit(1)
