"""tallybook job show, cancel, retry; list is in job_list.py, why in why.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from tallybook._cli.common import (
    Conn,
    agreed,
    connect,
    dsn_option,
    json_object,
    json_option,
    print_json,
    print_pairs,
    print_table,
)
from tallybook._cli.errors import problem, say
from tallybook._cli.job_list import list_, short
from tallybook._cli.text import clean, local
from tallybook._cli.why import why
from tallybook._db import calls, filters, sync
from tallybook._db.driver import Rollback
from tallybook._db.stored import loads
from tallybook._model.job import Cancelled
from tallybook.errors import TallybookError, UnknownJob

CANCEL_STATES = ("scheduled", "waiting", "available", "running", "dead")
MANY = 2**31 - 1
_LARGEST = 2**63 - 1

# What counts for a job: what was asked for it, else what its task, then its queue says.
_SHOW = """\
select to_json(jsonb_populate_record(j, jsonb_build_object('max_attempts', coalesce(j.max_attempts,
         (select (t.definition ->> 'max_attempts')::int from tallybook.tasks t where j.task = any (t.aliases || t.name)
           order by t.name <> j.task limit 1),
         (select q.max_attempts from tallybook.queues q where q.name = j.queue), 5))))::text,
       (select coalesce(json_agg(to_jsonb(a) - 'job_id' order by a.attempt), '[]')::text
          from tallybook.attempt a where a.job_id = j.id)
  from tallybook.job j where j.id = %s"""


@click.group()
def job() -> None:
    """List, show, explain, cancel and retry jobs."""


job.add_command(list_)
job.add_command(why)


@job.command()
@click.argument("job_id", metavar="ID", type=int)
@dsn_option
@json_option
def show(job_id: int, dsn: str | None, as_json: bool) -> None:
    """Show all about one job: its columns, its errors, its attempts."""
    with connect(dsn) as conn:
        row = conn.execute(_SHOW, (_within(job_id),)).fetchone()
    if row is None:
        raise UnknownJob(job_id)
    if as_json:
        print_json(f'{row[0].rstrip().removesuffix("}")},"history":{row[1]}}}')
        return
    found, history = loads(row[0]), loads(row[1])
    errors = found.pop("errors") or []
    first = {"id": found["id"], "state": found["state"]}
    if errors and found["state"] in ("dead", "retrying"):
        first["error"] = _said(errors[-1])
    print_pairs([(name, _value(name, value)) for name, value in {**first, **found}.items()])
    if history:
        click.echo()
        titles = ("attempt", "state", "started", "ended", "worker", "error")
        print_table(titles, [_attempt(one) for one in history], empty="")
    for error in errors:
        _print_error(error)


def _within(job_id: int) -> int:
    if not 0 < job_id <= _LARGEST:
        raise UnknownJob(job_id)
    return job_id


def _value(name: str, value: object) -> object:
    if value is None:
        return "-"
    if name.endswith("_at"):
        return local(str(value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


def _said(error: object) -> str:
    """An error in one line."""
    if not isinstance(error, dict):
        return str(error)
    return ": ".join(str(error[key]) for key in ("type", "message") if error.get(key))


def _attempt(one: dict[str, Any]) -> tuple[object, ...]:
    return (
        one["attempt"],
        one["state"],
        local(one["started_at"]),
        local(one["ended_at"]),
        one["worker"],
        short(_said(one["error"] or {})),
    )


def _print_error(error: object) -> None:
    """One entry of the error history; its traceback keeps its lines, and each of them is cleaned."""
    if not isinstance(error, dict):
        click.echo(f"\nerror: {clean(error)}")
        return
    at = local(str(error.get("at") or error.get("timestamp") or ""))
    click.echo(
        f"\nattempt {clean(error.get('attempt'))} {at} {clean(error.get('type'))}: {clean(error.get('message'))}"
    )
    for line in str(error.get("traceback") or error.get("trace") or "").splitlines():
        click.echo("  " + line[: len(line) - len(line.lstrip(" "))] + clean(line.strip()))


@job.command()
@click.argument("job_ids", metavar="[ID...]", type=int, nargs=-1)
@dsn_option
@click.option("--reason", help="Why; shown with the job.")
@click.option("--queue", help="Instead of ids: all open jobs of this queue.")
@click.option("--task", help="Of this task.")
@click.option("--key", "unique", help="With this unique key.")
@click.option("--order-key", help="With this order key.")
@click.option("--args", metavar="JSON", help="Whose args contain this JSON object.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(CANCEL_STATES),
    metavar="STATE",
    help=f"In this state; can be repeated: {', '.join(CANCEL_STATES)}.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def cancel(job_ids: Sequence[int], dsn: str | None, reason: str | None, yes: bool, as_json: bool, **which: Any) -> None:
    """Say that jobs shall not run; what runs is told to stop.

    Either these jobs, each for itself, or all open ones that match every filter given;
    dead ones with --state dead.
    """
    filtered = any(which.values())
    if filtered == bool(job_ids):
        raise click.UsageError("give either ids or filters (--queue, --task, --key, --order-key, --args)")
    if filtered:
        _cancel_many(dsn, reason, yes, as_json, which)
        return

    def one(conn: Conn, job_id: int) -> str:
        return sync.run(conn, calls.cancel(_within(job_id), reason))

    _each(job_ids, dsn, one, as_json, "state", _cancelled)


def _cancel_many(dsn: str | None, reason: str | None, yes: bool, as_json: bool, which: dict[str, Any]) -> None:
    args = None if which["args"] is None else json_object("--args", which["args"])
    states = which.pop("states") or None
    call = filters.cancel_many(**{**which, "args": args}, states=states, reason=reason, max_jobs=MANY)
    with connect(dsn) as conn:
        if "dead" in (states or ()) and not yes:
            # Others would wait for the rows of dead letters meanwhile: they are counted first, and given back.
            with conn.transaction(force_rollback=True):
                found = sync.run(conn, call)
            if not (yes := _may_cancel(found)):
                return
        # Only intents are written, and they hold up nobody: so they can be counted first, and taken back.
        with conn.transaction() as transaction:
            done = sync.run(conn, call)
            if not (yes := yes or _may_cancel(done)):
                raise Rollback(transaction)
    if not yes:
        return
    if as_json:
        print_json(json.dumps({"cancelled": done.cancelled, "cancelling": done.cancelling}))
        return
    click.echo(f"{done.cancelled} jobs will not start, {done.cancelling} run and their workers are told")


def _may_cancel(found: Cancelled) -> bool:
    """Whether there is nothing to ask, or the person agrees."""
    total = found.cancelled + found.cancelling
    if not total or agreed(f"cancel {total} jobs, {found.cancelling} of them running?", yes=False):
        return True
    click.echo("nothing done", err=True)
    return False


_CANCELLED = {
    "cancelled": "cancelled",
    "cancelling": "is running, its worker is told to stop it",
    "completed": "nothing done: it is completed already",
    "dead": "nothing done: it is dead, and its dead letter was dropped",
}


def _cancelled(state: object) -> str:
    return _CANCELLED.get(str(state), str(state))


@job.command()
@click.argument("job_ids", metavar="ID...", type=int, nargs=-1, required=True)
@dsn_option
@json_option
def retry(job_ids: Sequence[int], dsn: str | None, as_json: bool) -> None:
    """Give dead or cancelled jobs another attempt, at once. Each job for itself."""

    def one(conn: Conn, job_id: int) -> int:
        return sync.run(conn, calls.retry(_within(job_id)))

    _each(job_ids, dsn, one, as_json, "attempt", lambda attempt: f"back in line, attempt {attempt}")


def _each(
    job_ids: Sequence[int],
    dsn: str | None,
    verb: Callable[[Conn, int], object],
    as_json: bool,
    key: str,
    told: Callable[[object], str],
) -> None:
    """Do `verb` for each job; one that fails is told and does not keep the others from it. Exit code 1 if any did."""
    done: list[str] = []
    failed = False
    with connect(dsn) as conn:
        for job_id in dict.fromkeys(job_ids):
            try:
                result = verb(conn, job_id)
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
        sys.exit(1)
