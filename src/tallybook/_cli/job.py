"""tallybook job list, show, cancel, retry; why is in why.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
import psycopg

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
from tallybook._cli.text import clean, local
from tallybook._cli.why import read_links, why
from tallybook._db import calls, filters, sync
from tallybook._model.why import checked_links
from tallybook.errors import TallybookError, UnknownJob

__all__ = ["job"]

OPEN_STATES = ("scheduled", "waiting", "available", "running")
MANY = 2**31 - 1
STATES = ("scheduled", "retrying", "waiting", "available", "running", "completed", "cancelled", "dead")
_LARGEST = 2**63 - 1

_LIST = """\
select to_json(j)::text from tallybook.job j
 where (%(queue)s::text is null or j.queue = %(queue)s) and (%(task)s::text is null or j.task = %(task)s)
   and (%(state)s::text is null or j.state = %(state)s) and (not %(unserved)s or j.unserved)
   and (%(links)s::text is null or j.id = any (array(select tallybook._linked(%(links)s::jsonb, 10000))))
 order by j.id desc limit %(limit)s"""

_SHOW = """\
select to_json(j)::text, (select coalesce(json_agg(to_jsonb(a) - 'job_id' order by a.attempt), '[]')::text
                            from tallybook.attempt a where a.job_id = j.id)
  from tallybook.job j where j.id = %s"""


@click.group()
def job() -> None:
    """List, show, explain, cancel and retry jobs."""


job.add_command(why)


@job.command("list")
@dsn_option
@click.option("--queue", help="Of this queue.")
@click.option("--task", help="Of this task.")
@click.option("--state", type=click.Choice(STATES), metavar="STATE", help=f"In this state: {', '.join(STATES)}.")
@click.option("--unserved", is_flag=True, help="Whose task no living worker knows.")
@click.option(
    "--link", "links", metavar="KIND=KEY", multiple=True, callback=read_links, help="With this link; can be repeated."
)
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=50, show_default=True, help="At most so many.")
@json_option
def list_(dsn: str | None, as_json: bool, **filters: Any) -> None:
    """List jobs, newest first."""
    if filters["links"]:
        filters["links"] = json.dumps(checked_links(filters["links"]))
    with connect(dsn) as conn:
        rows = [row[0] for row in conn.execute(_LIST, filters).fetchall()]
    if as_json:
        print_json(rows)
        return
    titles = ("id", "state", "queue", "task", "prio", "attempts", "enqueued", "note")
    any_filter = any(value for name, value in filters.items() if name != "limit")
    print_table(titles, [_line(json.loads(row)) for row in rows], empty="no such jobs" if any_filter else "no jobs")
    if len(rows) == filters["limit"]:
        click.echo(f"the newest {len(rows)}; --limit shows more", err=True)


def _line(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["id"], row["state"], row["queue"], row["task"], row["priority"], row["attempts"],
        local(row["enqueued_at"]), _short(_note(row)),
    )  # fmt: skip


def _note(row: dict[str, Any]) -> str:
    """The one thing that a person wants to know about a job in this state."""
    if row.get("unserved"):
        version = (row.get("options") or {}).get("version")
        return f"unserved: no living worker knows {'its task' if version is None else f'version {version} of its args'}"
    notes = {
        "scheduled": f"at {local(row['run_at'])}",
        "retrying": f"at {local(row['run_at'])}, after {row['last_error']}",
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


def _short(text: str, most: int = 100) -> str:
    text = clean(text)
    return text if len(text) <= most else text[: most - 3] + "..."


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
    found, history = json.loads(row[0]), json.loads(row[1])
    errors = found.pop("errors") or []
    print_pairs([(name, _value(name, value)) for name, value in found.items()])
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


def _attempt(one: dict[str, Any]) -> tuple[object, ...]:
    error = one["error"] or {}
    text = (
        ": ".join(str(error[key]) for key in ("type", "message") if error.get(key))
        if isinstance(error, dict)
        else error
    )
    return (
        one["attempt"],
        one["state"],
        local(one["started_at"]),
        local(one["ended_at"]),
        one["worker"],
        _short(str(text)),
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
    type=click.Choice(OPEN_STATES),
    metavar="STATE",
    help=f"In this state; can be repeated: {', '.join(OPEN_STATES)}.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def cancel(job_ids: Sequence[int], dsn: str | None, reason: str | None, yes: bool, as_json: bool, **which: Any) -> None:
    """Say that jobs shall not run; what runs is told to stop.

    Either these jobs, each for itself, or all open ones that match every filter given.
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
    # Only intents are written, and they hold up nobody: so they can be counted first, and taken back.
    with connect(dsn) as conn, conn.transaction() as transaction:
        done = sync.run(conn, call)
        total = done.cancelled + done.cancelling
        if total and not agreed(f"cancel {total} jobs, {done.cancelling} of them running?", yes):
            click.echo("nothing done", err=True)
            raise psycopg.Rollback(transaction)
    if as_json:
        print_json(json.dumps({"cancelled": done.cancelled, "cancelling": done.cancelling}))
        return
    click.echo(f"{done.cancelled} jobs will not start, {done.cancelling} run and their workers are told")


_CANCELLED = {
    "cancelled": "cancelled",
    "cancelling": "is running, its worker is told to stop it",
    "completed": "nothing done: it is completed already",
    "dead": "nothing done: it is dead already",
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
