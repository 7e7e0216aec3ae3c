"""Queues as things: settings, what a truncate did, the next jobs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueInfo:
    """A queue and its settings, as the view tallybook.queues shows it. Instants are aware, in UTC."""

    name: str
    retention: str = "default"
    """brief, default or long: how long ended jobs stay on view."""
    max_attempts: int | None = None
    """How many failures end a job where neither it nor its task says so; None: 5."""
    notify: bool = False
    """Whether its jobs' transitions are published on the channel tallybook_jobs."""
    paused_at: datetime | None = None
    paused_by: str | None = None
    created_at: datetime | None = None
    """None: it has no settings, but has seen jobs."""
    changed_at: datetime | None = None
    changed_by: str | None = None
    error_retention: timedelta | None = None
    """How long the error log shows its failures; None: as long as the history of its jobs."""
    metrics_retention: timedelta | None = None
    """How long its series of counters is kept; None: as long as all series."""
    own_names: bool = False
    """Whether the names of its subjects are its own."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """What a truncate has done."""

    cancelled: int
    """Jobs that will not start."""
    cancelling: int
    """Jobs that run and were told."""
    busy: bool
    """Whether some were left that another transaction, which is still open, has locked."""


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
    """Pass it as `after` to read on behind this job."""
