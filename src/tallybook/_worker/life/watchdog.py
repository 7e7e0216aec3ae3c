"""Reports a blocked event loop: a handler that computes, or sleeps, without awaiting holds up all async handlers.

The heartbeat has its own thread, so a blocked loop loses no lease; but nothing else moves. One thread sends the loop a
signal twice a second. If the loop does not answer within a second, the thread logs the loop's stack, once per blocking.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from types import FrameType

log = logging.getLogger("tallybook.worker")

_EVERY = 0.5
_PATIENCE = 1.0
_ALSO = 0.2  # the whole process may have been stopped: then the loop answers as soon as this thread runs again
_FRAMES = 30
_KEPT = 1000


class Watchdog(threading.Thread):
    """Watches one event loop from another thread. Create it in the loop's own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="tallybook-watchdog", daemon=True)
        self._loop = loop
        self._thread = threading.get_ident()
        self._ended = threading.Event()
        self.blocked = 0
        """How often the loop was blocked."""
        self._lags: dict[object, deque[float]] = {}
        self._asked: float | None = None

    def lag(self, reader: object = None) -> float | None:
        """Return the longest delay of the loop's answers since this reader last asked, in seconds; for any thread.

        An answer that is still missing counts with the time so far. None: no answer was asked for.
        """
        lags, self._lags[reader] = self._lags.get(reader, ()), deque(maxlen=_KEPT)
        asked = self._asked
        late = () if asked is None else (time.monotonic() - asked,)
        return max((*lags, *late), default=None)

    def _turned(self, asked: float, sign: threading.Event) -> None:
        self._asked = None
        for lags in list(self._lags.values()):
            lags.append(time.monotonic() - asked)
        sign.set()

    def run(self) -> None:
        while not self._ended.wait(_EVERY):
            sign = threading.Event()
            self._asked = asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._turned, asked, sign)
            except RuntimeError:  # closed
                return
            if sign.wait(_PATIENCE) or sign.wait(_ALSO) or self._ended.is_set():
                continue
            self.blocked += 1
            self._tell(time.monotonic() - asked)
            while not sign.wait(_EVERY):
                if self._ended.is_set():
                    return
            log.warning("the event loop continues after %.1f s", time.monotonic() - asked)

    def _tell(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._thread)
        try:
            name, stack = _job_of(frame), "".join(_lines(frame))
        finally:
            del frame  # else the handler's locals live as long as this frame
        message = (
            "%s has blocked the event loop for %.1f s, and nothing else runs meanwhile. Use await, or make it a plain"
            " function or a process\n%s"
        )
        log.warning(message, name, seconds, stack, extra={"event": "blocked"})

    def stop(self) -> None:
        self._ended.set()


def _lines(frame: FrameType | None) -> list[str]:
    frames = list(traceback.walk_stack(frame))[:_FRAMES]
    return traceback.StackSummary.extract(iter(frames[::-1]), lookup_lines=True).format()


def _job_of(frame: FrameType | None) -> str:
    """Return the name of the job whose code the thread runs, from the runner's frame below it."""
    from tallybook._worker.run.runner import Runner

    while frame is not None:
        if frame.f_code is Runner._one.__code__:
            job = frame.f_locals.get("job")
            return f"{job.task_name} {job.job_id}" if job is not None else "a job"
        frame = frame.f_back
    return "something"
