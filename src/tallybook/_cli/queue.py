"""tallybook queue list, create, set, pause, resume, top, truncate, drop."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, TypeVar

import click

from tallybook._cli.common import Conn, agreed, connect, dsn_option, json_option, print_json, print_table, working
from tallybook._cli.text import clean, local
from tallybook._db import calls, counting, queues, sync
from tallybook._db.declared import Call
from tallybook._db.stored import loads
from tallybook._model.queue import Truncated
from tallybook.errors import InvalidArgument, UnknownQueue

_NAMES = "select q.name from tallybook.queues q"

_LIST = """\
select json_build_object(
  'name', n.queue, 'available', n.available, 'running', n.running, 'scheduled', n.scheduled, 'retrying', n.retrying,
  'dead', n.dead, 'unserved', n.unserved,
  'workers', (select count(*) from tallybook.workers w where w.ended_at is null and n.queue = any (w.queues)),
  'paused_at', n.paused_at, 'paused_by', n.paused_by)::text
  from tallybook.queue_stats n order by n.queue"""


@click.group()
def queue() -> None:
    """List, change, pause, truncate and drop queues."""


@queue.command("list")
@dsn_option
@json_option
def list_(dsn: str | None, as_json: bool) -> None:
    """List the queues with how many of their jobs are in which state."""
    with connect(dsn) as conn:
        rows = [row[0] for row in conn.execute(_LIST).fetchall()]
    if as_json:
        print_json(rows)
        return
    titles = ("queue", "available", "running", "scheduled", "retrying", "dead", "unserved", "workers", "paused")
    empty = "no queues: a queue is born at its first enqueue, or when a worker serves it"
    print_table(titles, [_line(loads(row)) for row in rows], empty=empty)


def _line(row: dict[str, Any]) -> tuple[object, ...]:
    paused = f"since {local(row['paused_at'])} by {row['paused_by']}" if row["paused_at"] else ""
    counts = (row[key] for key in ("available", "running", "scheduled", "retrying", "dead", "unserved", "workers"))
    return (row["name"], *counts, paused)


@queue.command()
@click.argument("name")
@dsn_option
@click.option("--by", metavar="WHO", help="Shown as who paused it. [user@host]")
def pause(name: str, dsn: str | None, by: str | None) -> None:
    """Let no more jobs of this queue start, until resume. What runs goes on."""
    with connect(dsn) as conn:
        changed = _steer(conn, name, calls.pause(name, by or me()))
    click.echo(f"queue {clean(name)!r} is paused" if changed else f"queue {clean(name)!r} was paused already")


@queue.command()
@click.argument("name")
@dsn_option
@click.option("--by", metavar="WHO", help="Said on the channel tallybook_queues. [user@host]")
def resume(name: str, dsn: str | None, by: str | None) -> None:
    """Let a paused queue run again."""
    with connect(dsn) as conn:
        changed = _steer(conn, name, calls.resume(name, by or me()))
    click.echo(f"queue {clean(name)!r} runs again" if changed else f"queue {clean(name)!r} was not paused")


_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def _settings(command: _F) -> _F:
    for option in reversed(
        (
            click.option(
                "--retention", type=click.Choice(["brief", "default", "long"]), help="How long ended jobs stay."
            ),
            click.option("--max-attempts", type=int, help="Of jobs where neither they nor their task say; 0: 5 again."),
            click.option("--notify/--no-notify", default=None, help="Publish its jobs' transitions on tallybook_jobs."),
            click.option("--by", metavar="WHO", help="Said on the channel tallybook_queues. [user@host]"),
        )
    ):
        command = option(command)
    return command


@queue.command()
@click.argument("name")
@dsn_option
@_settings
@json_option
def create(name: str, dsn: str | None, as_json: bool, by: str | None, **settings: Any) -> None:
    """Make a queue with these settings. Code 1 if it has settings already: change them with set."""
    with connect(dsn) as conn, conn.transaction():
        said = sync.run(conn, queues.set_(name, **settings, by=by or me()))
        if said != "created":
            raise InvalidArgument(f"queue {clean(name)!r} is there already; change it with `tallybook queue set`")
    _said(name, said, as_json)


@queue.command("set")
@click.argument("name")
@dsn_option
@_settings
@json_option
def set_(name: str, dsn: str | None, as_json: bool, by: str | None, **settings: Any) -> None:
    """Change settings of a queue; what is not given stays as it is."""
    if all(value is None for value in settings.values()):
        raise click.UsageError("say what to change: --retention, --max-attempts, --notify or --no-notify")
    with connect(dsn) as conn:
        _known(conn, name)
        said = sync.run(conn, queues.set_(name, **settings, by=by or me()))
    _said(name, "changed" if said == "created" else said, as_json)


def _said(name: str, said: str, as_json: bool) -> None:
    if as_json:
        print_json(json.dumps({"queue": name, "said": said}))
    else:
        click.echo(f"queue {clean(name)!r} is {said}")


@queue.command()
@click.argument("name")
@dsn_option
@click.option("--state", "states", multiple=True, type=click.Choice(["available", "scheduled", "retrying", "waiting"]))
@click.option("--running", is_flag=True, help="Cancel what runs, too.")
@click.option("--by", metavar="WHO", help="Kept with the reason. [user@host]")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def truncate(
    name: str, dsn: str | None, states: tuple[str, ...], running: bool, by: str | None, yes: bool, as_json: bool
) -> None:
    """Cancel all jobs of a queue that do not run, or those of some states."""
    with connect(dsn) as conn:
        _known(conn, name)
        wanted = (*(states or _OPEN), *(["running"] if running else []))
        if not agreed(f"Cancel {_holds(conn, name, wanted)} of queue {clean(name)!r}?", yes):
            return
        done = _emptied(conn, name, states or None, running, by or me())
    if as_json:
        print_json(json.dumps(asdict(done)))
        return
    told = f", {done.cancelling} run and were told" if done.cancelling else ""
    left = "; some were left that an open transaction has locked: say it again later" if done.busy else ""
    click.echo(f"queue {clean(name)!r}: {done.cancelled} jobs are cancelled{told}{left}")


_OPEN = ("available", "scheduled", "retrying", "waiting")
_HOLDS = f"""\
select coalesce(sum((to_jsonb(c) ->> s.state)::bigint), 0)
  from {counting.COUNTS.called()} c cross join unnest(%s::text[]) s(state) where c.queue = %s"""  # noqa: S608


def _holds(conn: Conn, name: str, states: Sequence[str]) -> str:
    row = conn.execute(_HOLDS, (list(states), name)).fetchone()
    assert row is not None
    return f"{row[0]} job{'' if row[0] == 1 else 's'}"


def _emptied(conn: Conn, name: str, states: Sequence[str] | None, running: bool, by: str) -> Truncated:
    mark: str | None = None
    cancelled = cancelling = 0
    with working(f"cancelling the jobs of queue {name!r}"):
        while True:
            call = queues.truncate(name, states=states, running=running, by=by, max_jobs=10_000, mark=mark)
            batch = sync.run(conn, call)
            cancelled, cancelling, mark = (
                cancelled + batch.done.cancelled,
                cancelling + batch.done.cancelling,
                batch.mark,
            )
            if not batch.remain:
                return Truncated(cancelled, cancelling, batch.done.busy)
            if cancelled >= 100_000 and batch.done.cancelled:
                click.echo(f"{cancelled} jobs", err=True)


@queue.command()
@click.argument("name")
@dsn_option
@click.option("--truncate", "first", is_flag=True, help="Cancel what it holds first.")
@click.option("--by", metavar="WHO", help="Said on the channel tallybook_queues. [user@host]")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def drop(name: str, dsn: str | None, first: bool, by: str | None, yes: bool, as_json: bool) -> None:
    """Forget a queue that nobody uses. Its history stays until it is pruned."""
    with connect(dsn) as conn:
        _known(conn, name)
        held = _holds(conn, name, (*_OPEN, "running"))
        what = f"cancel its {held}" if first else f"it holds {held}"
        if not agreed(f"Drop queue {clean(name)!r} ({what})?", yes):
            return
        if first:
            _emptied(conn, name, None, False, by or me())
        sync.run(conn, queues.drop(name, by or me()))
    _said(name, "dropped", as_json)


@queue.command()
@click.argument("name")
@dsn_option
@click.option("--state", "states", multiple=True, type=click.Choice(["available", "scheduled", "retrying"]))
@click.option("--max", "max_jobs", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@click.option("--after", metavar="PLACE", help="Read on behind this place, as --json shows it.")
@json_option
def top(name: str, dsn: str | None, states: tuple[str, ...], max_jobs: int, after: str | None, as_json: bool) -> None:
    """The next jobs of a queue, in the order in which they would run."""
    with connect(dsn) as conn:
        found = _steer(conn, name, queues.top(name, states=states or None, max_jobs=max_jobs, after=after))
    if as_json:
        print_json([json.dumps(asdict(job), default=_iso) for job in found])
        return
    rows = [(job.position, job.id, job.task, job.state, job.priority, local(job.run_at.isoformat())) for job in found]
    print_table(("", "job", "task", "state", "priority", "run at"), rows, empty="nothing is in line or scheduled")


def _iso(value: datetime) -> str:
    return value.isoformat()


def _known(conn: Conn, name: str) -> None:
    known = [row[0] for row in conn.execute(_NAMES).fetchall()]
    if name not in known:
        raise UnknownQueue(name, known)


def _steer(conn: Conn, name: str, call: Call[_T]) -> _T:
    try:
        return sync.run(conn, call)
    except UnknownQueue:
        known = [row[0] for row in conn.execute(_NAMES).fetchall()]
        raise UnknownQueue(name, known) from None


def me() -> str:
    """Who types: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
