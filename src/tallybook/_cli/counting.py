"""tallybook count, event: the counters."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

import click

from tallybook._cli.common import command, duration, listing
from tallybook._cli.database import APP, Db, gathered
from tallybook._cli.output import Columns, clean, local, print_json, print_rows, working
from tallybook._model.counting import Counts, Throughput, Timings
from tallybook._model.options import check_name

_STATES = ("scheduled", "retrying", "waiting", "available", "running", "dead")
_OLDEST = "select q.queue, extract(epoch from clock_timestamp() - q.oldest)::float8 from tallybook.queue_stats q"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_NUMBERS = tuple(field.name for field in fields(Counts) if field.name not in ("queue", "task"))
_RATES = ("completed_per_s", "failed_per_s")
_TIMES = ("waited_p50", "waited_p95", "took_p50", "took_p95")
_HOW: dict[type, tuple[tuple[str, ...], Callable[[Any, Any], Any]]] = {
    Counts: (_NUMBERS, operator.add), Throughput: (_RATES, operator.add), Timings: (_TIMES, max),
}  # fmt: skip
_EMPTY = "no counts: no job was ever enqueued"
_SPEEDS: Columns = {
    "completed/s": lambda line: f"{line['completed_per_s']:.1f}",
    "failed/s": lambda line: f"{line['failed_per_s']:.1f}",
    "waited p50": lambda line: _ms(line["waited_p50"]), "waited p95": lambda line: _ms(line["waited_p95"]),
    "took p50": lambda line: _ms(line["took_p50"]), "took p95": lambda line: _ms(line["took_p95"]),
}  # fmt: skip
_Row = Counts | Throughput | Timings

count = click.Group("count", help="Show how many jobs there are, now and over time.")


@command("list", of=count, json=True, nodes=True, reads=True)
@click.option("--by-task", is_flag=True, help="One line per queue and task.")
def list_(db: Db, by_task: bool, as_json: bool) -> None:
    """Show jobs by state, throughput and times. Costs the same at any size.

    Rates are for the last minute. Waited and took are percentiles for the last 15 min; a queue with several tasks shows
    its slowest task. In JSON, times are in milliseconds.
    """
    found, oldest = _counted(db)
    lines = _lines(found, () if by_task else oldest, by_task)
    for line in lines:
        since = oldest.get(str(line["queue"]))
        line["oldest"] = None if since is None or by_task else max(0.0, round(since, 3))
    if as_json:
        print_json(lines)
        return
    of: Columns = {"queue": "queue", "task": "task"} if by_task else {"queue": "queue"}
    age: Columns = {} if by_task else {"oldest": lambda line: _span(line["oldest"])}
    print_rows({**of, **age, **dict(zip(_STATES, _STATES, strict=True))}, lines, empty=_EMPTY)
    if lines:
        click.echo()
        print_rows({**of, **_SPEEDS}, lines, empty=_EMPTY)


def _counted(db: Db) -> tuple[list[_Row], dict[str, float | None]]:
    """Read the counts of all nodes (`_lines` adds them up), and the age of each queue's oldest available job."""
    if not db.nodes:
        rates, timings = db.run(APP.counts.throughput()), db.run(APP.counts.timings())
        return [*db.run(APP.counts.list()), *rates, *timings], dict(db.conn.execute(_OLDEST).fetchall())
    found, oldest = list[_Row](), dict[str, float | None]()
    for _, (rows, ages) in gathered(db, _counted):
        found += rows
        for queue, age in ages.items():
            oldest[queue] = max(oldest.get(queue) or 0.0, age or 0.0) or None
    return found, oldest


def _lines(found: Sequence[_Row], queues: Iterable[str], by_task: bool) -> list[dict[str, Any]]:
    """Add up the rows of each queue, or task; these queues have a line even if they have never had a job."""
    zero = dict.fromkeys(_NUMBERS, 0) | dict.fromkeys(_RATES, 0.0) | dict.fromkeys(_TIMES)
    lines: dict[tuple[str, str], dict[str, Any]] = {(queue, ""): {"queue": queue, **zero} for queue in queues}
    for one in sorted(found, key=lambda one: not isinstance(one, Counts)):  # counts first: only they make a line
        key = (one.queue, one.task if by_task else "")
        if isinstance(one, Counts):
            lines.setdefault(key, {"queue": one.queue, **({"task": one.task} if by_task else {}), **zero})
        if line := lines.get(key):
            names, how = _HOW[type(one)]
            line.update({name: how(getattr(one, name), line[name] or 0) for name in names})
    return [line | {name: round(line[name], 3) for name in _RATES} for _, line in sorted(lines.items())]


def _span(seconds: float | None) -> str:
    """Format a duration by its two largest units."""
    if seconds is None:
        return ""
    left, texts = int(seconds), list[str]()
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size or (unit == "s" and not texts):
            texts.append(f"{left // size} {unit}")
        left %= size
    return " ".join(texts[:2])


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f} ms" if value < 10_000 else _span(value / 1000)


_LEVELS: Columns = {
    "from": lambda one: local(one.begins)[5:-3], "open": "open", "completed": "completed",
    "failed": "failed", "died": "died", "scheduled": "scheduled", "retrying": "retrying", "waiting": "waiting",
    "dead": "dead",
}  # fmt: skip


@command(of=count, json=True)
@click.option("--step", type=duration, default="1 min", show_default=True, help="Length of a step, in whole minutes.")
@click.option("--since", type=duration, help="How far back to start. [60 steps]")
def series(db: Db, queue: str | None, step: timedelta, since: timedelta | None, as_json: bool) -> None:
    """Show the counters of QUEUE, or of all queues, over time."""
    if queue is not None:
        check_name("queue", queue, 64)
        db.known_queue(queue)
    found = db.run(APP.counts.levels(step=step, since=since, queue=queue))
    most_open = max((level.open for level in found), default=0)
    most_done = max((level.completed for level in found), default=0)
    print_rows(_LEVELS, found, empty="no counts", as_json=as_json)
    if found and not as_json:
        click.echo(f"open       {_spark([one.open for one in found])}  at most {most_open}")
        click.echo(f"completed  {_spark([one.completed for one in found])}  at most {most_done}")


def _spark(values: Sequence[int], width: int = 50) -> str:
    """Draw one character per step, newest on the right; if there are too many steps, the maximum of several."""
    group = -(-len(values) // width)
    highs = [max(values[at : at + group]) for at in range(0, len(values), group)]
    most = max(highs)
    return "".join(_BLOCKS[0 if high <= 0 else max(1, round(high / most * 8))] for high in highs)


_DIFFERENCES: Columns = {
    "queue": lambda one: one.queue or "(all)", "task": lambda one: one.task or "(all)", "what": "what",
    "counted": "counted", "found": "found",
}  # fmt: skip


@command(of=count, json=True)
def verify(db: Db, as_json: bool) -> None:
    """Compare the counters with a recount. Exit code 1 if they differ.

    It reads all open jobs and the whole history under one snapshot: about ten seconds for ten million jobs.
    """
    with working("recounting all stored jobs ..."):
        found = db.run(APP.counts.verify())
    print_rows(_DIFFERENCES, found, empty="the counters agree", as_json=as_json)
    if found and not as_json:
        bug = "which is a bug in Tallybook: please report it with these lines. `tallybook count recount` corrects them"
        click.echo(f"the counters differ from a recount, {bug}", err=True)
    if found:
        raise SystemExit(1)


@command(of=count)
def recount(db: Db) -> str:
    """Rebuild the counters from the stored jobs. No job waits for it."""
    with working("recounting everything ..."):
        sums = db.run(APP.counts.recount())
    return f"recounted: {sums} sum{'' if sums == 1 else 's'}"


event = click.Group("event", help="Count your own events and list the counts.")


@listing({"event": "name", "counted": "n"}, of=event, empty="no events: `tallybook event count NAME` counts one")
def list_events(db: Db) -> list[dict[str, object]]:
    """List the events with their counts."""
    return [{"name": name, "n": n} for name, n in db.run(APP.events.list()).items()]


@command("count", of=event)
def count_event(db: Db, name: str, n: int = 1) -> str:
    """Count the event NAME N times; negative N subtracts (`event count NAME -- -1`)."""
    db.run(APP.events.count(name, n))
    return f"event {clean(name)!r} is counted" + ("" if n == 1 else f" {n} times" if n > 0 else f" back by {-n}")


@command("set", of=event)
def set_event(db: Db, name: str, n: int) -> str:
    """Set the count of the event NAME to N; 0 forgets it until its next count."""
    before = db.run(APP.events.set(name, n))
    return f"event {clean(name)!r} is {'set to ' + str(n) if n else 'forgotten'}; it was {before}"
