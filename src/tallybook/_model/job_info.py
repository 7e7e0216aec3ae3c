"""What verbs return about stored jobs: JobInfo from the view tallybook.job, pages of lists, why a job does not run, and
the results of bulk verbs.

No program needs them to enqueue, so they are imported at the first verb that returns one.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """One job as the view tallybook.job shows it, at the moment of the query. All datetimes are aware, in UTC."""

    id: int
    queue: str
    task: str
    state: str
    """scheduled, retrying, waiting, available, running, completed, cancelled or dead."""
    priority: int
    args: dict[str, Any]
    headers: dict[str, Any] | None
    attempt: int
    """The number of its newest attempt, from 1; it never decreases."""
    attempts: int
    """The number of starts."""
    failures: int
    crashes: int
    max_attempts: int | None
    """None: that of its task, else of its queue, else 5."""
    unique_key: str | None
    enqueued_at: datetime
    run_at: datetime | None
    started_at: datetime | None
    """The start of the newest attempt."""
    ended_at: datetime | None
    worker_id: int | None
    worker: str | None
    """The name of the worker that runs it or ran it last."""
    reason: str | None
    """Why it was cancelled or is dead."""
    last_error: str | None
    errors: list[Any] | None
    """Its error history, oldest first."""
    unserved: bool
    """Whether no living worker knows its task."""
    order_key: str | None = None
    expires_at: datetime | None = None
    """No attempt starts after this."""
    summary: str | None = None
    """One line about the job, if its task has a template for it."""
    result: Any = None
    """The result of its handler, as plain JSON values."""
    progress: float | None = None
    """From 0 to 1, as reported by its handler."""
    progress_message: str | None = None
    options: dict[str, Any] | None = None
    """Rarely used settings of this job."""
    subject: str | None = None
    """The name of its subject."""
    links: dict[str, Any] | None = None
    """Your rows that it belongs to: a kind and a key each."""
    updated_at: datetime | None = None
    """The start of its present state."""
    last_attempt_at: datetime | None = None
    """The time of its last start; None: not started yet, or its history was pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A dead job, as `app.dead.list` lists it."""

    job: int
    died_at: datetime
    queue: str
    task: str
    reason: str
    """failed, crashed, expired or killed."""
    failures: int
    crashes: int
    attempt: int
    enqueued_at: datetime
    args: dict[str, Any]
    summary: str | None
    error: dict[str, Any] | None
    """The last error: type, message, traceback and when."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The result of a cancel of many jobs."""

    cancelled: int
    """These do not start any more."""
    cancelling: int
    """These are running, and their workers are asked to stop them."""


@dataclass(frozen=True, slots=True)
class Retried:
    """The result of a retry of many dead letters."""

    retried: int
    refused: int
    """Another live job has their unique key."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason why a job does not run, or how it ended.

    The codes are listed in https://github.com/tallybook/tallybook/blob/main/docs/why.md.
    """

    state: str | None
    """As in JobInfo; None: there is no such job."""
    reason: str
    """A short code, like queue_paused; should_start: nothing blocks it."""
    explanation: str
    """One sentence for people."""
    details: dict[str, Any] = field(default_factory=dict)
    """Instants (ISO 8601), keys, ids, numbers; the code determines which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One event of one job, at an aware instant in UTC."""

    at: datetime
    job: int
    queue: str
    task: str
    attempt: int
    event: str
    """enqueued, scheduled, waiting, started, completed, failed, snoozed, moved, lost, cancelling, cancelled, dead or
    retried."""
    worker: str | None = None
    details: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
