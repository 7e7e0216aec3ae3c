"""The verbs of an App over the counters; a mixin of App like _operations."""

from __future__ import annotations

from datetime import datetime, timedelta

from tallybook._db import counting
from tallybook._db.counting import Since
from tallybook._model.counting import Counts, Difference, Level, Throughput, Timings
from tallybook._run import run, run_sync

__all__ = ["Counting"]


class Counting:
    """Mixed into App."""

    async def counts(self, conn: object) -> list[Counts]:
        """How many jobs are in which state, per queue and task: exact, of this moment, at the same cost at any size.

        waiting = sum(counts.available for counts in await app.counts(conn) if counts.queue == "mail")
        """
        return await run(conn, counting.counts())

    def counts_sync(self, conn: object) -> list[Counts]:
        """How many jobs are in which state; counts without an event loop."""
        return run_sync(conn, counting.counts())

    async def throughput(self, conn: object, span: timedelta | str = "1 min") -> list[Throughput]:
        """How much came and ended in the last `span`, per queue and task, up to the last fold, about a second ago.

        for one in await app.throughput(conn, "5 min"): print(one.task, one.completed_per_s)
        """
        return await run(conn, counting.throughput(span))

    def throughput_sync(self, conn: object, span: timedelta | str = "1 min") -> list[Throughput]:
        """How much came and ended in the last `span`; throughput without an event loop."""
        return run_sync(conn, counting.throughput(span))

    async def timings(self, conn: object, span: timedelta | str = "15 min") -> list[Timings]:
        """How long the jobs that completed in the last `span` waited and took, per queue and task, as percentiles.

        for timings in await app.timings(conn): print(timings.task, timings.waited_p95, timings.took_p95)
        """
        return await run(conn, counting.timings(span))

    def timings_sync(self, conn: object, span: timedelta | str = "15 min") -> list[Timings]:
        """How long jobs waited and took; timings without an event loop."""
        return run_sync(conn, counting.timings(span))

    async def levels(
        self, conn: object, *, step: timedelta | str = "1 min", since: Since | None = None, queue: str | None = None
    ) -> list[Level]:
        """The counters as a time series, oldest step first, of all queues or of one.

        `step` is of whole minutes; `since` is an instant, or how long ago; 60 steps ago unless it is given.

            for level in await app.levels(conn, step="5 min", since="1 day", queue="mail"): ...
        """
        return await run(conn, counting.levels(step, since, queue))

    def levels_sync(
        self, conn: object, *, step: timedelta | str = "1 min", since: Since | None = None, queue: str | None = None
    ) -> list[Level]:
        """The counters as a time series; levels without an event loop."""
        return run_sync(conn, counting.levels(step, since, queue))

    async def completed_since(self, conn: object, since: datetime) -> dict[tuple[str, str], int]:
        """How many jobs have completed since then, by (queue, task): with midnight, today's.

        today = sum((await app.completed_since(conn, midnight)).values())
        """
        return await run(conn, counting.completed_since(since))

    def completed_since_sync(self, conn: object, since: datetime) -> dict[tuple[str, str], int]:
        """How many jobs have completed since then; completed_since without an event loop."""
        return run_sync(conn, counting.completed_since(since))

    async def count_event(self, conn: object, name: str, n: int = 1) -> None:
        """Count something of your own, in `conn`'s transaction; a negative `n` takes back. Nobody waits for anybody.

        await app.count_event(conn, "invoice.sent")
        """
        await run(conn, counting.count_event(name, n))

    def count_event_sync(self, conn: object, name: str, n: int = 1) -> None:
        """Count something of your own; count_event without an event loop."""
        run_sync(conn, counting.count_event(name, n))

    async def event_counts(self, conn: object) -> dict[str, int]:
        """How often each of your own events was counted, to this moment."""
        return await run(conn, counting.event_counts())

    def event_counts_sync(self, conn: object) -> dict[str, int]:
        """How often each event was counted; event_counts without an event loop."""
        return run_sync(conn, counting.event_counts())

    async def event_series(
        self, conn: object, name: str, *, step: timedelta | str = "1 min", since: Since | None = None
    ) -> list[tuple[datetime, int]]:
        """How often an event was counted per step of time; steps without any are left out. `step`, `since` as in levels."""
        return await run(conn, counting.event_series(name, step, since))

    def event_series_sync(
        self, conn: object, name: str, *, step: timedelta | str = "1 min", since: Since | None = None
    ) -> list[tuple[datetime, int]]:
        """How often an event was counted per step of time; event_series without an event loop."""
        return run_sync(conn, counting.event_series(name, step, since))

    async def verify(self, conn: object) -> list[Difference]:
        """Recount everything, and say where the counters differ; an empty list: they agree. It reads all that is kept."""
        return await run(conn, counting.verify())

    def verify_sync(self, conn: object) -> list[Difference]:
        """Recount everything, and say where the counters differ; verify without an event loop."""
        return run_sync(conn, counting.verify())

    async def recount(self, conn: object) -> int:
        """Count everything anew from the ledgers and go on from there; how many sums there are. Nobody waits for it."""
        return await run(conn, counting.recount())

    def recount_sync(self, conn: object) -> int:
        """Count everything anew; recount without an event loop."""
        return run_sync(conn, counting.recount())

    async def series_keep(self, conn: object, step: int, keep: timedelta | str) -> bool:
        """How long the time series keeps its steps of 0 (folds: about a second), 60, 3600 or 86400 seconds.

        Older ones are summed up to the next step.

        False: it was so already. InvalidArgument: there is no such step, or it cannot be kept for so long.

            await app.series_keep(conn, 60, "7 days")
        """
        return await run(conn, counting.series_keep(step, keep))

    def series_keep_sync(self, conn: object, step: int, keep: timedelta | str) -> bool:
        """How long the time series keeps its steps; series_keep without an event loop."""
        return run_sync(conn, counting.series_keep(step, keep))
