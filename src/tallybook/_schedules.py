"""Schedules of an App: those that its code declares, and the verbs that steer any.

The verbs have the names that they have in SQL. Each runs on the caller's connection, in its transaction, or, given the App,
on a connection of the App's own; each has a form without an event loop, `..._sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, islice
from typing import Any

from tallybook._db import schedules
from tallybook._db.schedules import Fire, Fired, ScheduleInfo
from tallybook._model.cron import rule
from tallybook._model.job import JobCall
from tallybook._model.options import check_name
from tallybook._model.schedule import Timing, check_query, described
from tallybook._task import BoundTask, Task, run, run_sync
from tallybook.errors import ConfigError, InvalidArgument, SignatureError

__all__ = ["Declared", "Schedules"]


@dataclass(frozen=True, slots=True)
class Declared:
    """A schedule that code declares; its job is described when a worker starts, since that reads annotations."""

    timing: Timing
    job: Callable[[], JobCall]
    query: str | None = None


class Schedules:
    """Mixed into App."""

    name: str
    declared: dict[str, Declared]

    def schedule(
        self,
        name: str,
        job: JobCall | Task[..., Any] | BoundTask[...],
        *,
        cron: str | None = None,
        every: timedelta | str | None = None,
        query: str | None = None,
        tz: str | None = None,
        jitter: timedelta | str | None = None,
        missed: str = "once",
        catch_up: int = 100,
        overlap: bool = False,
    ) -> None:
        """Declare a schedule in code, where a task has several or one with args; `@app.task(schedule=...)` is the short form.

        Workers put it on record when they start, change it where it differs, and remove it when it has left the code.
        `cron` has 5 fields, or 6 with seconds first, names (MON, JAN, @daily) included, in the zone `tz` ("UTC" by default);
        `every` is an interval, whose ticks are the multiples of its length since 1970 (UTC). `jitter` fires each tick up to
        so much later. `missed` says what becomes of ticks that are found more than 60 s late: "once" fires the latest,
        "skip" none, "all" the latest `catch_up` (1 to 1000), one after the other. While the job of a fire has not ended for
        good the next tick is skipped, unless `overlap` is True. Raises ExpressionError and ConfigError.

            app.schedule("report-de", report.job("de"), cron="0 6 * * MON-FRI", tz="Europe/Berlin")

        With a `query` each tick puts in one job for each of its rows, but for those whose key an open job has: one SELECT with a
        column `args` (jsonb), and `key`, `run_at` and `priority` where needed. It is given the task, or `task.with_(...)`,
        instead of a job. Workers run it, with their rights; what it fails with is on record as the fate of the tick.

            app.schedule("stale", refresh.with_(priority=3), query="select id as key, ...", cron="* * * * *")
        """
        if query is not None:
            query = check_query(query)
        job = _job(job, query)
        timing = Timing.checked(
            cron=cron, every=every, tz=tz, jitter=jitter, missed=missed, catch_up=catch_up, overlap=overlap
        )
        described(name, job)
        self._declare_schedule(name, Declared(timing, lambda: job, query))

    def _declare_schedule(self, name: str, declared: Declared) -> None:
        check_name("schedule", name, 200)
        if name in self.declared:
            raise ConfigError("schedule", name, "declared twice", hint="Give one of them another name")
        self.declared[name] = declared

    def _schedule_task(self, task: Task[..., Any], timing: Timing) -> None:
        def job() -> JobCall:
            try:
                return described(task.name, task.job())
            except SignatureError as error:
                hint = f"Declare it by app.schedule({task.name!r}, {task.fn.__name__}.job(...), cron=...)"
                reason = f"its job would have no args, and {error.reason}"
                raise ConfigError(f"schedule of task {task.name!r}", timing.cron, reason, hint=hint) from None

        self._declare_schedule(task.name, Declared(timing, job))

    def declared_schedules(self) -> list[dict[str, Any]]:
        """What each schedule in code is, as workers put it on record. ConfigError for one whose job cannot be described."""
        return [
            schedules.definition(name, found.job(), found.timing, found.query)
            for name, found in sorted(self.declared.items())
        ]

    async def schedule_set(
        self,
        conn: object,
        name: str,
        job: JobCall | Task[..., Any] | BoundTask[...],
        *,
        cron: str | None = None,
        every: timedelta | str | None = None,
        query: str | None = None,
        tz: str | None = None,
        jitter: timedelta | str | None = None,
        missed: str = "once",
        catch_up: int = 100,
        overlap: bool = False,
    ) -> str:
        """Create or change a schedule that lives in the database; "created", "changed" or "unchanged".

        The options are those of `schedule`. A changed `cron`, `every`, `tz` or `query` counts from now on; a pause stays.
        InvalidArgument for a name that is declared in code, and for a query that is no SELECT of jobs.

            await app.schedule_set(conn, "sync-acme", sync.job("acme"), every="10 min")
        """
        timing = Timing.checked(
            cron=cron, every=every, tz=tz, jitter=jitter, missed=missed, catch_up=catch_up, overlap=overlap
        )
        query = None if query is None else check_query(query)
        return await run(conn, schedules.set_(name, described(name, _job(job, query)), timing, query))

    def schedule_set_sync(
        self,
        conn: object,
        name: str,
        job: JobCall | Task[..., Any] | BoundTask[...],
        *,
        query: str | None = None,
        **timing: Any,
    ) -> str:
        """Create or change a schedule that lives in the database; schedule_set without an event loop."""
        query = None if query is None else check_query(query)
        found = described(name, _job(job, query))
        return run_sync(conn, schedules.set_(name, found, Timing.checked(**timing), query))

    async def schedule_drop(self, conn: object, name: str) -> bool:
        """Remove a schedule; False: there is none. One in code comes back when a worker of its app starts."""
        return await run(conn, schedules.drop(name))

    def schedule_drop_sync(self, conn: object, name: str) -> bool:
        """Remove a schedule; schedule_drop without an event loop."""
        return run_sync(conn, schedules.drop(name))

    async def schedule_pause(self, conn: object, name: str, who: str | None = None) -> bool:
        """Fire no more ticks of a schedule until `schedule_resume`; False: it was paused already. UnknownSchedule."""
        return await run(conn, schedules.pause(name, who))

    def schedule_pause_sync(self, conn: object, name: str, who: str | None = None) -> bool:
        """Fire no more ticks of a schedule; schedule_pause without an event loop."""
        return run_sync(conn, schedules.pause(name, who))

    async def schedule_resume(self, conn: object, name: str) -> bool:
        """Fire a schedule's ticks again, from the next one on; False: it was not paused. UnknownSchedule."""
        return await run(conn, schedules.resume(name))

    def schedule_resume_sync(self, conn: object, name: str) -> bool:
        """Fire a schedule's ticks again; schedule_resume without an event loop."""
        return run_sync(conn, schedules.resume(name))

    async def schedule_run(self, conn: object, name: str) -> Fired:
        """Fire a schedule now, in `conn`'s transaction: the same path, guard and retries as at a tick. UnknownSchedule.

        (await app.schedule_run(conn, "report-de")).what
        """
        return await run(conn, schedules.run(name))

    def schedule_run_sync(self, conn: object, name: str) -> Fired:
        """Fire a schedule now; schedule_run without an event loop."""
        return run_sync(conn, schedules.run(name))

    async def schedule_list(self, conn: object) -> list[ScheduleInfo]:
        """List all schedules, of code and of the database, by name."""
        return await run(conn, schedules.listed())

    def schedule_list_sync(self, conn: object) -> list[ScheduleInfo]:
        """List all schedules; schedule_list without an event loop."""
        return run_sync(conn, schedules.listed())

    async def schedule_fires(self, conn: object, name: str, *, max_fires: int = 20) -> list[Fire]:
        """What became of the latest ticks of a schedule, newest first: enqueued, skipped, missed or failed."""
        return await run(conn, schedules.fires(name, max_fires))

    def schedule_fires_sync(self, conn: object, name: str, *, max_fires: int = 20) -> list[Fire]:
        """What became of the latest ticks; schedule_fires without an event loop."""
        return run_sync(conn, schedules.fires(name, max_fires))

    async def schedule_next(self, conn: object, name: str, n: int = 5) -> list[datetime]:
        """The next `n` ticks of a schedule, in UTC, as if it were not paused. UnknownSchedule."""
        return preview(*await run(conn, schedules.show(name)), n)

    def schedule_next_sync(self, conn: object, name: str, n: int = 5) -> list[datetime]:
        """The next `n` ticks of a schedule; schedule_next without an event loop."""
        return preview(*run_sync(conn, schedules.show(name)), n)


def _job(job: JobCall | Task[..., Any] | BoundTask[...], query: str | None) -> JobCall:
    if query is None:
        if not isinstance(job, JobCall):
            raise InvalidArgument(f"a {type(job).__name__} is not a job", hint="Describe it by task.job(...)")
        return job
    if not isinstance(job, Task | BoundTask):
        hint = "Give the task, or task.with_(...): the rows of the query have the args"
        raise InvalidArgument(f"a {type(job).__name__} is not a task", hint=hint)
    return job.job_of_rows()


def preview(found: ScheduleInfo, now: datetime, n: int) -> list[datetime]:
    """Its next `n` ticks after `now`."""
    ticks = rule(found.cron, found.every, found.tz)
    first = found.tick if found.tick is not None and found.tick > now else ticks.after(now)
    return [] if first is None else list(islice(chain([first], ticks.following(first)), max(0, n)))
