"""Threads for plain handlers that do not keep the process: those of ThreadPoolExecutor are joined at its exit.

A plain handler cannot be ended. After an abort its job was given back, and the process has to end whatever it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

_Item = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(Executor):
    """At most so many daemon threads, started when they are needed."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._started = 0
        self._idle = threading.Semaphore(0)
        self._work: SimpleQueue[_Item | None] = SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call in one of the threads; from the event loop only."""
        future: Future[Any] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True).start()
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, call  # or they live until the next job
            self._idle.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when they have nothing left; never waits. cancel_futures: what waits is not started."""
        while cancel_futures and not self._work.empty():
            if item := self._work.get():
                item[0].cancel()
        for _ in range(self._started):
            self._work.put(None)
