"""Run a call in its own thread, for calls that may hang with a server: they would block asyncio's few threads.

The thread keeps neither the loop nor the process alive. A caller that stops waiting cancels and leaves it behind.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def aside(call: Callable[..., T], *args: Any) -> T:
    """Return the call's result, or raise its error, from a daemon thread with a copy of this context."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            answer.set_result(context.run(call, *args))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="tallybook-aside", daemon=True).start()
    return await asyncio.wrap_future(answer)
