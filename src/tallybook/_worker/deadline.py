"""The deadline of one attempt, and how the worker abandons an attempt that does not end.

At the deadline, an async handler is cancelled, a plain handler in a thread sees ctx.timed_out, and a child process is
killed. A handler that is still running after the grace is abandoned. Its attempt fails, so the fence refuses any later
end, and its slot is free. A waiting coroutine is closed; a thread is replaced.

Only tasks with a timeout or a process of their own have a Guard; all others pay one attribute read.
"""

from __future__ import annotations

import asyncio
import ctypes
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from tallybook._model.durations import format_duration


class Process(Protocol):
    def kill(self) -> None: ...
    def tell_cancel(self) -> None: ...


class Guarded(Protocol):
    """A running attempt, as its Guard reads it."""

    cancel_reason: str | None
    guard: Guard | None


def _nothing(job: object) -> None: ...


@dataclass(slots=True, eq=False)
class Guard:
    """Actions on one running attempt beyond cancelling its asyncio task."""

    _job: Guarded
    timeout: timedelta | None = None
    _grace: float = 0.0
    _stop: Callable[[Any], None] = _nothing
    """Asks the handler to end, at the deadline."""
    _on_overdue: Callable[[Any], None] = _nothing
    """Called when it has not ended after the grace."""
    _timer: asyncio.TimerHandle | None = None
    deadline: datetime | None = None
    timed_out: bool = False
    given_back: bool = False
    """The worker aborts it: a handler that has not begun in its process must not begin."""
    left: bool = False
    """Nobody waits for this attempt any more: its coroutine is closed at its next step."""
    inner: bool = False
    """Abandon only the handler's coroutine; the code around it has a transaction to roll back: see leavable."""
    unclosed: bool = False
    """The coroutine swallows even GeneratorExit."""
    relay: asyncio.Task[None] | None = None
    thread: Future[Any] | None = None
    child: Process | None = None

    def start(self) -> None:
        if self.timeout is not None and self._job.cancel_reason is None:
            self.deadline = datetime.now(UTC) + self.timeout
            self._set(self.timeout.total_seconds(), self._passed)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        self.clear()
        self._timer = asyncio.get_running_loop().call_later(seconds, call, *args)

    def _passed(self) -> None:
        self.timed_out = True
        if self.child is not None:
            self.child.kill()
            return
        self._stop(self._job)
        self._set(self._grace, self._on_overdue, self._job)

    def told(self) -> None:
        """Pass the job's cancel to its child process, and kill the process after the grace."""
        if self.child is not None:
            self.child.tell_cancel()
            self._set(self._grace, self.child.kill)

    def aborted(self) -> None:
        """Pass the worker's abort to the child process; `leave` kills it when the worker stops waiting."""
        self.given_back = True
        if self.child is not None:
            self.child.tell_cancel()

    def close(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Close a coroutine that nobody awaits. One that refuses stays suspended for the life of the process."""
        try:
            coroutine.close()
        except RuntimeError:
            # If it were collected, Python would close it again, at exit at the latest. A handler that swallows
            # everything would then find no loop to wait in and spin forever.
            self.unclosed = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))

    def explained(self, error: BaseException) -> BaseException:
        """Return the error that ended the attempt: the deadline's, if `error` is the cancel that the deadline sent."""
        if not self.timed_out or self.timeout is None:
            return error
        if issubclass(type(error), asyncio.CancelledError) and self._job.cancel_reason is None:
            return deadline_passed(self.timeout).with_traceback(error.__traceback__)
        with suppress(BaseException):  # a crafted exception may raise anything
            error.add_note(f"(after the deadline of {format_duration(self.timeout)} had passed)")
        return error


@types.coroutine
def leavable(coroutine: Coroutine[Any, Any, Any], job: Guarded) -> Generator[Any, Any, Any]:
    """Await a handler's coroutine. When the attempt is abandoned, close it and let the awaiter continue."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            waits_for = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        value = error = None
        try:
            value = yield waits_for
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as thrown:
            if job.guard is not None and job.guard.left:
                job.guard.close(coroutine)
                raise
            error = thrown


def deadline_passed(timeout: timedelta) -> TimeoutError:
    return TimeoutError(f"deadline of {format_duration(timeout)} passed")
