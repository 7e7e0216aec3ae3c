"""What an App tells its tracers: `tallybook.otel`, `tallybook.contrib.sentry`. None in their place costs one look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from tallybook._model.job import JobCall
from tallybook._model.subject import SubjectCall

What = TypeVar("What", JobCall, SubjectCall, list[JobCall], list[SubjectCall])
"""What an enqueue puts in: one, or a batch."""


class Sending(Protocol[What]):
    """One enqueue that is on its way."""

    what: What
    """What is put in instead of what the caller gave: the same with the trace in its headers."""

    def sent(self, reports: object) -> None:
        """The database has taken it: a Job or a SubjectReport, or a list of them."""


class Attempt(Protocol):
    """What a worker knows of the attempt that is traced; `_worker.jobs.Running` is one."""

    job_id: int
    attempt: int
    task_name: str
    queue: str
    headers: Any
    """JSON text, or what was read of it."""
    worker_name: str
    in_doubt: bool
    args: Any
    """JSON text, or the values by parameter name."""
    raised: BaseException
    """What ended it, the exception of its handler for example; not set before."""
    recorded: Callable[[str], object]
    """Called with the state that its failure has led to, once that is in the database; not set by default."""
    told: Callable[[str, Mapping[str, Any] | None], object] | None
    """Called with the verb that ends the attempt, and with the error where it has failed; the first call counts."""


class Tracing(Protocol):
    """Set as `App.tracing`."""

    def sending(self, what: What, *, keeps: bool = False) -> AbstractContextManager[Sending[What]]:
        """Around an enqueue. `keeps`: what has no headers is left so, since what is there would lose its own."""

    def processing(self, attempt: Attempt) -> AbstractContextManager[object]:
        """Around the handler of an attempt, in the context that it runs in."""

    def carried(self) -> dict[str, str]:
        """What makes the current context known to another process."""

    def enter(self, carried: Mapping[str, str]) -> None:
        """Make that the current context, until this one is left."""

    def opened(self, dsn: str, name: str, node: str | None = None) -> None:
        """A worker of this process has started, on this database, which is the node of this name where there are several."""

    def closed(self, name: str) -> None:
        """It has ended."""
