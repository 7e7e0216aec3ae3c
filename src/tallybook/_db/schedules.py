"""The verbs of schedules as pure values, and their results."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from tallybook._db.calls import ME
from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.texts import at, known, loads, record, records
from tallybook._model.job import JobCall
from tallybook._model.options import check_name, whole
from tallybook._model.schedule import Timing, rule_text
from tallybook.errors import ConfigError, UnknownSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """One schedule as stored. All datetimes are aware, in UTC."""

    name: str
    source: str
    """code or database."""
    app: str | None
    """The app that declares it in code."""
    task: str
    queue: str
    args: dict[str, Any]
    priority: int
    max_attempts: int | None
    headers: dict[str, Any] | None
    cron: str | None
    every: timedelta | None
    tz: str
    query: str | None
    jitter: timedelta
    missed: str
    """once, skip or all."""
    catch_up: int
    overlap: bool
    paused_at: datetime | None
    paused_by: str | None
    since: datetime
    """Ticks after this instant count."""
    tick: datetime | None
    """The next tick; None while it is paused, or until a worker has computed it."""
    due_at: datetime | None
    """When that tick fires: the tick and its jitter."""
    last_job_id: int | None
    fired_count: int
    skipped_count: int
    missed_count: int
    failed_count: int
    problem: str | None
    """Why no worker can compute its ticks."""
    last_tick: datetime | None = None
    """The tick that was handled last, and its result: enqueued, skipped, missed or failed."""
    last_what: str | None = None

    @property
    def rule(self) -> str:
        """The rule for people: "*/5 * * * * Europe/Berlin", "every 5 min"."""
        return rule_text(self.cron, self.every, self.tz)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fire:
    """The result of one tick."""

    tick: datetime
    fired_at: datetime
    what: str
    """enqueued, skipped, missed or failed."""
    reason: str | None
    """overlap for a skipped tick, late for a missed tick that was fired nevertheless, the error for a failed one."""
    job_id: int | None
    jobs: int | None
    """The number of enqueued jobs; a query-driven schedule may enqueue any number."""
    ticks: int | None
    """For missed ticks: the number that this row represents, from its tick on; 1000 means 1000 or more."""
    job_state: str | None
    """The state of its job now."""


@dataclass(frozen=True, slots=True)
class Fired:
    """The result of `app.schedules.run`."""

    what: str
    """enqueued; skipped, because the job of the last fire is open or its query runs now; or failed."""
    reason: str | None
    job_id: int | None
    jobs: int | None
    tick: datetime


_SET = Declared("""
  schedule_set(name text, task text, args jsonb, cron text, every interval, tz text, queue text, priority int,
               max_attempts int, jitter interval, missed text, catch_up int, overlap boolean, headers jsonb,
               options jsonb, query text)
  -> text""", unknown=UnknownSchedule)  # fmt: skip
_NAMES = {"name": ("schedule", 200)}
drop = Simple("schedule_drop(name text) -> boolean", bool, names=_NAMES)
pause = Simple("schedule_pause(name text, who text) -> boolean", bool, names=_NAMES, unknown=UnknownSchedule, who=ME)
resume = Simple("schedule_resume(name text) -> boolean", bool, names=_NAMES, unknown=UnknownSchedule)
run = Simple(
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


def definition(name: str, job: JobCall, timing: Timing, query: str | None = None) -> dict[str, Any]:
    """Return a schedule in code as the argument of _schedules_register."""
    columns = {**_job(job), **timing.columns(), "name": name, "query": query}
    texts = ("args", "headers", "options")
    return {key: loads(value) if key in texts else value for key, value in columns.items() if value is not None}


def _job(job: JobCall) -> dict[str, Any]:
    options = job.options
    if options.after:
        raise ConfigError("after", list(options.after), "the jobs of a schedule cannot wait for others")
    return {
        "task": job.task, "args": job.args, "queue": options.queue, "priority": options.priority,
        "max_attempts": options.max_attempts, "headers": options.headers, "options": options.options_text,
    }  # fmt: skip


def set_(name: str, job: JobCall, timing: Timing, query: str | None = None) -> Call[str]:
    return _SET.call(str, name=_named(name), query=query, **_job(job), **timing.columns())


listed = Call("schedule_list", _LIST, {}, lambda found: [_info(row)[0] for row in loads(found)])


def show(name: str) -> Call[tuple[ScheduleInfo, datetime]]:
    """Return one schedule, and the server's time. Raises UnknownSchedule if there is none."""
    read = known(partial(UnknownSchedule, name), lambda found: _info(loads(found)))
    return Call("schedule_list", _SHOW, {"name": _named(name)}, read, unknown=UnknownSchedule)


def fires(name: str, most: int) -> Call[list[Fire]]:
    params = {"name": _named(name), "most": str(whole("max_fires", most, 1, 2**31 - 1))}
    return Call("schedule_fires", _FIRES, params, records(Fire))


def _named(name: str) -> str:
    check_name("schedule", name, 200)
    return name


def _info(row: dict[str, Any]) -> tuple[ScheduleInfo, datetime]:
    seconds = {name: row[name] and row[name] / 1_000_000 for name in ("every", "jitter")}
    return record(ScheduleInfo, row | seconds), at(row["now"])
