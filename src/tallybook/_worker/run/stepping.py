"""Every step of a handler's coroutine inside one contextvars.Context, without an asyncio task of its own."""

from __future__ import annotations

import contextvars
from collections.abc import Coroutine, Generator
from typing import Any

from tallybook._worker.jobs import current_job


class InContext:
    """Awaits a coroutine with every step of it inside one contextvars.Context.

    Its first step was made by who made this, and came to waiting for something: most handlers of the short kind never do.
    """

    __slots__ = ("_context", "_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context, waits_for: Any) -> None:
        self._coroutine = coroutine
        self._context = context
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        run, coroutine, waits_for = self._context.run, self._coroutine, self._waits_for
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                value = yield waits_for
            except GeneratorExit:
                run(coroutine.close)
                raise
            except BaseException as thrown:
                job = self._context.get(current_job)
                if job is not None and job.guard is not None and job.guard.left and not job.guard.inner:
                    run(job.guard.close, coroutine)  # whatever it makes of a cancel, it does not go on
                    raise
                error = thrown
            try:
                waits_for = run(coroutine.send, value) if error is None else run(coroutine.throw, error)
            except StopIteration as end:
                return end.value
            except GeneratorExit as raised:  # by the handler; the loop closing under us comes in at the yield
                raise RuntimeError("the handler raised GeneratorExit") from raised
            value = error = None


async def stepped(coroutine: Coroutine[Any, Any, Any], context: contextvars.Context) -> Any:
    """What a coroutine returns whose every step is made inside this context."""
    try:
        waits_for = context.run(coroutine.send, None)
    except StopIteration as end:
        return end.value
    except GeneratorExit as raised:
        raise RuntimeError("the handler raised GeneratorExit") from raised
    return await InContext(coroutine, context, waits_for)
