"""A job outside its handler: JobCall before an enqueue, Job after it, JobInfo from the view tallybook.job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic

from tallybook._model.options import Options, text_problem
from tallybook.errors import InvalidArgument, UnknownJob

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class JobCall:
    """A described job that is not enqueued yet, made by `task.job(...)`: checked, encoded, for `app.enqueue_many`."""

    task: str
    """The task's name."""
    args: str
    """As JSON text."""
    unique_key: str | None
    options: Options


@dataclass(frozen=True, slots=True)
class Job(Generic[R_co]):
    """The result of an enqueue: the job's id, and whether this call created it.

    `created` is False if a live job already had the unique key; `id` is then that job's. Others see the job once the
    caller's transaction commits. The R of `Job[R]` is the type of its handler's result, for `app.result`.
    """

    id: int
    created: bool = True


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
    """None: the task's setting."""
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


def job_id(job: int | Job) -> int:
    """Return the id of a job given by id or Job. Raises UnknownJob for a number that no job can have."""
    found = job.id if isinstance(job, Job) else job
    if isinstance(found, bool) or not isinstance(found, int):
        raise InvalidArgument(f"a job id is a whole number, not of type {type(found).__name__}")
    if not 0 < found < 1 << 63:
        raise UnknownJob(found)
    return found


def checked_reason(reason: str | None) -> str | None:
    """Return a reason that the database can store. Raises InvalidArgument."""
    if reason is not None and (problem := text_problem(reason)):
        raise InvalidArgument(f"the reason {problem}")
    return reason
