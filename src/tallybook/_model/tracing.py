"""The interface between an App and its tracers: `tallybook.otel`, `tallybook.contrib.sentry`. None costs one check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tallybook._model.job import JobCall

if TYPE_CHECKING:
    from tallybook._model.subject import SubjectCall

What = TypeVar("What", JobCall, "SubjectCall", list[JobCall], "list[SubjectCall]")
"""The argument of an enqueue: one job or subject, or a batch."""


class Sending(Protocol[What]):
    """One enqueue in progress."""

    what: What
    """The jobs to enqueue instead of the caller's: the same with the trace in their headers."""

    def sent(self, reports: object) -> None:
        """Called after the insert with a Job or a SubjectReport, or a list of them."""


class Attempt(Protocol):
    """The worker's data of a traced attempt; `_worker.jobs.Running` is one."""

    job_id: int
    attempt: int
    task_name: str
    queue: str
    headers: Any
    """JSON text, or the parsed value."""
    worker_name: str
    in_doubt: bool
    args: Any
    """JSON text, or the values by parameter name."""
    raised: BaseException
    """The exception that ended it, for example of its handler; not set before."""
    recorded: Callable[[str], object]
    """Called with the state after its failure, once that is in the database; not set by default."""
    told: Callable[[str, Mapping[str, Any] | None], object] | None
    """Called with the verb that ends the attempt, and with the error of a failure; only the first call counts."""


class Tracing(Protocol):
    """Set as `App.tracing`."""

    def sending(self, what: What, *, keeps: bool = False) -> AbstractContextManager[Sending[What]]:
        """Return a context around an enqueue. `keeps`: calls without headers get none, so stored ones are kept."""

    def processing(self, attempt: Attempt) -> AbstractContextManager[object]:
        """Return a context around the handler of an attempt, in the handler's own context."""

    def carried(self) -> dict[str, str]:
        """Return the current context in a form for another process."""

    def enter(self, carried: Mapping[str, str]) -> None:
        """Make that the current context until this one ends."""

    def opened(self, dsn: str, name: str, node: str | None = None) -> None:
        """Called when a worker of this process has started on this database; `node` is set if there are several."""

    def closed(self, name: str) -> None:
        """Called when the worker has ended."""
