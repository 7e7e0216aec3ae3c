"""Threads for plain handlers that do not delay the process's exit, unlike those of ThreadPoolExecutor.

A plain handler cannot be killed. After an abort its job was given back, and the process must be able to end. After its
deadline and the grace it is abandoned: it keeps its thread for as long as it runs, another thread takes its place, and
its own thread ends with it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any


class DaemonThreads(Executor):
    """At most `most` daemon threads, besides abandoned ones; started on demand."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._started = 0
        self._number = 0
        self._idle = threading.Semaphore(0)
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.abandoned: set[Future[Any]] = set()
        self._lock = threading.Lock()  # for abandoning a call and for the end of one; else no job waits for it

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call in one of the threads; call from the event loop only. Raises if a thread cannot be started."""
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._start()  # first: a call without a thread must not run later
        future: Future[Any] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _start(self) -> None:
        self._number += 1
        threading.Thread(target=self._run, name=f"{self._name}-{self._number}", daemon=True).start()
        self._started += 1

    def abandon(self, future: Future[Any]) -> bool:
        """Give up the thread that runs this; call from the event loop only. False: it had not begun, or has ended."""
        with self._lock:
            if future.cancel() or future.done():
                return False
            self.abandoned.add(future)
        # Always: the count of idle threads may be one too high, and a job with a slot must find a thread.
        self._started -= 1
        self._start()
        return True

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                result, raised = _outcome(call)
                with self._lock:  # in one step: `abandon` comes before the end, or sees that it has ended
                    future.set_exception(raised) if raised is not None else future.set_result(result)
                    if future in self.abandoned:
                        self.abandoned.discard(future)
                        return
                del result, raised
            del item, future, call  # else they live until the next job
            self._idle.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when no call is left; never wait. cancel_futures: cancel unstarted calls."""
        while cancel_futures and not self._work.empty():
            if item := self._work.get():
                item[0].cancel()
        for _ in range(self._started):
            self._work.put(None)


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:
        return None, error
