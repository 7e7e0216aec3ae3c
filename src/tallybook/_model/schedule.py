"""Schedules as pure values: their ticks, and a worker's decision about a schedule that is due."""

import hashlib
from collections import deque
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from typing import Any, Self

from tallybook._model.cron import Cron, Every, Rule
from tallybook._model.durations import format_duration, parse_duration, seconds_text
from tallybook._model.job import JobCall
from tallybook._model.options import whole
from tallybook.errors import ConfigError

LATE = timedelta(seconds=60)  # a tick that is found later than this was missed

MISSED = ("once", "skip", "all")
_MOST_COUNTED = 1000
_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a schedule ticks, and what happens to missed or overlapping ticks. Raises ConfigError for a wrong value."""

    cron: str | None
    every: timedelta | None
    tz: str
    jitter: timedelta
    missed: str
    catch_up: int
    overlap: bool

    @classmethod
    def checked(
        cls,
        *,
        cron: str | None = None,
        every: timedelta | str | None = None,
        tz: str | None = None,
        jitter: timedelta | str | None = None,
        missed: str = "once",
        catch_up: int = 100,
        overlap: bool = False,
        option: str = "cron",
    ) -> Self:
        """Return the timing from people's input. Errors name the expression or the interval as `option`."""
        if (cron is None) == (every is None):
            raise ConfigError(option, cron, "pass either cron or every", hint="Write cron='*/5 * * * *'")
        if every is not None:
            every = parse_duration(every, option="every" if option == "cron" else option)
            Every(every, option="every" if option == "cron" else option)
            if tz is not None:
                raise ConfigError("tz", tz, "an interval has no time zone", hint="Leave it out, or pass cron instead")
        else:
            Cron(cron or "", "UTC" if tz is None else tz, option=option)
        length = timedelta(0) if jitter is None else parse_duration(jitter, option="jitter")
        if length > timedelta(days=1):
            raise ConfigError("jitter", jitter, "must be from 0 to 1 day")
        if missed not in MISSED:
            raise ConfigError("missed", missed, f"must be one of {', '.join(MISSED)}")
        whole("catch_up", catch_up, 1, 1000)
        if not isinstance(overlap, bool):
            raise ConfigError("overlap", overlap, "must be True or False")
        return cls(
            cron=None if cron is None else " ".join(cron.split()), every=every, tz=tz or "UTC", jitter=length,
            missed=missed, catch_up=catch_up, overlap=overlap,
        )  # fmt: skip

    def columns(self) -> dict[str, Any]:
        """Return the timing as columns of the table."""
        every = None if self.every is None else seconds_text(self.every)
        return asdict(self) | {"every": every, "jitter": seconds_text(self.jitter)}


def described(name: str, call: JobCall) -> JobCall:
    """Return the job of a schedule. Raises ConfigError for options that such a job cannot have."""
    options = call.options
    if call.unique_key is not None:
        reason = f"the job of schedule {name!r} cannot have a unique key"
        hint = "A tick is skipped anyway while the previous tick's job is open; write task.with_(unique=False).job(...)"
        raise ConfigError("unique", call.unique_key, reason, hint=hint)
    for option in ("run_at", "delay", "order_key", "expires_at"):
        if (value := getattr(options, option)) is not None:
            raise ConfigError(option, value, f"schedule {name!r} enqueues its job at its tick", hint="Leave it out")
    return call


def check_query(query: object) -> str:
    """Return the text of a query-driven schedule. Raises ConfigError for another value; the server checks the SQL."""
    if not isinstance(query, str) or not query.strip() or "\0" in query:
        raise ConfigError("query", query, "not a SQL text", hint="Write one SELECT with a column args, and mostly key")
    return query.strip()


def rule_text(cron: str | None, every: timedelta | None, tz: str) -> str:
    """Return the rule for people: "*/5 * * * * Europe/Berlin", "every 5 min"."""
    if every is not None:
        return f"every {format_duration(every)}"
    return f"{cron}" if tz == "UTC" else f"{cron} {tz}"


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


def due(name: str, ticks: Rule, tick: datetime, jitter: timedelta) -> datetime:
    """Return when a tick fires: up to `jitter` later, by a hash of name and tick, but never after the next tick."""
    if not jitter:
        return tick
    following = ticks.after(tick) or _NEVER
    word = hashlib.sha256(f"{name} {tick.astimezone(UTC).isoformat()}".encode()).digest()
    share = int.from_bytes(word[:6], "big") / (1 << 48)
    return tick + timedelta(milliseconds=int(min(jitter, following - tick) / timedelta(milliseconds=1) * share))


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions for one schedule that is due."""

    ticks: list[datetime]  # fire these: they are not late
    late: list[datetime] = field(default_factory=list)  # fire these although they were missed
    missed_from: datetime | None = None
    """The first missed tick that is not fired, and the number of them; 1000 means 1000 or more."""
    missed_ticks: int = 0
    next: datetime | None = None
    due: datetime | None = None

    def columns(self) -> dict[str, Any]:
        """Return the plan as the argument of _schedules_fire."""
        return {
            "ticks": [tick.isoformat() for tick in self.ticks],
            "late": [tick.isoformat() for tick in self.late],
            "missed_from": self.missed_from and self.missed_from.isoformat(),
            "missed_ticks": self.missed_ticks or None,
            "next": self.next and self.next.isoformat(),
            "due": self.due and self.due.isoformat(),
        }


def plan(
    name: str, ticks: Rule, tick: datetime | None, at: datetime, *, jitter: timedelta, missed: str, catch_up: int
) -> Plan:
    """Return the actions due at `at`, where `tick` is the stored next tick (None: the rule has none)."""
    fired_at = partial(due, name, ticks, jitter=jitter)
    if tick is None:
        return Plan([])
    late: list[datetime] = []
    missed_from, missed_ticks = None, 0
    upcoming: datetime | None = tick
    bound = at - LATE
    if fired_at(tick) < bound:
        last = ticks.last(tick, bound)
        if fired_at(last) >= bound:  # its jitter keeps it from being late; the one before it is late
            last = ticks.last(tick, last - timedelta(microseconds=1))
        upcoming = next(iter(ticks.following(last)), None)
        missed_ticks = ticks.count(tick, last, _MOST_COUNTED)
        if missed == "all":
            late = _latest(ticks, tick, last, min(catch_up, missed_ticks), missed_ticks)
        elif missed == "once" and (upcoming is None or fired_at(upcoming) > at):
            late = [last]
        missed_from = tick if missed_ticks > len(late) else None
        missed_ticks = missed_ticks - len(late) if missed_ticks < _MOST_COUNTED else missed_ticks
    on_time: list[datetime] = []
    while upcoming is not None and fired_at(upcoming) <= at:
        on_time.append(upcoming)
        upcoming = next(iter(ticks.following(upcoming)), None)
    missed_ticks = 0 if missed_from is None else missed_ticks
    return Plan(on_time, late, missed_from, missed_ticks, upcoming, None if upcoming is None else fired_at(upcoming))


def _latest(ticks: Rule, first: datetime, last: datetime, most: int, counted: int) -> list[datetime]:
    """Return the latest `most` ticks from `first` to `last`, oldest first."""
    if counted < _MOST_COUNTED:
        return list(deque(chain([first], ticks.until(first, last)), most))
    latest = [last]  # too many to iterate: from the end
    while len(latest) < most:
        latest.append(ticks.last(first, latest[-1] - timedelta(microseconds=1)))
    return latest[::-1]
