"""app.schedules: the verbs for schedules, and schedules declared in code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.node_source import AtHome
from tallybook._db.texts import at, known, loads, record, records
from tallybook._db.verb import ListOf, Made, Noun, Steps, Verb
from tallybook._model.cron import rule
from tallybook._model.job import JobCall
from tallybook._model.options import check_name, whole
from tallybook._model.schedule import Fire, Fired, ScheduleInfo, Timing, check_query, described
from tallybook._task import BoundTask, Task
from tallybook._task.task import job_of_rows
from tallybook.errors import ConfigError, InvalidArgument, SignatureError, UnknownSchedule

T = TypeVar("T")

_SET = Declared("""
  schedule_set(name text, task text, args jsonb, cron text, every interval, tz text, queue text, priority int,
               max_attempts int, jitter interval, missed text, catch_up int, overlap boolean, headers jsonb,
               options jsonb, query text)
  -> text""", unknown=UnknownSchedule)  # fmt: skip
_WHO = "coalesce({who}, session_user)"
_NAMES = {"name": ("schedule", 200)}
_DROP = Simple("schedule_drop(name text) -> boolean", bool, names=_NAMES)
_PAUSE = Simple("schedule_pause(name text, who text) -> boolean", bool, names=_NAMES, unknown=UnknownSchedule, who=_WHO)
_RESUME = Simple("schedule_resume(name text) -> boolean", bool, names=_NAMES, unknown=UnknownSchedule)
_RUN = Simple(
    "schedule_run(name text) -> row (what reason text, job_id jobs bigint, tick timestamptz)",
    lambda found: record(Fired, loads(found)), names=_NAMES, unknown=UnknownSchedule,
)  # fmt: skip

# Intervals in microseconds, because their format is a setting of the session.
_ROW = """\
select to_jsonb(s) || jsonb_build_object(
  'every', cast(extract(epoch from s.every) * 1000000 as bigint),
  'jitter', cast(extract(epoch from s.jitter) * 1000000 as bigint),
  'last_tick', f.tick, 'last_what', f.what, 'now', clock_timestamp()) as r
  from tallybook.schedules s
  left join lateral (
    select k.tick, k.what from tallybook.fires k where k.schedule = s.name order by k.tick desc limit 1) f on true"""

_LIST = f"select cast(coalesce(json_agg(x.r order by x.r ->> 'name'), '[]') as text) from ({_ROW}) x"  # noqa: S608
_SHOW = f"select cast(x.r as text) from ({_ROW} where s.name = cast(%(name)s as text)) x"  # noqa: S608

_FIRES = """\
select cast(coalesce(json_agg(x order by x.tick desc), '[]') as text) from (
  select f.tick, f.fired_at, f.what, f.reason, f.job_id, f.jobs, f.ticks,
         (select j.state from tallybook.job j where j.id = f.job_id) as job_state
    from tallybook.fires f where f.schedule = cast(%(name)s as text)
   order by f.tick desc limit cast(cast(%(most)s as text) as int)) x"""


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
        return self._verb(Call("schedule_list", _LIST, {}, lambda found: [_info(row)[0] for row in loads(found)]))

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
        return self._verb(set_schedule(name, described(name, scheduled_job(job, query)), timing, query))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a schedule; False: there is none. One in code comes back when a worker of its app starts."""
        return self._verb(_DROP(name))

    def pause(self, name: str, by: str | None = None) -> Verb[bool]:
        """Pause a schedule until `resume`; False: it was paused already. Raises UnknownSchedule."""
        return self._verb(_PAUSE(name, by))

    def resume(self, name: str) -> Verb[bool]:
        """Resume a schedule with its next tick; False: it was not paused. Raises UnknownSchedule."""
        return self._verb(_RESUME(name))

    def run(self, name: str) -> Verb[Fired]:
        """Fire a schedule now, with the same overlap guard and retries as a tick. Raises UnknownSchedule.

        (await app.schedules.run("report-de")).what
        """
        return self._verb(_RUN(name))

    def fires(self, name: str, *, max_fires: int = 20) -> Verb[ListOf[Fire]]:
        """List the results of a schedule's latest ticks, newest first: enqueued, skipped, missed or failed."""
        params = {"name": _named(name), "most": str(whole("max_fires", max_fires, 1, 2**31 - 1))}
        return self._verb(Call("schedule_fires", _FIRES, params, records(Fire)))

    def next(self, name: str, n: int = 5) -> Verb[ListOf[datetime]]:
        """Return the next `n` ticks of a schedule, in UTC, as if it were not paused. Raises UnknownSchedule."""
        return self._verb(partial(_next, name, n), "schedules.next")


def definition(name: str, job: JobCall, timing: Timing, query: str | None = None) -> dict[str, Any]:
    """Return a schedule in code as the argument of _schedules_register."""
    columns = {**_columns(job), **timing.columns(), "name": name, "query": query}
    texts = ("args", "headers", "options")
    return {key: loads(value) if key in texts else value for key, value in columns.items() if value is not None}


def _columns(job: JobCall) -> dict[str, Any]:
    options = job.options
    if options.after:
        raise ConfigError("after", list(options.after), "the jobs of a schedule cannot wait for others")
    return {
        "task": job.task, "args": job.args, "queue": options.queue, "priority": options.priority,
        "max_attempts": options.max_attempts, "headers": options.headers, "options": options.options_text,
    }  # fmt: skip


def set_schedule(name: str, job: JobCall, timing: Timing, query: str | None = None) -> Call[str]:
    return _SET.call(str, name=_named(name), query=query, **_columns(job), **timing.columns())


def get_schedule(name: str) -> Call[tuple[ScheduleInfo, datetime]]:
    """Return one schedule, and the server's time. Raises UnknownSchedule if there is none."""
    read = known(partial(UnknownSchedule, name), lambda found: _info(loads(found)))
    return Call("schedule_list", _SHOW, {"name": _named(name)}, read, unknown=UnknownSchedule)


def _named(name: str) -> str:
    check_name("schedule", name, 200)
    return name


def _info(row: dict[str, Any]) -> tuple[ScheduleInfo, datetime]:
    seconds = {name: row[name] and row[name] / 1_000_000 for name in ("every", "jitter")}
    return record(ScheduleInfo, row | seconds), at(row["now"])


def _next(name: str, n: int) -> Steps[list[datetime]]:
    found, now = yield get_schedule(name)
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
