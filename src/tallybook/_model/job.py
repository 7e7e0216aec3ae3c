"""A job outside its handler: JobCall before an enqueue, Job after it. Its row in a view is in job_info.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from tallybook._model.options import Options, text_problem
from tallybook.errors import InvalidArgument, UnknownJob

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)
C = TypeVar("C")


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


def checked_calls(calls: Iterable[C], cls: type[C], what: str, how: str) -> list[C]:
    """Return descriptions of jobs or subjects as a list. Raises InvalidArgument for an object of another class."""
    listed = list(calls)
    for at, call in enumerate(listed):
        if type(call) is not cls:
            raise InvalidArgument(f"{what} {at} is of type {type(call).__name__}", hint=f"Describe it by {how}")
    return listed


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
