"""A list of jobs, page by page, and what was done to many of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """One job of a list, in its present state; as JobInfo has it, without what can be long. All instants are aware, in UTC."""

    id: int
    queue: str
    task: str
    state: str
    """scheduled, retrying, waiting, available, running, completed, cancelled or dead."""
    priority: int
    attempts: int
    """How often it was started."""
    failures: int
    max_attempts: int | None
    enqueued_at: datetime
    run_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    worker: str | None
    summary: str | None
    reason: str | None
    """Why it waits, was cancelled or is dead."""
    last_error: str | None
    subject: str | None
    unique_key: str | None
    progress: float | None
    cursor: str
    """Where the list goes on behind this job."""


@dataclass(frozen=True, slots=True)
class JobPage:
    """One page of a list of jobs."""

    jobs: list[JobLine]
    next: str | None
    """The `after` of the page behind this one; None: this is the last."""
    looked_to: datetime | None
    """With `next`: up to which time has been looked, also where that brought fewer jobs than were asked for."""


@dataclass(frozen=True, slots=True)
class JobDone:
    """What became of one of the jobs to which something was to be done."""

    job: int
    done: str
    """retried, cancelled, cancelling or dropped; refused, or unknown where there is no such job: nothing was done."""
    detail: str | None
    """The new attempt, or why nothing was done."""

    @property
    def changed(self) -> bool:
        """Whether something was done to it."""
        return self.done not in ("refused", "unknown")
