"""A job outside its handler: JobCall before an enqueue, Job after it. Its row in a view is in job_info.py.

Also jobs that wait for other jobs: the jobs of one call, ordered so that each comes after its parents.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

from tallybook._model.options import Options, text_problem
from tallybook.errors import ConfigError, InvalidArgument, UnknownJob

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


Parent = Job | JobCall | int  # a stored job, or one that the same call enqueues


def checked_after(after: object) -> tuple[int | JobCall, ...]:
    """Return the parents of `with_(after=...)`, each once: ids, and jobs not enqueued yet. Raises ConfigError."""
    given = after if isinstance(after, Iterable) and not isinstance(after, str | bytes) else (after,)
    found: dict[Any, int | JobCall] = {}
    for parent in given:
        if isinstance(parent, Job):
            parent = parent.id
        if type(parent) is JobCall:
            found[id(parent)] = parent
        elif type(parent) is int and 0 < parent < 1 << 63:
            found[("id", parent)] = parent
        else:
            hint = "Write after=[job, ...] with ids, results of an enqueue, or task.job(...) of the same enqueue_many"
            raise ConfigError("after", parent, "not a job", hint=hint)
    if not found:
        raise ConfigError("after", after, "no job is named", hint="Leave it out for a job that waits for none")
    return tuple(found.values())


def with_follow_up(jobs: Iterable[JobCall], then: JobCall | None) -> list[JobCall]:
    """Return these jobs and, last, one that waits for all of them, by default even if they did not complete."""
    jobs = checked_calls(jobs, JobCall, "job", "task.job(...)")
    if then is None:
        return jobs
    if type(then) is not JobCall:
        raise InvalidArgument(f"then is of type {type(then).__name__}", hint="Describe it by task.job(...)")
    parents = {id(job): job for job in jobs}
    after = (*then.options.after, *parents.values())
    options = replace(then.options, after=after, on_parent=then.options.on_parent or "any")
    return [*jobs, replace(then, options=options)]


def arranged(jobs: Sequence[JobCall]) -> tuple[list[JobCall], list[list[int]], list[int]]:
    """Order the jobs so that each comes after its parents. Raises InvalidArgument if a described parent is missing.

    Returns them, the ids of each job's stored parents (-1 is the first of these jobs, -2 the second, ...), and, in the
    caller's order, each job's position in the new one.
    """
    among: dict[int, list[int]] = {}  # without cycles: a job is described after its parents
    for at, job in enumerate(jobs):
        among.setdefault(id(job), []).append(at)
    places = [-1] * len(jobs)
    order: list[int] = []
    stack = list(reversed(range(len(jobs))))
    while stack:  # a chain may be longer than Python's own stack
        at = stack.pop()
        calls = [parent for parent in jobs[at].options.after if not isinstance(parent, int)]
        if before := [p for call in calls for p in _found(among, call, at) if places[p] < 0]:
            stack += [at, *reversed(before)]
        elif places[at] < 0:
            places[at] = len(order)
            order.append(at)
    numbers = {of: [-1 - places[at] for at in found] for of, found in among.items()}
    # A parent that is not among these jobs is the id of a stored one.
    parents = [[n for parent in jobs[at].options.after for n in numbers.get(id(parent), [parent])] for at in order]
    return [jobs[at] for at in order], parents, places


def _found(among: dict[int, list[int]], call: JobCall, at: int) -> list[int]:
    if found := among.get(id(call)):
        return found
    hint = "Pass both to one enqueue_many, or wait for the Job that an earlier enqueue has returned"
    raise InvalidArgument(f"job {at} waits for a job of {call.task!r} that this call does not enqueue", hint=hint)


def with_headers(jobs: Sequence[JobCall], headers: Callable[[str | None], str | None]) -> list[JobCall]:
    """Return these jobs, or subjects, with other headers (JSON). Parents stay parents, shared options shared."""
    options: dict[int, Options] = {}
    made: dict[int, JobCall] = {}
    for job in arranged(jobs)[0] if any(job.options.after for job in jobs) else jobs:
        found = options.get(id(job.options))
        if found is None:
            after = tuple(parent if isinstance(parent, int) else made[id(parent)] for parent in job.options.after)
            found = replace(job.options, headers=headers(job.options.headers), after=after)
            options[id(job.options)] = found
        made[id(job)] = replace(job, options=found)
    return [made[id(job)] for job in jobs]
