"""tallybook job show, cancel, retry; list is in job_list.py, why and trace in why.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from tallybook._cli.common import agreed, command, json_object, state_option
from tallybook._cli.database import Db
from tallybook._cli.errors import problem, say
from tallybook._cli.job_list import list_
from tallybook._cli.output import print_json, print_pairs, print_rows
from tallybook._cli.over_nodes import each
from tallybook._cli.text import Columns, clean, local, short
from tallybook._cli.why import said_of, trace, why
from tallybook._db import calls, filters
from tallybook._db.declared import Call
from tallybook._db.driver import Rollback
from tallybook._db.node_source import unknown
from tallybook._db.stored import loads
from tallybook._model.job_info import Cancelled
from tallybook.errors import TallybookError

MANY = 2**31 - 1

# The effective value of a job: its own, else that of its task, then of its queue.
_SHOW = """\
select to_json(jsonb_populate_record(j, jsonb_build_object('max_attempts', coalesce(j.max_attempts,
         (select (t.definition ->> 'max_attempts')::int from tallybook.tasks t where j.task = any (t.aliases || t.name)
           order by t.name <> j.task limit 1),
         (select q.max_attempts from tallybook.queues q where q.name = j.queue), 5))))::text,
       (select coalesce(json_agg(to_jsonb(a) - 'job_id' order by a.attempt), '[]')::text
          from tallybook.attempt a where a.job_id = j.id)
  from tallybook.job j where j.id = %s"""

job = click.Group("job", help="List, show, explain, trace, cancel and retry jobs.")

job.add_command(list_)
job.add_command(why)
job.add_command(trace)

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
    print_pairs([(name, value_of(name, value)) for name, value in {**first, **found}.items()])
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
@click.option("--queue", help="Instead of ids: open jobs of this queue.")
@click.option("--task", help="Only this task.")
@click.option("--key", "unique", help="Only jobs with this unique key.")
@click.option("--order-key", help="Only jobs with this order key.")
@click.option("--args", metavar="JSON", help="Only if the args contain this JSON object.")
@state_option(*filters.STATES)
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
    args = None if which["args"] is None else json_object("--args", which["args"])
    states = which.pop("states") or None
    call = filters.cancel_many(**{**which, "args": args}, states=states, reason=reason, max_jobs=MANY)
    if "dead" in (states or ()) and not yes:
        # Other sessions would wait for the rows of dead letters meanwhile: count them first, and release them.
        with db.conn.transaction(force_rollback=True):
            found = db.run(call)
        if not (yes := _may_cancel(db, found)):
            return
    # Only intents are written, which block no other session: they can be counted first, and rolled back.
    with db.conn.transaction() as transaction:
        done = db.run(call)
        if not (yes := yes or _may_cancel(db, done)):
            raise Rollback(transaction)
    if not yes:
        return
    if as_json:
        print_json({"cancelled": done.cancelled, "cancelling": done.cancelling})
        return
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
