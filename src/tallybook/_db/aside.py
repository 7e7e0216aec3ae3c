"""Leave work that waits for a server: a call in its own thread, and tasks that must end.

A call that may hang would block one of asyncio's few threads. Its own thread keeps neither the loop nor the process
alive. A caller that stops waiting cancels and leaves it behind.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_AGAIN = 1.0


def daemon(call: Callable[..., T], *args: Any, name: str = "tallybook-aside") -> Future[T]:
    """Run the call in a daemon thread, with a copy of this context."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            answer.set_result(context.run(call, *args))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


async def aside(call: Callable[..., T], *args: Any) -> T:
    """Return the call's result, or raise its error, from a daemon thread with a copy of this context."""
    return await asyncio.wrap_future(daemon(call, *args))


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel these tasks until all have ended; ignore their errors.

    One cancel may not be enough: psycopg 3.2 waits with `asyncio.wait_for`, and in Python 3.11 this loses a cancel that
    comes together with the server's answer.
    """
    left = list(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, pending = await asyncio.wait(left, timeout=_CANCEL_AGAIN)
        await asyncio.gather(*ended, return_exceptions=True)
        left = list(pending)
