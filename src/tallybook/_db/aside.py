"""Run a call in its own thread, for calls that may hang with a server: they would block asyncio's few threads.

The thread keeps neither the loop nor the process alive. A caller that stops waiting cancels and leaves it behind.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def aside(call: Callable[..., T], *args: Any) -> T:
    """Return the call's result, or raise its error, from a daemon thread with a copy of this context."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def end(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result(value) if error is None else answer.set_exception(error)

    def run() -> None:
        value, raised = None, None
        try:
            value = context.run(call, *args)
        except BaseException as error:
            raised = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(end, value, raised)

    threading.Thread(target=run, name="tallybook-aside", daemon=True).start()
    return await answer
