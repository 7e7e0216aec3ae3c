"""One text for asynchronous and synchronous connections.

A function for both is a coroutine that awaits `got(...)`. On an asynchronous connection it waits. A synchronous one has
returned its result already, so the coroutine never waits, and `done` runs it to its end without an event loop.
"""

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def got(found: Any) -> Any:
    """Return a call's result, awaited if the connection is asynchronous."""
    return await found if hasattr(found, "__await__") else found


def done(running: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        running.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    running.close()
    raise AssertionError("it waits on a synchronous connection")
