"""tallybook schedule list, show, next, set, pause, resume, drop, run."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

from tallybook._app.schedules import preview
from tallybook._cli.common import (
    DURATION,
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
from tallybook._cli.queue import me
from tallybook._cli.text import clean, local
from tallybook._db import schedules, sync
from tallybook._db.declared import Call
from tallybook._db.schedules import Fire, ScheduleInfo
from tallybook._model.cron import zone
from tallybook._model.durations import format_duration, iso_duration
from tallybook._model.job import JobCall
from tallybook._model.options import Options, check_name
from tallybook._model.payload import encode
from tallybook._model.schedule import MISSED, Timing, check_query
from tallybook.errors import UnknownSchedule

T = TypeVar("T")

_NAMES = "select s.name from tallybook.schedules s"


@click.group()
def schedule() -> None:
    """List, change and run schedules.

    A schedule is a rule that enqueues by the clock.
    """


@schedule.command("list")
@dsn_option
@json_option
def list_(dsn: str | None, as_json: bool) -> None:
    """List the schedules, of code and of the database, with their next tick and their counts."""
    with connect(dsn) as conn:
        found = sync.run(conn, schedules.listed())
    if as_json:
        print_json([_json(asdict(one)) for one in found])
        return
    titles = ("schedule", "rule", "task", "next", "last", "fired", "skipped", "missed", "failed", "state")
    empty = "no schedules: declare one by @app.task(schedule=...), or by tallybook schedule set"
    print_table(titles, [_line(one) for one in found], empty=empty)


def _line(one: ScheduleInfo) -> tuple[object, ...]:
    last = "" if one.last_tick is None else f"{local(one.last_tick.isoformat())} {one.last_what}"
    counts = (one.fired_count, one.skipped_count, one.missed_count, one.failed_count)
    return (one.name, one.rule, one.task, _next(one), last, *counts, _state(one))


def _next(one: ScheduleInfo) -> str:
    return "" if one.due_at is None or one.tick is None else local(one.due_at.isoformat())


def _state(one: ScheduleInfo) -> str:
    if one.paused_at is not None:
        return f"paused since {local(one.paused_at.isoformat())} by {one.paused_by}"
    return one.problem or ""


@schedule.command()
@click.argument("name")
@click.option("-n", "fires", type=click.IntRange(1, 1000), default=20, show_default=True, help="So many of its fires.")
@dsn_option
@json_option
def show(name: str, dsn: str | None, fires: int, as_json: bool) -> None:
    """Show one schedule and what became of its latest ticks."""
    with connect(dsn) as conn:
        one, _ = _known(conn, name, schedules.show(name))
        happened = sync.run(conn, schedules.fires(name, fires))
    if as_json:
        print_json(_json({**asdict(one), "fires": [asdict(fire) for fire in happened]}))
        return
    owner = f"the code of app {one.app}" if one.app else "the database"
    pairs: list[tuple[str, object]] = [
        ("schedule", one.name),
        ("rule", one.rule),
        ("from", owner),
        ("task", f"{one.task} in queue {one.queue}"),
        ("args", json.dumps(one.args, ensure_ascii=False)),
        ("next", _next(one)),
        ("missed", f"{one.missed}, at most {one.catch_up}" if one.missed == "all" else one.missed),
        ("overlap", "yes" if one.overlap else "no"),
        ("fires", f"{one.fired_count} fired, {one.skipped_count} skipped, {one.missed_count} missed, {one.failed_count} failed"),
    ]  # fmt: skip
    if one.jitter:
        pairs.append(("jitter", format_duration(one.jitter)))
    if one.query is not None:
        pairs.append(("query", one.query))
    if state := _state(one):
        pairs.append(("state", state))
    print_pairs(pairs)
    click.echo()
    print_table(
        ("tick", "fired", "what", "job", "state", "reason"), [_fire(fire) for fire in happened], empty="no fires"
    )


def _fire(fire: Fire) -> tuple[object, ...]:
    what = fire.what if fire.ticks is None else f"{fire.what} ({fire.ticks})"
    reason = clean(fire.reason or "")
    job = fire.job_id if fire.job_id is not None or fire.jobs is None else f"{fire.jobs} jobs"
    return (
        local(fire.tick.isoformat()), local(fire.fired_at.isoformat()), what, job, fire.job_state,
        reason if len(reason) <= 100 else reason[:97] + "...",
    )  # fmt: skip


@schedule.command("next")
@click.argument("name")
@click.option("-n", "count", type=click.IntRange(1, 1000), default=5, show_default=True, help="So many ticks.")
@dsn_option
@json_option
def next_(name: str, dsn: str | None, count: int, as_json: bool) -> None:
    """Show when a schedule ticks next, in its own time zone."""
    with connect(dsn) as conn:
        one, now = _known(conn, name, schedules.show(name))
    ticks = [tick.astimezone(zone(one.tz)).isoformat() for tick in preview(one, now, count)]
    if as_json:
        print_json(json.dumps(ticks))
        return
    click.echo("\n".join(ticks) if ticks else "it has no next tick")
    if one.paused_at is not None:
        click.echo(clean(_state(one)), err=True)


@schedule.command("set")
@click.argument("name")
@click.argument("task")
@click.option("--args", metavar="JSON", default="{}", help="Of its jobs: one JSON object.")
@click.option("--query", metavar="SQL", help="A SELECT: each row is a job, with columns args, key, run_at, priority.")
@click.option("--cron", metavar="TEXT", help="Like '*/5 * * * *'; 5 fields, or 6 with seconds first; or @daily.")
@click.option("--every", type=DURATION, metavar="DURATION", help="Like '10 min', instead of --cron.")
@click.option("--tz", metavar="ZONE", help="Of the cron expression, like Europe/Berlin. [UTC]")
@click.option("--queue", default="default", show_default=True, help="Where its jobs go.")
@click.option("--priority", type=int, default=2, show_default=True, help="Of its jobs; lower runs first.")
@click.option("--max-attempts", type=int, help="Failures until a job of it is dead. [what the task says]")
@click.option("--jitter", type=DURATION, metavar="DURATION", help="Fire up to so much later than the tick.")
@click.option("--missed", type=click.Choice(MISSED), default="once", show_default=True, help="Ticks found too late.")
@click.option("--catch-up", type=int, default=100, show_default=True, help="At most so many with --missed all.")
@click.option("--overlap", is_flag=True, help="Fire although the job of the last fire still runs.")
@dsn_option
def set_(
    name: str,
    task: str,
    args: str,
    query: str | None,
    cron: str | None,
    every: timedelta | None,
    tz: str | None,
    queue: str,
    priority: int,
    max_attempts: int | None,
    jitter: timedelta | None,
    missed: str,
    catch_up: int,
    overlap: bool,
    dsn: str | None,
) -> None:
    """Create or change a schedule that lives in the database."""
    if (cron is None) == (every is None):
        raise click.UsageError("give one of --cron and --every")
    if query is not None:
        query = check_query(query)
        if json_object("--args", args):
            raise click.UsageError("with --query the rows have the args: leave --args out")
    check_name("task", task, 200)
    timing = Timing.checked(
        cron=cron, every=every, tz=tz, jitter=jitter, missed=missed, catch_up=catch_up, overlap=overlap
    )
    job = JobCall(
        task,
        encode(json_object("--args", args), task=task),
        None,
        Options(queue=queue, priority=priority, max_attempts=max_attempts),
    )
    with connect(dsn) as conn:
        what = sync.run(conn, schedules.set_(name, job, timing, query))
        one, now = sync.run(conn, schedules.show(name))
    tick = next(iter(preview(one, now, 1)), None)
    when = "" if tick is None else f"; next at {local(tick.isoformat())}"
    click.echo(f"schedule {clean(name)!r} is {what}{when}")


@schedule.command()
@click.argument("name")
@dsn_option
@click.option("--by", metavar="WHO", help="Shown as who paused it. [user@host]")
def pause(name: str, dsn: str | None, by: str | None) -> None:
    """Fire no more ticks of this schedule, until resume."""
    with connect(dsn) as conn:
        changed = _known(conn, name, schedules.pause(name, by or me()))
    click.echo(f"schedule {clean(name)!r} is paused" if changed else f"schedule {clean(name)!r} was paused already")


@schedule.command()
@click.argument("name")
@dsn_option
def resume(name: str, dsn: str | None) -> None:
    """Fire the ticks of a paused schedule again, from the next one on."""
    with connect(dsn) as conn:
        changed = _known(conn, name, schedules.resume(name))
    click.echo(f"schedule {clean(name)!r} fires again" if changed else f"schedule {clean(name)!r} was not paused")


@schedule.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@dsn_option
def drop(name: str, yes: bool, dsn: str | None) -> None:
    """Remove a schedule. One that is declared in code comes back when a worker of its app starts."""
    with connect(dsn) as conn:
        one, _ = _known(conn, name, schedules.show(name))
        if not agreed(f"Remove schedule {clean(name)!r} ({clean(one.rule)})?", yes):
            return
        sync.run(conn, schedules.drop(name))
    click.echo(f"schedule {clean(name)!r} is removed")
    if one.app is not None:
        click.echo(f"it comes back when a worker of app {clean(one.app)!r} starts, if its code declares it", err=True)


@schedule.command()
@click.argument("name")
@dsn_option
def run(name: str, dsn: str | None) -> None:
    """Fire a schedule now: the same path, guard and retries as at a tick. Exit code 1 if it was not enqueued."""
    with connect(dsn) as conn:
        fired = _known(conn, name, schedules.run(name))
    if fired.what == "enqueued":
        click.echo(f"job {fired.job_id}" if fired.job_id is not None else f"{fired.jobs} jobs")
        return
    busy = "the job of its last fire has not ended, or its query runs right now"
    why = busy if fired.reason == "overlap" else clean(fired.reason)
    click.echo(f"schedule {clean(name)!r}: {fired.what}: {why}", err=True)
    raise SystemExit(1)


def _known(conn: Conn, name: str, call: Call[T]) -> T:
    try:
        return sync.run(conn, call)
    except UnknownSchedule:
        raise UnknownSchedule(name, [row[0] for row in conn.execute(_NAMES).fetchall()]) from None


def _json(columns: dict[str, Any]) -> str:
    def plain(value: object) -> object:
        return value.isoformat() if isinstance(value, datetime) else iso_duration(value)  # type: ignore[arg-type]

    return json.dumps(columns, default=plain, ensure_ascii=False)
