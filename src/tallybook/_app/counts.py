"""app.counts and app.events: the exact counters, their series, and events of your own."""

from __future__ import annotations

from datetime import datetime, timedelta

from tallybook._db import counting
from tallybook._db.counting import Since
from tallybook._db.verb import ListOf, Noun, Verb
from tallybook._model.counting import Counts as CountsRow
from tallybook._model.counting import Difference, Level, Throughput, Timings


class Counts(Noun):
    """How many jobs there are, and how they do."""

    def list(self) -> Verb[ListOf[CountsRow]]:
        """How many jobs are in which state, per queue and task: exact, of this moment, at the same cost at any size.

        waiting = sum(counts.available for counts in await app.counts.list() if counts.queue == "mail")
        """
        return self._verb(counting.counts())

    def throughput(self, span: timedelta | str = "1 min") -> Verb[ListOf[Throughput]]:
        """How much came and ended in the last `span`, per queue and task, up to the last fold, about a second ago.

        for one in await app.counts.throughput("5 min"): print(one.task, one.completed_per_s)
        """
        return self._verb(counting.throughput(span))

    def timings(self, span: timedelta | str = "15 min") -> Verb[ListOf[Timings]]:
        """How long the jobs that completed in the last `span` waited and took, per queue and task, as percentiles.

        for timings in await app.counts.timings(): print(timings.task, timings.waited_p95, timings.took_p95)
        """
        return self._verb(counting.timings(span))

    def levels(
        self, *, step: timedelta | str = "1 min", since: Since | None = None, queue: str | None = None
    ) -> Verb[ListOf[Level]]:
        """The counters as a time series, oldest step first, of all queues or of one.

        `step` is of whole minutes; `since` is an instant, or how long ago; 60 steps ago unless it is given.

            for level in await app.counts.levels(step="5 min", since="1 day", queue="mail"): ...
        """
        return self._verb(counting.levels(step, since, queue))

    def completed_since(self, since: datetime) -> Verb[dict[tuple[str, str], int]]:
        """How many jobs have completed since then, by (queue, task): with midnight, today's.

        today = sum((await app.counts.completed_since(midnight)).values())
        """
        return self._verb(counting.completed_since(since))

    def verify(self) -> Verb[ListOf[Difference]]:
        """Recount everything, and say where the counters differ; an empty list: they agree. It reads all that is kept."""
        return self._verb(counting.verify())

    def recount(self) -> Verb[int]:
        """Count everything anew from the ledgers and go on from there; how many sums there are. Nobody waits for it."""
        return self._verb(counting.recount())

    def keep(self, step: int, keep: timedelta | str) -> Verb[bool]:
        """How long the time series keeps its steps of 0 (folds: about a second), 60, 3600 or 86400 seconds.

        Older ones are summed up to the next step.

        False: it was so already. InvalidArgument: there is no such step, or it cannot be kept for so long.

            await app.counts.keep(60, "7 days")
        """
        return self._verb(counting.series_keep(step, keep))


class Events(Noun):
    """What a program counts of its own."""

    def count(self, name: str, n: int = 1) -> Verb[None]:
        """Count something of your own; a negative `n` takes back. Nobody waits for anybody.

        await app.events.count("invoice.sent").on(conn)
        """
        return self._verb(counting.count_event(name, n))

    def set(self, name: str, n: int = 0) -> Verb[int]:
        """Let an event stand at `n`, in your transaction; where it stood. At 0 it is forgotten until it is counted again.

        await app.events.set("orders.open", 17).on(conn)
        """
        return self._verb(counting.event_set(name, n))

    def list(self) -> Verb[dict[str, int]]:
        """How often each of your own events was counted, to this moment; without those that stand at 0."""
        return self._verb(counting.event_counts())

    def series(
        self, name: str, *, step: timedelta | str = "1 min", since: Since | None = None
    ) -> Verb[ListOf[tuple[datetime, int]]]:
        """How often an event was counted per step of time; steps without any are left out. `step`, `since` as in levels."""
        return self._verb(counting.event_series(name, step, since))
