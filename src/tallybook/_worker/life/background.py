"""The background tasks of a worker: its finisher, its listener, its maintenance."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("tallybook.worker")


class Background:
    """Tasks that run until the worker ends. `on_failure` gets the error of one that ends before: that is a bug."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self.tasks: list[asyncio.Task[None]] = []
        self._closing = False

    def start(self, service: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(service, name=f"tallybook-{name}")
        task.add_done_callback(self._ended)
        self.tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self._closing:
            log.critical("%s failed, the worker stops", task.get_name(), exc_info=error)
            self._on_failure(error)

    async def cancel(self, seconds: float) -> None:
        """Cancel all tasks and wait for their ends, at most `seconds`; their errors are ignored from now on."""
        self._closing = True
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=seconds)
