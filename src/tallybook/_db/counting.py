"""The verbs over the counters, as pure values."""

from datetime import datetime, timedelta

from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.texts import at, duration, loads, records, utc
from tallybook._model.counting import Counts, Difference, Level, Throughput, Timings
from tallybook._model.options import check_name
from tallybook.errors import InvalidArgument

Since = datetime | timedelta | str

counts = Simple("""
  counts()
  -> rows (queue task text,
           scheduled retrying waiting available running dead completed failed snoozed cancelled lost moved died bigint)
     order by r.queue, r.task""", records(Counts))  # fmt: skip
throughput = Simple("""
  throughput(span interval)
  -> rows (queue task text, since timestamptz, came completed failed died cancelled bigint,
           came_per_s completed_per_s failed_per_s float8)
     order by r.queue, r.task""", records(Throughput))  # fmt: skip
timings = Simple("""
  timings(span interval)
  -> rows (queue task text, jobs bigint, waited_p50 waited_p95 waited_p99 took_p50 took_p95 took_p99 float8)
     order by r.queue, r.task""", records(Timings))  # fmt: skip
_SINCE = "coalesce({since}, clock_timestamp() - {ago:interval})"
_LEVELS = Declared("""
  levels(step interval, since timestamptz, queue text)
  -> rows (begins timestamptz, scheduled retrying waiting open dead completed failed cancelled died bigint)
     order by r.begins""", since=_SINCE)  # fmt: skip
COMPLETED = Declared("""
  completed_since(since timestamptz) -> rows (queue text, task text, completed bigint) order by r.queue, r.task""")
verify = Simple("""
  verify() -> rows (queue task what text, counted found bigint)
     order by r.queue, r.task, r.what""", records(Difference))  # fmt: skip
recount = Simple("recount() -> bigint", int)
_EVENT = Declared("count_event(name text, n int) -> void")
_EVENT_SET = Declared("event_set(name text, n bigint) -> bigint")
event_counts = Simple(
    "event_counts() -> rows (name text, n bigint) order by r.name",
    lambda text: {str(row["name"]): int(row["n"]) for row in loads(text)},
)
_EVENT_SERIES = Declared("""
  event_series(name text, step interval, since timestamptz)
  -> rows (begins timestamptz, n bigint) order by r.begins""", since=_SINCE)  # fmt: skip
_KEEP = Declared("series_keep(step int, keep interval) -> boolean")


def levels(step: timedelta | str, since: Since | None, queue: str | None) -> Call[list[Level]]:
    if queue is not None:
        check_name("queue", queue, 64)
    return _LEVELS.call(records(Level), **_steps(step, since), queue=queue)


def completed_since(since: datetime) -> Call[dict[tuple[str, str], int]]:
    return COMPLETED.call(
        lambda text: {(row["queue"], row["task"]): int(row["completed"]) for row in loads(text)},
        since=_instant("since", since),
    )


def count_event(name: str, n: int) -> Call[None]:
    check_name("name", name, 200)
    if isinstance(n, bool) or not isinstance(n, int) or not -(1 << 31) <= n < 1 << 31 or n == 0:
        raise InvalidArgument(f"n must be a whole number other than 0 of at most 31 bits, not {n!r}")
    return _EVENT.call(lambda _: None, name=name, n=n)


def event_set(name: str, n: int) -> Call[int]:
    check_name("name", name, 200)
    if isinstance(n, bool) or not isinstance(n, int) or not -(1 << 63) <= n < 1 << 63:
        raise InvalidArgument(f"n must be a whole number of at most 63 bits, not {n!r}")
    return _EVENT_SET.call(int, name=name, n=n)


def event_series(name: str, step: timedelta | str, since: Since | None) -> Call[list[tuple[datetime, int]]]:
    check_name("name", name, 200)
    return _EVENT_SERIES.call(
        lambda text: [(at(row["begins"]), int(row["n"])) for row in loads(text)], name=name, **_steps(step, since)
    )


def series_keep(step: int, keep: timedelta | str) -> Call[bool]:
    if isinstance(step, bool) or not isinstance(step, int):
        raise InvalidArgument(f"a step must be a number of seconds, not of type {type(step).__name__}")
    return _KEEP.call(bool, step=step, keep=duration("keep", keep))


def _steps(step: timedelta | str, since: Since | None) -> dict[str, str | None]:
    at = _instant("since", since) if isinstance(since, datetime) else None
    ago = None if isinstance(since, datetime) else duration("since", since)
    return {"step": duration("step", step), "since": at, "ago": ago}


def _instant(option: str, value: datetime) -> str | None:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidArgument(f"{option} must be a datetime with a zone, not {value!r}")
    return utc(value)
