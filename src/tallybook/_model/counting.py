"""The counters, for programs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime


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
