"""Queues: their settings, the result of a truncate, the next jobs."""

from dataclasses import dataclass
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
