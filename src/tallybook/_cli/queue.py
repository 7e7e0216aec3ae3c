"""tallybook queue list, create, set, pause, resume, top, truncate, drop."""

from collections.abc import Sequence
from typing import Any

import click

from tallybook._app.queues import UNUSED
from tallybook._cli.common import agreed, command, duration, limit_option, listing, options, state_option
from tallybook._cli.database import APP, Db, summed
from tallybook._cli.output import Columns, clean, local, print_json, working
from tallybook._db.numbers import COUNTS
from tallybook._model.queue import TopJob, Truncated
from tallybook.errors import InvalidArgument

_LIST = """\
select json_build_object(
  'name', n.queue, 'available', n.available, 'running', n.running, 'scheduled', n.scheduled, 'retrying', n.retrying,
  'dead', n.dead, 'unserved', n.unserved,
  'workers', (select count(*) from tallybook.workers w where w.ended_at is null and n.queue = any (w.queues)),
  'paused_at', n.paused_at, 'paused_by', n.paused_by)::text
  from tallybook.queue_stats n order by n.queue"""

queue = click.Group("queue", help="List, change, pause, truncate and drop queues.")

_COLUMNS: Columns = {
    "queue": "name", "available": "available", "running": "running", "scheduled": "scheduled", "retrying": "retrying",
    "dead": "dead", "unserved": "unserved", "workers": "workers",
    "paused": lambda row: f"since {local(row['paused_at'])} by {row['paused_by']}" if row["paused_at"] else "",
}  # fmt: skip
_EMPTY = "no queues: a queue is created by its first job, or by a worker that serves it"


@listing(_COLUMNS, of=queue, empty=_EMPTY, merge=summed)
def list_(db: Db) -> list[str]:
    """List the queues with their jobs by state."""
    return db.texts(_LIST)


@command(of=queue, nodes="each")
def pause(db: Db, name: str, by: str) -> str:
    """Pause a queue until you resume it. Running jobs continue."""
    changed = db.run(APP.queues.pause(name, by), name)
    return f"queue {clean(name)!r} is paused" if changed else f"queue {clean(name)!r} was paused already"


@command(of=queue, nodes="each")
def resume(db: Db, name: str, by: str) -> str:
    """Resume a paused queue."""
    changed = db.run(APP.queues.resume(name, by), name)
    return f"queue {clean(name)!r} is resumed" if changed else f"queue {clean(name)!r} was not paused"


_settings = options(
    click.option("--retention", type=click.Choice(["brief", "default", "long"]), help="Retention class of ended jobs."),
    click.option("--max-attempts", type=int, help="Default for jobs and tasks without their own; 0 unsets it."),
    click.option("--notify/--no-notify", default=None, help="Publish its jobs' transitions on tallybook_jobs."),
    click.option("--error-retention", type=duration, help="Retention of its error log; 0s: that of its jobs."),
    click.option(
        "--own-names/--shared-names",
        default=None,
        help="Own subject names, or shared ones; set before the queue's first job.",
    ),
    click.option("--random-order/--in-order", default=None, help="Run new jobs in random order."),
    click.option("--metrics-retention", type=duration, help="Retention of its series; 0s: that of all series."),
)


@command(of=queue, json=True, nodes="each")
@_settings
def create(db: Db, name: str, as_json: bool, by: str, **settings: Any) -> None:
    """Create a queue with these settings. Exit code 1 if it already has settings."""
    with db.conn.transaction():
        said = db.run(APP.queues.set(name, **settings, by=by))
        if said != "created":
            raise InvalidArgument(f"queue {clean(name)!r} exists already; change it with `tallybook queue set`")
    _said(name, said, as_json)


@command("set", of=queue, json=True, nodes="each")
@_settings
def set_(db: Db, name: str, as_json: bool, by: str, **settings: Any) -> None:
    """Change settings of a queue; others stay as they are."""
    if all(value is None for value in settings.values()):
        raise click.UsageError("pass a setting to change: --retention, --max-attempts, --notify, ... (see --help)")
    db.known_queue(name)
    said = db.run(APP.queues.set(name, **settings, by=by))
    _said(name, "changed" if said == "created" else said, as_json)


def _said(name: str, said: str, as_json: bool) -> None:
    if as_json:
        print_json({"queue": name, "said": said})
    else:
        click.echo(f"queue {clean(name)!r} is {said}")


_OPEN = ("available", "scheduled", "retrying", "waiting")


@command(of=queue, json=True, nodes="each")
@click.option("--all", "every", is_flag=True, help="Truncate all queues.")
@state_option(*_OPEN)
@click.option("--running", is_flag=True, help="Cancel running jobs too.")
def truncate(
    db: Db, name: str | None, every: bool, states: tuple[str, ...], running: bool, by: str, yes: bool, as_json: bool
) -> str | None:
    """Cancel all jobs of a queue that are not running, or only those in some states."""
    if (name is None) is not every:
        raise click.UsageError("name one queue, or pass --all")
    if name is not None:
        db.known_queue(name)
    which = "all queues" if name is None else f"queue {clean(name)!r}"
    wanted = (*(states or _OPEN), *(["running"] if running else []))
    if not agreed(db.named(f"Cancel {_holds(db, name, wanted)} of {which}?"), yes):
        return None
    done = _emptied(db, name, states or None, running, by)
    if as_json:
        print_json(done)
        return None
    told = f", {done.cancelling} run and are asked to stop" if done.cancelling else ""
    left = "; some remain because an open transaction has locked them: run the command again later" if done.busy else ""
    return f"{which}: {done.cancelled} jobs are cancelled{told}{left}"


_HOLDS = f"""\
select coalesce(sum((to_jsonb(c) ->> s.state)::bigint), 0)
  from {COUNTS.called()} c cross join unnest(%s::text[]) s(state)
 where c.queue = coalesce(%s, c.queue)"""  # noqa: S608


def _holds(db: Db, name: str | None, states: Sequence[str]) -> str:
    (jobs,) = db.texts(_HOLDS, (list(states), name))
    return f"{jobs} job{'' if str(jobs) == '1' else 's'}"


def _emptied(db: Db, name: str | None, states: Sequence[str] | None, running: bool, by: str) -> Truncated:
    total = 0

    def on_batch(cancelled: int) -> None:
        nonlocal total
        total += cancelled
        if total >= 100_000 and cancelled:
            click.echo(f"{total} jobs", err=True)

    how: dict[str, Any] = {"states": states, "running": running, "by": by, "on_batch": on_batch}
    with working("cancelling the jobs of " + ("all queues" if name is None else f"queue {name!r}")):
        return db.run(APP.queues.truncate_all(**how) if name is None else APP.queues.truncate(name, **how))


@command(of=queue, json=True, nodes="each")
@click.option("--truncate", "first", is_flag=True, help="Cancel its jobs first.")
def drop(db: Db, name: str, first: bool, by: str, yes: bool, as_json: bool) -> None:
    """Drop an unused queue. Its history stays until it is pruned."""
    db.known_queue(name)
    db.run(UNUSED(name))
    held = _holds(db, name, (*_OPEN, "running"))
    what = f"cancel its {held}" if first else f"it holds {held}"
    if not agreed(db.named(f"Drop queue {clean(name)!r} ({what})?"), yes):
        return
    if first:
        _emptied(db, name, None, False, by)
    db.run(APP.queues.drop(name, by=by))
    _said(name, "dropped", as_json)


_TOP: Columns = {
    "": "position", "job": "id", "task": "task", "state": "state", "priority": "priority", "run at": "run_at",
}  # fmt: skip


@listing(_TOP, name="top", of=queue, empty="no jobs are available or scheduled")
@state_option("available", "scheduled", "retrying")
@limit_option(1000, 20, names=("--max", "max_jobs"))
@click.option("--after", metavar="PLACE", help="Continue after this place, as printed by --json.")
def top(db: Db, name: str, states: tuple[str, ...], max_jobs: int, after: str | None) -> list[TopJob]:
    """Show the next jobs of a queue, in the order in which they would run."""
    return db.run(APP.queues.top(name, states=states or None, max_jobs=max_jobs, after=after), name)
