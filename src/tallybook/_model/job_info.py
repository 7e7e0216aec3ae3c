"""What verbs return about stored jobs: JobInfo from the view tallybook.job, and the results of bulk verbs.

No program needs them to enqueue, so they are imported at the first verb that returns one.
"""

from __future__ import annotations

from dataclasses import dataclass
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
