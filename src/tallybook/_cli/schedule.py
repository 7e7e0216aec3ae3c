"""tallybook schedule list, show, next, set, pause, resume, drop, run."""

import json
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from tallybook._app.schedules import get_schedule, preview, set_schedule
from tallybook._cli.common import agreed, command, duration, fail, json_object, limit_option, listing
from tallybook._cli.database import APP, Db
from tallybook._cli.output import Columns, clean, local, print_json, print_pairs, print_rows, row_json, short, yes_no
from tallybook._model.cron import rule, zone
from tallybook._model.durations import format_duration, iso_duration
from tallybook._model.job import JobCall
from tallybook._model.options import Options, check_name
from tallybook._model.payload import encode
from tallybook._model.schedule import MISSED, ScheduleInfo, Timing, check_query, due
from tallybook.errors import ConfigError

schedule = click.Group("schedule", help="List, change and run schedules.\n\nA schedule enqueues jobs by the clock.")


def _next(one: ScheduleInfo) -> str:
    if one.tick is not None or one.paused_at is not None:
        return local(one.due_at)
    try:  # no worker has computed it yet
        ticks = rule(one.cron, one.every, one.tz)
        tick = ticks.after(one.since)
    except ConfigError:  # SQL stores any expression
        return ""
    return "" if tick is None else local(due(one.name, ticks, tick, one.jitter))


def _state(one: ScheduleInfo) -> str:
    if one.paused_at is not None:
        return f"paused since {local(one.paused_at)} by {one.paused_by}"
    return one.problem or ""


def _plain(value: Any) -> object:
    return value.isoformat() if isinstance(value, datetime) else iso_duration(value)


_COLUMNS: Columns = {
    "schedule": "name", "rule": "rule", "task": "task", "next": _next,
    "last": lambda one: "" if one.last_tick is None else f"{local(one.last_tick)} {one.last_what}",
    "fired": "fired_count", "skipped": "skipped_count", "missed": "missed_count", "failed": "failed_count",
    "state": _state,
}  # fmt: skip
_EMPTY = "no schedules: declare one by @app.task(schedule=...), or by tallybook schedule set"


@listing(_COLUMNS, of=schedule, home=True, empty=_EMPTY, plain=_plain)
def list_(db: Db) -> list[ScheduleInfo]:
    """List the schedules with their next tick and their counts."""
    return db.run(APP.schedules.list())


_FIRES: Columns = {
    "tick": "tick", "fired": "fired_at",
    "what": lambda fire: fire.what if fire.ticks is None else f"{fire.what} ({fire.ticks})",
    "job": lambda fire: fire.job_id if fire.job_id is not None or fire.jobs is None else f"{fire.jobs} jobs",
    "state": "job_state", "reason": lambda fire: short(fire.reason or ""),
}  # fmt: skip


@command(of=schedule, home=True, json=True)
@limit_option(1000, 20, "Number of ticks.", ("-n", "fires"))
def show(db: Db, name: str, fires: int, as_json: bool) -> None:
    """Show one schedule and its latest ticks."""
    one, _ = db.run(get_schedule(name), name)
    happened = db.run(APP.schedules.fires(name, max_fires=fires))
    if as_json:
        print_json(row_json({**asdict(one), "fires": [asdict(fire) for fire in happened]}, _plain))
        return
    owner = f"the code of app {one.app}" if one.app else "the database"
    counts = (
        f"{one.fired_count} fired, {one.skipped_count} skipped, {one.missed_count} missed, {one.failed_count} failed"
    )
    pairs: dict[str, object] = {
        "schedule": one.name, "rule": one.rule, "from": owner, "task": f"{one.task} in queue {one.queue}",
        "args": json.dumps(one.args, ensure_ascii=False), "next": _next(one),
        "missed": f"{one.missed}, at most {one.catch_up}" if one.missed == "all" else one.missed,
        "overlap": yes_no(one.overlap), "fires": counts,
    }  # fmt: skip
    more = {"jitter": one.jitter and format_duration(one.jitter), "query": one.query, "state": _state(one)}
    print_pairs(pairs | {title: value for title, value in more.items() if value})
    click.echo()
    print_rows(_FIRES, happened, empty="no fires")


@command("next", of=schedule, home=True, json=True)
@limit_option(1000, 5, "Number of ticks.", ("-n", "count"))
def next_(db: Db, name: str, count: int, as_json: bool) -> None:
    """Show the next ticks of a schedule, in its own time zone."""
    one, now = db.run(get_schedule(name), name)
    ticks = [tick.astimezone(zone(one.tz)).isoformat() for tick in preview(one, now, count)]
    if as_json:
        print_json(json.dumps(ticks))
        return
    click.echo("\n".join(ticks) if ticks else "it has no next tick")
    if one.paused_at is not None:
        click.echo(clean(_state(one)), err=True)


@command("set", of=schedule, home=True)
@click.option("--args", metavar="JSON", default="{}", help="Args of its jobs: one JSON object.")
@click.option("--query", metavar="SQL", help="A SELECT: each row is a job, with columns args, key, run_at, priority.")
@click.option("--cron", metavar="TEXT", help="Like '*/5 * * * *'; 5 fields, or 6 with seconds first; or @daily.")
@click.option("--every", type=duration, help="Like '10 min', instead of --cron.")
@click.option("--tz", metavar="ZONE", help="Time zone of the cron expression, like Europe/Berlin. [UTC]")
@click.option("--queue", default="default", show_default=True, help="Queue of its jobs.")
@click.option("--priority", type=int, default=2, show_default=True, help="Priority of its jobs; lower runs first.")
@click.option("--max-attempts", type=int, help="Failures until a job is dead. [task, queue, or 5]")
@click.option("--jitter", type=duration, help="Fire up to this much later than the tick.")
@click.option(
    "--missed", type=click.Choice(MISSED), default="once", show_default=True, help="What to do with missed ticks."
)
@click.option(
    "--catch-up", type=int, default=100, show_default=True,
    help="With --missed all: maximum number of missed ticks to fire.",
)  # fmt: skip
@click.option("--overlap", is_flag=True, help="Fire even if the previous job is still open.")
def set_(db: Db, name: str, task: str, args: str, query: str | None, **timing: Any) -> str:
    """Create or replace a schedule in the database.

    It replaces the whole schedule: options that you do not pass get their defaults.
    """
    options = {option: timing.pop(option) for option in ("queue", "priority", "max_attempts")}
    if (timing["cron"] is None) == (timing["every"] is None):
        raise click.UsageError("pass one of --cron and --every")
    if query is not None:
        query = check_query(query)
        if json_object("--args", args):
            raise click.UsageError("with --query the rows have the args: remove --args")
    check_name("task", task, 200)
    checked = Timing.checked(**timing)
    job = JobCall(task, encode(json_object("--args", args), task=task), None, Options(**options))
    what = db.run(set_schedule(name, job, checked, query))
    one, now = db.run(get_schedule(name))
    tick = next(iter(preview(one, now, 1)), None)
    return f"schedule {clean(name)!r} is {what}" + ("" if tick is None else f"; next at {local(tick)}")


@command(of=schedule, home=True)
def pause(db: Db, name: str, by: str) -> str:
    """Pause a schedule until you resume it."""
    changed = db.run(APP.schedules.pause(name, by), name)
    return f"schedule {clean(name)!r} is paused" if changed else f"schedule {clean(name)!r} was paused already"


@command(of=schedule, home=True)
def resume(db: Db, name: str) -> str:
    """Resume a paused schedule from its next tick on."""
    changed = db.run(APP.schedules.resume(name), name)
    return f"schedule {clean(name)!r} is resumed" if changed else f"schedule {clean(name)!r} was not paused"


@command(of=schedule, home=True)
def drop(db: Db, name: str, yes: bool) -> None:
    """Drop a schedule. A schedule in code returns when a worker of its app starts."""
    one, _ = db.run(get_schedule(name), name)
    if not agreed(f"Remove schedule {clean(name)!r} ({clean(one.rule)})?", yes):
        return
    db.run(APP.schedules.drop(name))
    click.echo(f"schedule {clean(name)!r} is removed")
    if one.app is not None:
        click.echo(f"it returns when a worker of app {clean(one.app)!r} starts, if its code declares it", err=True)


@command(of=schedule, home=True)
def run(db: Db, name: str) -> str:
    """Fire a schedule now, as if a tick were due. Exit code 1 if no job was enqueued."""
    fired = db.run(APP.schedules.run(name), name)
    if fired.what == "enqueued":
        return f"job {fired.job_id}" if fired.job_id is not None else f"{fired.jobs} jobs"
    busy = "the job of its last fire has not ended, or its query is running now"
    why = busy if fired.reason == "overlap" else clean(fired.reason)
    fail(f"schedule {clean(name)!r}: {fired.what}: {why}", err=True)
