"""Promote: what is due goes from scheduled to its lane."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg

from tallybook._db.link import Link

_PROMOTE = (
    "select promoted, last_run_at, extract(epoch from next_run_at - clock_timestamp())::float8"
    " from tallybook.promote(%s::int, %s::timestamptz)"
)
_BATCH = 1000
_LONGEST_WAIT = 5.0
_LOOK_BEHIND = 5.0


class Promoter:
    """Looks when the next job is due, when told of an earlier one, and every few seconds behind its own mark."""

    def __init__(self, link: Link, *, on_promoted: Callable[[], None]) -> None:
        self._link = link
        self._on_promoted = on_promoted
        self._after: datetime | None = None
        self._looked_behind = 0.0
        self._due = asyncio.Event()
        self._next = math.inf

    def at_latest_in(self, seconds: float, *, behind: bool = False) -> None:
        """A job falls due in so many seconds: look then; behind: it may lie before the mark, its commit was late."""
        if behind:
            self._looked_behind = -math.inf
        when = asyncio.get_running_loop().time() + max(0.0, seconds)
        if when < self._next:
            self._next = when
            self._due.set()

    async def look(self) -> tuple[int, float | None]:
        """One call: how many were promoted, and in how many seconds the next is due."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._looked_behind > _LOOK_BEHIND:
            self._after, self._looked_behind = None, loop.time()

        async def call(conn: psycopg.AsyncConnection[Any]) -> Any:
            return await (await conn.execute(_PROMOTE, (_BATCH, self._after))).fetchone()

        promoted, last, next_in = await self._link.run(call)
        self._after = last or self._after
        if promoted:
            self._on_promoted()
        return promoted, next_in

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            self._next = math.inf  # what is said while the answer is on its way counts
            promoted, next_in = await self.look()
            if promoted == _BATCH:
                continue
            wait = _LONGEST_WAIT * random.uniform(0.8, 1.0)
            # Not at once where something is due and was not moved: somebody else has it locked.
            soon = wait if next_in is None else max(0.001 if next_in > 0 else 0.05, next_in)
            self._next = min(self._next, loop.time() + min(wait, soon))
            while (left := self._next - loop.time()) > 0:
                self._due.clear()
                try:
                    async with asyncio.timeout(left):
                        await self._due.wait()
                except TimeoutError:
                    break
