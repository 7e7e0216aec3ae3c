"""A job from outside of its handler: JobCall before, Job after an enqueue, JobInfo from the view tallybook.job."""

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
    """A job that is described and not put in yet, made by `task.job(...)`: checked, encoded, for `app.enqueue_many`."""

    task: str
    """The task's name."""
    args: str
    """As JSON text."""
    unique_key: str | None
    options: Options


@dataclass(frozen=True, slots=True)
class Job(Generic[R_co]):
    """What an enqueue reports: the job's id, and whether this call put it in.

    `created` is False where a unique key already had a live job; `id` is then that job's. The job exists for others
    once the caller's transaction commits. Type checkers see in `Job[R]` what its handler returns, for `app.result`.
    """

    id: int
    created: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """One job as the view tallybook.job shows it, at the moment of asking. All instants are aware, in UTC."""

    id: int
    queue: str
    task: str
    state: str
    """scheduled, retrying, waiting, available, running, completed, cancelled or dead."""
    priority: int
    args: dict[str, Any]
    headers: dict[str, Any] | None
    attempt: int
    """The number of its newest attempt, from 1; it only grows."""
    attempts: int
    """How often it was started."""
    failures: int
    crashes: int
    max_attempts: int | None
    """None: what the task says."""
    unique_key: str | None
    enqueued_at: datetime
    run_at: datetime | None
    started_at: datetime | None
    """Of the newest attempt."""
    ended_at: datetime | None
    worker_id: int | None
    worker: str | None
    """The name of the worker that runs it, or ran it last."""
    reason: str | None
    """Why it was cancelled or is dead."""
    last_error: str | None
    errors: list[Any] | None
    """Its error history, oldest first."""
    unserved: bool
    """Whether no living worker knows its task."""
    order_key: str | None = None
    expires_at: datetime | None = None
    """No attempt starts after it."""
    summary: str | None = None
    """What it is about, in one line, where its task has a template for it."""
    result: Any = None
    """What its handler returned, as plain JSON values."""
    progress: float | None = None
    """From 0 to 1, as its handler said."""
    progress_message: str | None = None
    options: dict[str, Any] | None = None
    """Rarely used settings of this one job."""
    subject: str | None = None
    """The name of the subject whose job it is."""
    links: dict[str, Any] | None = None
    """Which rows of yours it belongs to: a kind and a key each."""
    updated_at: datetime | None = None
    """Since when it is in its state."""
    last_attempt_at: datetime | None = None
    """When it was last started; None: not yet, or its history has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A job that is dead, as `app.dead.list` lists it."""

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
    """The last one: type, message, traceback and when."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a cancel of many jobs came to."""

    cancelled: int
    """These will not start."""
    cancelling: int
    """These run, and their workers are told."""


@dataclass(frozen=True, slots=True)
class Retried:
    """What a retry of many dead letters came to."""

    retried: int
    refused: int
    """Another live job has their unique key."""


def job_id(job: int | Job) -> int:
    """The id of what a caller names a job by. UnknownJob for a number that no job can have."""
    found = job.id if isinstance(job, Job) else job
    if isinstance(found, bool) or not isinstance(found, int):
        raise InvalidArgument(f"a job id is a whole number, not of type {type(found).__name__}")
    if not 0 < found < 1 << 63:
        raise UnknownJob(found)
    return found


def checked_reason(reason: str | None) -> str | None:
    """A reason that the database can keep. InvalidArgument."""
    if reason is not None and (problem := text_problem(reason)):
        raise InvalidArgument(f"the reason {problem}")
    return reason
