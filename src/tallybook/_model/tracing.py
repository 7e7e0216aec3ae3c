"""The interface between an App and its tracers: `tallybook.otel`, `tallybook.contrib.sentry`. None costs one check.

Also the headers of jobs, which carry a trace: reading them, and adding to those of jobs to enqueue.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tallybook._model.job import JobCall, with_headers

if TYPE_CHECKING:
    from tallybook._model.subject import SubjectCall

What = TypeVar("What", JobCall, "SubjectCall", list[JobCall], "list[SubjectCall]")
"""The argument of an enqueue: one job or subject, or a batch."""

_MOST_BYTES = 8_000
_DIGITS = 330  # jsonb writes a number with an exponent in full; no Python float needs more digits than this


class Sending(Protocol[What]):
    """One enqueue in progress."""

    what: What  # the jobs to enqueue instead of the caller's: the same with the trace in their headers

    def sent(self, reports: object) -> None:
        """Called after the insert with a Job or a SubjectReport, or a list of them."""


class Attempt(Protocol):
    """The worker's data of a traced attempt; `_worker.jobs.Running` is one."""

    job_id: int
    attempt: int
    task_name: str
    queue: str
    headers: Any  # JSON text, or the parsed value
    worker_name: str
    in_doubt: bool
    args: Any  # JSON text, or the values by parameter name
    raised: BaseException  # the exception that ended it, for example of its handler; not set before
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


def read_headers(headers: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return headers as a mapping, empty if they cannot be read."""
    if not isinstance(headers, str):
        return headers or {}
    try:
        found = json.loads(headers)
    except (ValueError, RecursionError):  # SQL may have stored headers that Python cannot read
        return {}
    return found if isinstance(found, dict) else {}


def with_added(headers: str | None, carried: Mapping[str, str]) -> str | None:
    """Return headers, as JSON text, with missing names added as far as they fit: the longest is left out first."""
    own = read_headers(headers)
    added = {name: value for name, value in carried.items() if name not in own}
    numbers = json.dumps(own, ensure_ascii=False)  # without `added`: its text may have an e before a hyphen
    most = _MOST_BYTES - _DIGITS * (numbers.count("e+") + numbers.count("e-"))
    while added:
        text = json.dumps({**own, **added}, ensure_ascii=False)  # with spaces after : and , as jsonb writes it
        if len(text.encode()) <= most:
            return text
        added.pop(max(added, key=lambda name: (len(added[name]), name)))
    return headers


def carrying(what: What, headers: Callable[[str | None], str | None]) -> What:
    """Return the same with other headers, as JSON text. Shared options stay shared."""
    if not isinstance(what, list):
        return replace(what, options=replace(what.options, headers=headers(what.options.headers)))
    return with_headers(what, headers)  # type: ignore[arg-type, return-value]  # a list is of one kind
