"""What all services have: a name, how often they are looked after, and a run that one worker claims."""

from __future__ import annotations

import asyncio
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final

from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link

REFUSED: Final = "refused"
"""Somebody else is running it just now."""


async def happens(event: asyncio.Event, seconds: float | None) -> bool:
    """Whether it happens within so many seconds; None: wait as long as it takes."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True  # though another who waits for it may have cleared it since


async def asked(link: Link, sql: str, *params: object) -> list[Any]:
    async def call(conn: AsyncConnection) -> list[Any]:
        return await (await conn.execute(sql, params)).fetchall()

    return await link.run(call)


class Service(ABC):
    """Maintenance that any worker runs, and never two at once; the loop says when."""

    name: ClassVar[str]
    every = 5.0
    """Seconds; out of `tallybook.service`, at each look."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.look_at = 0.0
        """Of the loop's clock: when to ask whether there is something to do."""
        self.run_at = math.inf
        """When to run without asking: something is known to be due then."""
        self.looked_at = -math.inf

    async def _row(self, sql: str, *params: object) -> Any:
        """The row of a statement, over the connection of all services."""
        return (await asked(self._link, sql, *params))[0]

    def pause(self, workers: int) -> float:
        """Seconds to the next look, with so many workers on record; drawn, or workers started together look together."""
        return self.every * random.uniform(0.75, 1.0)

    def asks(self, now: float) -> bool:
        """Whether a look at this time is for this service, too: its own time has come, or has come half."""
        return self.look_at - now <= 0.5 * max(0.0, self.look_at - self.looked_at)

    @abstractmethod
    async def serve(self) -> str | float | None:
        """Claim one run and do it. REFUSED, or in how many seconds the next one is due, if that is known."""


class Release(Service):
    """One that lets waiting jobs go on: at once when it is told, and about once a second while any wait."""

    def __init__(self, link: Link, told: asyncio.Event, *, on_released: Callable[[], None]) -> None:
        super().__init__(link)
        self._told = told
        self._on_released = on_released
        self._ended: set[Any] = set()

    def ended(self, keys: Iterable[Any]) -> None:
        """Attempts have ended, in the database, that others may wait for: by what they wait for them."""
        self._ended.update(keys)
        self.soon()

    def soon(self) -> None:
        """There may be jobs to let go on."""
        self.run_at = asyncio.get_running_loop().time()
        self._told.set()


def about_a_second() -> float:
    """A round of many services: drawn, or workers started together run together."""
    return random.uniform(0.75, 1.0)
