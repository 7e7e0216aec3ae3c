"""Queues and their counters, for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueInfo:
    """A queue and its settings, as the view tallybook.queues shows it. Datetimes are aware, in UTC."""

    name: str
    retention: str = "default"
    """brief, default or long: how long ended jobs are kept."""
    max_attempts: int | None = None
    """The number of failures that end a job if neither it nor its task sets one; None: 5."""
    notify: bool = False
    """Whether its jobs' transitions are published on the channel tallybook_jobs."""
    paused_at: datetime | None = None
    paused_by: str | None = None
    created_at: datetime | None = None
    """None: it has no settings, but has had jobs."""
    changed_at: datetime | None = None
    changed_by: str | None = None
    error_retention: timedelta | None = None
    """How long the error log keeps its failures; None: as long as the history of its jobs."""
    metrics_retention: timedelta | None = None
    """How long its series of counters is kept; None: as long as all series."""
    own_names: bool = False
    """Whether its subjects have their own namespace."""
    random_order: bool = False
    """Whether new jobs get a random place among those that wait."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """The result of a truncate."""

    cancelled: int
    """Jobs that do not start any more."""
    cancelling: int
    """Running jobs that were asked to stop."""
    busy: bool
    """Whether some jobs were left because another open transaction has locked them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopJob:
    """One of the next jobs of a queue."""

    position: int
    id: int
    task: str
    state: str
    priority: int
    run_at: datetime
    enqueued_at: datetime
    place: str
    """Pass it as `after` to get the jobs after this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The number of jobs of one task in one queue by state, and the totals of all ends so far."""

    queue: str
    task: str
    scheduled: int
    retrying: int
    """Scheduled again after a failure."""
    waiting: int
    available: int
    running: int
    dead: int
    completed: int
    """This and the following are totals since the start, including pruned jobs."""
    failed: int
    """Attempts that failed and did not end their job. The same holds for snoozed, lost and moved, but lost also counts
    crashes that made the job dead."""
    snoozed: int
    cancelled: int
    lost: int
    moved: int
    died: int

    @property
    def open(self) -> int:
        """The number of jobs that have not ended: all states but dead."""
        return self.scheduled + self.retrying + self.waiting + self.available + self.running


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Jobs that came and ended in a span of time, of one task in one queue, and their rates per second."""

    queue: str
    task: str
    since: datetime
    came: int
    completed: int
    failed: int
    died: int
    cancelled: int
    came_per_s: float
    completed_per_s: float
    failed_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long jobs of one task in one queue waited and ran, in milliseconds: percentiles, at most 19 % too high."""

    queue: str
    task: str
    jobs: int
    waited_p50: float
    """From the time a job could run to its claim."""
    waited_p95: float
    waited_p99: float
    took_p50: float
    """From its claim to its end."""
    took_p95: float
    took_p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One step of time: the number of jobs by state at its end, and of ends in it."""

    begins: datetime
    scheduled: int
    retrying: int
    waiting: int
    open: int
    """Available or running."""
    dead: int
    completed: int
    failed: int
    cancelled: int
    died: int


def added(series: Sequence[Sequence[Level]]) -> list[Level]:
    """Return the sum of the series of several nodes, step by step."""
    if len(series) == 1:
        return list(series[0])
    steps: dict[datetime, Counter[str]] = {}
    for levels in series:
        for one in levels:
            steps.setdefault(one.begins, Counter()).update({name: getattr(one, name) for name in _SUMS})
    return [Level(begins=begins, **{name: sums[name] for name in _SUMS}) for begins, sums in sorted(steps.items())]


_SUMS = tuple(field.name for field in fields(Level) if field.name != "begins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference between a recount and the counters."""

    queue: str | None
    """None, like the task, for a difference over all queues."""
    task: str | None
    """None: the difference is of the whole queue."""
    what: str
    counted: int
    found: int
