"""Pages of a list of jobs, and the results of bulk actions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """One job of a list in its present state: JobInfo without its long fields. All datetimes are aware, in UTC."""

    id: int
    queue: str
    task: str
    state: str
    """scheduled, retrying, waiting, available, running, completed, cancelled or dead."""
    priority: int
    attempts: int
    """The number of starts."""
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
    """The position of the list after this job."""


@dataclass(frozen=True, slots=True)
class JobPage:
    """One page of a list of jobs."""

    jobs: list[JobLine]
    next: str | None
    """The `after` of the next page; None: this is the last."""
    looked_to: datetime | None
    """With `next`: the time up to which the list was searched, also if it found fewer jobs than requested."""


@dataclass(frozen=True, slots=True)
class JobDone:
    """The result of a bulk action for one job."""

    job: int
    done: str
    """retried, cancelled, cancelling or dropped; nothing was done: refused, or unknown if there is no such job."""
    detail: str | None
    """The new attempt, or the reason of a refusal."""

    @property
    def changed(self) -> bool:
        """Whether the action changed the job."""
        return self.done not in ("refused", "unknown")
