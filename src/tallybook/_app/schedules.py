"""app.schedules: the verbs for schedules, and schedules declared in code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from tallybook._db import schedules
from tallybook._db.node_source import AtHome
from tallybook._db.schedules import Fire, Fired, ScheduleInfo
from tallybook._db.verb import ListOf, Made, Noun, Steps, Verb
from tallybook._model.cron import rule
from tallybook._model.job import JobCall
from tallybook._model.schedule import Timing, check_query, described
from tallybook._task import BoundTask, Task
from tallybook._task.task import job_of_rows
from tallybook.errors import ConfigError, InvalidArgument, SignatureError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InCode:
    """A schedule declared in code. Its job is described when a worker starts, since that reads annotations."""

    timing: Timing
    job: Callable[[], JobCall]
    query: str | None = None


class Schedules(Noun):
    """The schedules of the app's database, or of its home node. `app.schedule(...)` declares one in code."""

    def _verb(self, made: Made[T], name: str = "") -> Verb[T]:
        return Verb(AtHome(self._app), made, name)

    def list(self) -> Verb[ListOf[ScheduleInfo]]:
        """List all schedules, from code and from the database, by name."""
        return self._verb(schedules.listed)

    def set(
        self,
        name: str,
        job: JobCall | Task[..., Any] | BoundTask[..., Any],
        *,
        cron: str | None = None,
        every: timedelta | str | None = None,
        query: str | None = None,
        tz: str | None = None,
        jitter: timedelta | str | None = None,
        missed: str = "once",
        catch_up: int = 100,
        overlap: bool = False,
    ) -> Verb[str]:
        """Create or change a schedule in the database; return "created", "changed" or "unchanged".

        It replaces the whole schedule: options that you do not pass get their defaults. Options as in `app.schedule`.
        A changed `cron`, `every`, `tz` or `query` applies from now on; a paused schedule stays paused. Raises
        InvalidArgument for a name that is declared in code, and for a query that is not a SELECT of jobs.

            await app.schedules.set("sync-acme", sync.job("acme"), every="10 min")
        """
        timing = Timing.checked(
            cron=cron, every=every, tz=tz, jitter=jitter, missed=missed, catch_up=catch_up, overlap=overlap
        )
        query = None if query is None else check_query(query)
        return self._verb(schedules.set_(name, described(name, scheduled_job(job, query)), timing, query))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a schedule; False: there is none. One in code comes back when a worker of its app starts."""
        return self._verb(schedules.drop(name))

    def pause(self, name: str, by: str | None = None) -> Verb[bool]:
        """Pause a schedule until `resume`; False: it was paused already. Raises UnknownSchedule."""
        return self._verb(schedules.pause(name, by))

    def resume(self, name: str) -> Verb[bool]:
        """Resume a schedule with its next tick; False: it was not paused. Raises UnknownSchedule."""
        return self._verb(schedules.resume(name))

    def run(self, name: str) -> Verb[Fired]:
        """Fire a schedule now, with the same overlap guard and retries as a tick. Raises UnknownSchedule.

        (await app.schedules.run("report-de")).what
        """
        return self._verb(schedules.run(name))

    def fires(self, name: str, *, max_fires: int = 20) -> Verb[ListOf[Fire]]:
        """List the results of a schedule's latest ticks, newest first: enqueued, skipped, missed or failed."""
        return self._verb(schedules.fires(name, max_fires))

    def next(self, name: str, n: int = 5) -> Verb[ListOf[datetime]]:
        """Return the next `n` ticks of a schedule, in UTC, as if it were not paused. Raises UnknownSchedule."""
        return self._verb(partial(_next, name, n), "schedules.next")


def _next(name: str, n: int) -> Steps[list[datetime]]:
    found, now = yield schedules.show(name)
    return preview(found, now, n)


def declared_task(task: Task[..., Any], timing: Timing) -> InCode:
    """Build the schedule of `@app.task(schedule=...)`."""

    def job() -> JobCall:
        try:
            return described(task.name, task.job())
        except SignatureError as error:
            hint = f"Declare it by app.schedule({task.name!r}, {task.fn.__name__}.job(...), cron=...)"
            reason = f"its job would have no args, and {error.reason}"
            raise ConfigError(f"schedule of task {task.name!r}", timing.cron, reason, hint=hint) from None

    return InCode(timing, job)


def scheduled_job(job: JobCall | Task[..., Any] | BoundTask[..., Any], query: str | None) -> JobCall:
    """Describe the job of a schedule, or of the rows of its query. Raises InvalidArgument."""
    if query is None:
        if not isinstance(job, JobCall):
            raise InvalidArgument(f"a {type(job).__name__} is not a job", hint="Describe it by task.job(...)")
        return job
    if not isinstance(job, BoundTask):
        hint = "Give the task, or task.with_(...): the rows of the query have the args"
        raise InvalidArgument(f"a {type(job).__name__} is not a task", hint=hint)
    return job_of_rows(job)


def preview(found: ScheduleInfo, now: datetime, n: int) -> list[datetime]:
    """Return its next `n` ticks after `now`."""
    ticks = rule(found.cron, found.every, found.tz)
    first = found.tick if found.tick is not None and found.tick > now else ticks.after(now)
    return [] if first is None else list(islice(chain([first], ticks.following(first)), max(0, n)))
