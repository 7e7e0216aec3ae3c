"""The verbs over the counters, as pure values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from tallybook._db.declared import Call
from tallybook._db.stored import loads
from tallybook._db.texts import instant
from tallybook._model.counting import Counts, Difference, Level, Throughput, Timings
from tallybook._model.durations import format_duration, parse_duration
from tallybook._model.options import check_name
from tallybook.errors import InvalidArgument

__all__ = [
    "Since",
    "completed_since",
    "count_event",
    "counts",
    "event_counts",
    "event_series",
    "levels",
    "recount",
    "series_keep",
    "throughput",
    "timings",
    "verify",
]

T = TypeVar("T")
Since = datetime | timedelta | str

_ROWS = "select cast(coalesce(json_agg(to_json(x) order by {order}), '[]') as text) from {call} as x"
_SPAN = "span => cast(cast(%(span)s as text) as interval)"
_STEPS = """\
step => cast(cast(%(step)s as text) as interval),
  since => coalesce(cast(cast(%(since)s as text) as timestamptz), clock_timestamp() - cast(cast(%(ago)s as text) as interval))"""

_COUNTS = _ROWS.format(call="tallybook.counts()", order="x.queue, x.task")
_THROUGHPUT = _ROWS.format(call=f"tallybook.throughput({_SPAN})", order="x.queue, x.task")
_TIMINGS = _ROWS.format(call=f"tallybook.timings({_SPAN})", order="x.queue, x.task")
_LEVELS = _ROWS.format(call=f"tallybook.levels({_STEPS}, queue => cast(%(queue)s as text))", order="x.begins")
_COMPLETED = _ROWS.format(
    call="tallybook.completed_since(since => cast(cast(%(since)s as text) as timestamptz))", order="x.queue, x.task"
)
_VERIFY = _ROWS.format(call="tallybook.verify()", order="x.queue, x.task, x.what")
_RECOUNT = "select tallybook.recount()"
_EVENT = (
    "select 0 from tallybook.count_event(name => cast(%(name)s as text), n => cast(cast(%(n)s as text) as int)) as done"
)
_EVENTS = _ROWS.format(call="tallybook.event_counts()", order="x.name")
_EVENT_SERIES = _ROWS.format(call=f"tallybook.event_series(name => cast(%(name)s as text), {_STEPS})", order="x.begins")
_KEEP = """\
select tallybook.series_keep(step => cast(cast(%(step)s as text) as int), keep => cast(cast(%(keep)s as text) as interval))"""


def counts() -> Call[list[Counts]]:
    """Every queue and task that was ever used."""
    return Call("counts", _COUNTS, {}, _rows(lambda row: Counts(**row)))


def throughput(span: timedelta | str) -> Call[list[Throughput]]:
    """What came and ended in the last span."""
    read = _rows(lambda row: Throughput(**{**row, "since": instant(row["since"])}))
    return Call("throughput", _THROUGHPUT, {"span": _duration("span", span)}, read)


def timings(span: timedelta | str) -> Call[list[Timings]]:
    """Percentiles of what completed in the last span."""
    return Call("timings", _TIMINGS, {"span": _duration("span", span)}, _rows(lambda row: Timings(**row)))


def levels(step: timedelta | str, since: Since | None, queue: str | None) -> Call[list[Level]]:
    """The counters as a time series, oldest first."""
    if queue is not None:
        check_name("queue", queue, 64)
    read = _rows(lambda row: Level(**{**row, "begins": instant(row["begins"])}))
    return Call("levels", _LEVELS, {**_steps(step, since), "queue": queue}, read)


def completed_since(since: datetime) -> Call[dict[tuple[str, str], int]]:
    """How many have completed since then, by queue and task."""
    params = {"since": _instant("since", since)}
    return Call("completed_since", _COMPLETED, params, lambda text: {
        (row["queue"], row["task"]): int(row["completed"]) for row in loads(text)})  # fmt: skip


def verify() -> Call[list[Difference]]:
    """Where a recount differs; empty: nowhere."""
    return Call("verify", _VERIFY, {}, _rows(lambda row: Difference(**row)))


def recount() -> Call[int]:
    """How many sums there are."""
    return Call("recount", _RECOUNT, {}, int)


def count_event(name: str, n: int) -> Call[None]:
    """Count something of the user's own."""
    check_name("name", name, 200)
    if isinstance(n, bool) or not isinstance(n, int) or not -(1 << 31) <= n < 1 << 31 or n == 0:
        raise InvalidArgument(f"n is a whole number other than 0 of at most 31 bits, not {n!r}")
    return Call("count_event", _EVENT, {"name": name, "n": str(n)}, lambda _: None)


def event_counts() -> Call[dict[str, int]]:
    """How often each event was counted."""
    return Call("event_counts", _EVENTS, {}, lambda text: {row["name"]: int(row["n"]) for row in loads(text)})


def event_series(name: str, step: timedelta | str, since: Since | None) -> Call[list[tuple[datetime, int]]]:
    """How often an event was counted, per step of time in which it was."""
    check_name("name", name, 200)
    params = {"name": name, **_steps(step, since)}
    return Call("event_series", _EVENT_SERIES, params, _rows(lambda row: (_at(row["begins"]), int(row["n"]))))


def series_keep(step: int, keep: timedelta | str) -> Call[bool]:
    """How long steps of this length are kept; False: it was so already."""
    if isinstance(step, bool) or not isinstance(step, int):
        raise InvalidArgument(f"a step is a number of seconds, not of type {type(step).__name__}")
    return Call("series_keep", _KEEP, {"step": str(step), "keep": _duration("keep", keep)}, bool)


def _rows(read: Callable[[dict[str, Any]], T]) -> Callable[[str], list[T]]:
    return lambda text: [read(row) for row in loads(text)]


def _at(text: str) -> datetime:
    found = instant(text)
    assert found is not None
    return found


def _steps(step: timedelta | str, since: Since | None) -> dict[str, str | None]:
    at = _instant("since", since) if isinstance(since, datetime) else None
    ago = None if since is None or isinstance(since, datetime) else _duration("since", since)
    return {"step": _duration("step", step), "since": at, "ago": ago}


def _duration(option: str, value: timedelta | str) -> str:
    return format_duration(parse_duration(value, option=option))


def _instant(option: str, value: datetime) -> str:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidArgument(f"{option} is a datetime with its zone, not {value!r}")
    return value.astimezone(UTC).isoformat()
