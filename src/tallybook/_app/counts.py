"""app.counts and app.events: the exact counters, their time series, and custom events."""

from datetime import datetime, timedelta

from tallybook._db.declared import Declared, Simple
from tallybook._db.numbers import COUNTS
from tallybook._db.texts import at, duration, loads, records, utc
from tallybook._db.verb import ListOf, Noun, Verb
from tallybook._model.counting import Counts as CountsRow
from tallybook._model.counting import Difference, Level, Throughput, Timings
from tallybook._model.options import check_name
from tallybook.errors import InvalidArgument

Since = datetime | timedelta | str
THROUGHPUT = Simple("""
  throughput(span interval)
  -> rows (queue task text, since timestamptz, came completed failed died cancelled bigint,
           came_per_s completed_per_s failed_per_s float8)
     order by r.queue, r.task""", records(Throughput))  # fmt: skip
_TIMINGS = Simple("""
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
_VERIFY = Simple("""
  verify() -> rows (queue task what text, counted found bigint)
     order by r.queue, r.task, r.what""", records(Difference))  # fmt: skip
_RECOUNT = Simple("recount() -> bigint", int)
_EVENT = Declared("count_event(name text, n int) -> void")
_EVENT_SET = Declared("event_set(name text, n bigint) -> bigint")
_EVENT_COUNTS = Simple(
    "event_counts() -> rows (name text, n bigint) order by r.name",
    lambda text: {str(row["name"]): int(row["n"]) for row in loads(text)},
)
_EVENT_SERIES = Declared("""
  event_series(name text, step interval, since timestamptz)
  -> rows (begins timestamptz, n bigint) order by r.begins""", since=_SINCE)  # fmt: skip
_KEEP = Declared("series_keep(step int, keep interval) -> boolean")


def _steps(step: timedelta | str, since: Since | None) -> dict[str, str | None]:
    at = _instant("since", since) if isinstance(since, datetime) else None
    ago = None if isinstance(since, datetime) else duration("since", since)
    return {"step": duration("step", step), "since": at, "ago": ago}


def _instant(option: str, value: datetime) -> str | None:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidArgument(f"{option} must be a datetime with a zone, not {value!r}")
    return utc(value)


class Counts(Noun):
    """Counts, throughput and timings of jobs."""

    def list(self) -> Verb[ListOf[CountsRow]]:
        """Count the jobs by state, queue and task, as they are now, at the same cost at any size.

        Numbers per queue are exact. Numbers per task are exact, too, except in a queue of several tasks with more than
        2,000 available jobs: there a long-running job can be counted as running under another task.

        waiting = sum(counts.available for counts in await app.counts.list() if counts.queue == "mail")
        """
        return self._verb(COUNTS())

    def throughput(self, span: timedelta | str = "1 min") -> Verb[ListOf[Throughput]]:
        """Return how many jobs were enqueued and ended in the last `span`, per queue and task.

        It lags by about a second.

        for one in await app.counts.throughput("5 min"): print(one.task, one.completed_per_s)
        """
        return self._verb(THROUGHPUT(span))

    def timings(self, span: timedelta | str = "15 min") -> Verb[ListOf[Timings]]:
        """Return percentiles of waiting time and duration, per queue and task, of jobs completed in the last `span`.

        for timings in await app.counts.timings(): print(timings.task, timings.waited_p95, timings.took_p95)
        """
        return self._verb(_TIMINGS(span))

    def levels(
        self, *, step: timedelta | str = "1 min", since: Since | None = None, queue: str | None = None
    ) -> Verb[ListOf[Level]]:
        """Return the counters as a time series, oldest step first, of all queues or of one.

        `step` is a number of whole minutes. `since` is a time, or a duration before now; by default 60 steps.

            for level in await app.counts.levels(step="5 min", since="1 day", queue="mail"): ...
        """
        if queue is not None:
            check_name("queue", queue, 64)
        return self._verb(_LEVELS.call(records(Level), **_steps(step, since), queue=queue))

    def completed_since(self, since: datetime) -> Verb[dict[tuple[str, str], int]]:
        """Count the jobs completed since then, by (queue, task). Pass midnight for today's jobs.

        today = sum((await app.counts.completed_since(midnight)).values())
        """
        call = COMPLETED.call(
            lambda text: {(row["queue"], row["task"]): int(row["completed"]) for row in loads(text)},
            since=_instant("since", since),
        )
        return self._verb(call)

    def verify(self) -> Verb[ListOf[Difference]]:
        """Recount everything and return the differences; an empty list: the counters agree. Reads the whole history."""
        return self._verb(_VERIFY())

    def recount(self) -> Verb[int]:
        """Recount everything from the ledgers and replace the counters; return the number of sums.

        No job waits for it.
        """
        return self._verb(_RECOUNT())

    def keep(self, step: int, keep: timedelta | str) -> Verb[bool]:
        """Set the retention of steps of 0 (folds: about a second), 60, 3600 or 86400 seconds in the time series.

        Older ones are summed up to the next longer step; days are deleted. `keep` is 15 min to 100 years. False:
        nothing changed. Raises InvalidArgument for an unknown step or a retention out of range.

            await app.counts.keep(60, "7 days")
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise InvalidArgument(f"a step must be a number of seconds, not of type {type(step).__name__}")
        return self._verb(_KEEP.call(bool, step=step, keep=duration("keep", keep)))


class Events(Noun):
    """Custom counters of a program."""

    def count(self, name: str, n: int = 1) -> Verb[None]:
        """Add `n`, negative or positive, to the counter of an event. Concurrent counts do not wait for each other.

        await app.events.count("invoice.sent").on(conn)
        """
        check_name("name", name, 200)
        if isinstance(n, bool) or not isinstance(n, int) or not -(1 << 31) <= n < 1 << 31 or n == 0:
            raise InvalidArgument(f"n must be a whole number other than 0 of at most 31 bits, not {n!r}")
        return self._verb(_EVENT.call(lambda _: None, name=name, n=n))

    def set(self, name: str, n: int = 0) -> Verb[int]:
        """Set the counter of an event to `n`, in your transaction; return its old value. An event at 0 is not listed.

        await app.events.set("orders.open", 17).on(conn)
        """
        check_name("name", name, 200)
        if isinstance(n, bool) or not isinstance(n, int) or not -(1 << 63) <= n < 1 << 63:
            raise InvalidArgument(f"n must be a whole number of at most 63 bits, not {n!r}")
        return self._verb(_EVENT_SET.call(int, name=name, n=n))

    def list(self) -> Verb[dict[str, int]]:
        """Return the current counter of each event, without those at 0."""
        return self._verb(_EVENT_COUNTS())

    def series(
        self, name: str, *, step: timedelta | str = "1 min", since: Since | None = None
    ) -> Verb[ListOf[tuple[datetime, int]]]:
        """Return the counts of an event per step of time, without empty steps. `step` and `since` as in `levels`."""
        check_name("name", name, 200)
        call = _EVENT_SERIES.call(
            lambda text: [(at(row["begins"]), int(row["n"])) for row in loads(text)], name=name, **_steps(step, since)
        )
        return self._verb(call)
