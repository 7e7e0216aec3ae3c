"""app.counts and app.events: the exact counters, their time series, and custom events."""

from datetime import datetime, timedelta

from tallybook._db import counting
from tallybook._db.counting import Since
from tallybook._db.verb import ListOf, Noun, Verb
from tallybook._model.counting import Counts as CountsRow
from tallybook._model.counting import Difference, Level, Throughput, Timings


class Counts(Noun):
    """Counts, throughput and timings of jobs."""

    def list(self) -> Verb[ListOf[CountsRow]]:
        """Count the jobs by state, queue and task, as they are now, at the same cost at any size.

        Numbers per queue are exact. Numbers per task are exact, too, except in a queue of several tasks with more than
        2,000 available jobs: there a long-running job can be counted as running under another task.

        waiting = sum(counts.available for counts in await app.counts.list() if counts.queue == "mail")
        """
        return self._verb(counting.counts())

    def throughput(self, span: timedelta | str = "1 min") -> Verb[ListOf[Throughput]]:
        """Return how many jobs were enqueued and ended in the last `span`, per queue and task.

        It lags by about a second.

        for one in await app.counts.throughput("5 min"): print(one.task, one.completed_per_s)
        """
        return self._verb(counting.throughput(span))

    def timings(self, span: timedelta | str = "15 min") -> Verb[ListOf[Timings]]:
        """Return percentiles of waiting time and duration, per queue and task, of jobs completed in the last `span`.

        for timings in await app.counts.timings(): print(timings.task, timings.waited_p95, timings.took_p95)
        """
        return self._verb(counting.timings(span))

    def levels(
        self, *, step: timedelta | str = "1 min", since: Since | None = None, queue: str | None = None
    ) -> Verb[ListOf[Level]]:
        """Return the counters as a time series, oldest step first, of all queues or of one.

        `step` is a number of whole minutes. `since` is a time, or a duration before now; by default 60 steps.

            for level in await app.counts.levels(step="5 min", since="1 day", queue="mail"): ...
        """
        return self._verb(counting.levels(step, since, queue))

    def completed_since(self, since: datetime) -> Verb[dict[tuple[str, str], int]]:
        """Count the jobs completed since then, by (queue, task). Pass midnight for today's jobs.

        today = sum((await app.counts.completed_since(midnight)).values())
        """
        return self._verb(counting.completed_since(since))

    def verify(self) -> Verb[ListOf[Difference]]:
        """Recount everything and return the differences; an empty list: the counters agree. Reads the whole history."""
        return self._verb(counting.verify())

    def recount(self) -> Verb[int]:
        """Recount everything from the ledgers and replace the counters; return the number of sums.

        No job waits for it.
        """
        return self._verb(counting.recount())

    def keep(self, step: int, keep: timedelta | str) -> Verb[bool]:
        """Set the retention of steps of 0 (folds: about a second), 60, 3600 or 86400 seconds in the time series.

        Older ones are summed up to the next longer step; days are deleted. `keep` is 15 min to 100 years. False:
        nothing changed. Raises InvalidArgument for an unknown step or a retention out of range.

            await app.counts.keep(60, "7 days")
        """
        return self._verb(counting.series_keep(step, keep))


class Events(Noun):
    """Custom counters of a program."""

    def count(self, name: str, n: int = 1) -> Verb[None]:
        """Add `n`, negative or positive, to the counter of an event. Concurrent counts do not wait for each other.

        await app.events.count("invoice.sent").on(conn)
        """
        return self._verb(counting.count_event(name, n))

    def set(self, name: str, n: int = 0) -> Verb[int]:
        """Set the counter of an event to `n`, in your transaction; return its old value. An event at 0 is not listed.

        await app.events.set("orders.open", 17).on(conn)
        """
        return self._verb(counting.event_set(name, n))

    def list(self) -> Verb[dict[str, int]]:
        """Return the current counter of each event, without those at 0."""
        return self._verb(counting.event_counts())

    def series(
        self, name: str, *, step: timedelta | str = "1 min", since: Since | None = None
    ) -> Verb[ListOf[tuple[datetime, int]]]:
        """Return the counts of an event per step of time, without empty steps. `step` and `since` as in `levels`."""
        return self._verb(counting.event_series(name, step, since))
