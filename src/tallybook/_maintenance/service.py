"""The base of all services: a name, the interval of checks, and a run that one worker claims."""

import asyncio
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final

from tallybook._db.link import Link

REFUSED: Final = "refused"  # another worker is running it now


async def happens(event: asyncio.Event, seconds: float | None) -> bool:
    """Return whether the event happens within this time; None: wait without a limit."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True  # although another waiter may have cleared it since


async def ends_or(task: asyncio.Future[Any], event: asyncio.Event) -> None:
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


class Service(ABC):
    """Maintenance that any worker runs, one at a time; the loop decides when."""

    name: ClassVar[str]
    every = 5.0  # seconds; updated from `tallybook.service` at each check

    def __init__(self, link: Link, on_work: Callable[[], object] = lambda: None) -> None:
        self._link = link
        self._on_work = on_work  # called when jobs can be claimed
        self.look_at = 0.0  # when to check for work, on the loop's clock
        self.run_at = math.inf  # when to run without a check, because something is known to be due then
        self.looked_at = -math.inf

    async def _row(self, sql: str, *params: object) -> Any:
        """Return the row of a statement, over the connection of all services."""
        return (await self._link.rows(sql, *params))[0]

    def pause(self, workers: int) -> float:
        """Return the seconds to the next check; random, so that workers started together do not check together."""
        return self.every * random.uniform(0.75, 1.0)

    def asks(self, now: float) -> bool:
        """Return whether a check at this time includes this service: its time has come, or half of it has passed."""
        return self.look_at - now <= 0.5 * max(0.0, self.look_at - self.looked_at)

    @abstractmethod
    async def serve(self) -> str | float | None:
        """Claim one run and do it. Return REFUSED, or the seconds until the next run is due, if known."""


class Release(Service):
    """A service that releases waiting jobs: at once when notified, and about once a second while any wait."""

    released_at = 0  # the column of its row with the number of released jobs

    def __init__(self, link: Link, told: asyncio.Event, on_work: Callable[[], object]) -> None:
        super().__init__(link, on_work)
        self._told = told
        self._ended: set[Any] = set()

    async def _row(self, sql: str, *params: object) -> Any:
        row = await super()._row(sql, *params)
        if row[self.released_at]:
            self._on_work()
        return row

    def ended(self, keys: Iterable[Any]) -> None:
        """Note that attempts have ended, in the database; `keys` are what other jobs may wait for."""
        self._ended.update(keys)
        self.soon()

    def soon(self) -> None:
        """Run soon: there may be jobs to release."""
        self.run_at = asyncio.get_running_loop().time()
        self._told.set()


def about_a_second() -> float:
    """Return the interval of many services: random, so that workers started together do not run together."""
    return random.uniform(0.75, 1.0)
