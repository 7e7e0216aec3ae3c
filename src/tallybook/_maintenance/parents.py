"""Settle: jobs that wait for others go on when those have ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link
from tallybook._maintenance.service import REFUSED, Service

_RESOLVE = Declared("""
  parents_resolve(parents bigint[], after bigint, as_service boolean)
  -> row (ended int, released int, cancelled int, busy int, last bigint, remain boolean)""")
_BATCH = 500
# A round over all that jobs wait for takes about a twentieth of one connection's time, however many these are.
_APART = 0.25
_ROUND = 1.0
_LOCKED = 0.05


class Parents(Service):
    """Runs at once for ends that this worker has told, and about once a second while any job waits for another."""

    name = "parents_resolve"

    def __init__(self, link: Link, told: asyncio.Event, *, on_released: Callable[[], None]) -> None:
        super().__init__()
        self._link = link
        self._told = told
        self._on_released = on_released
        self._ended: set[int] = set()
        self._after: int | None = None

    def ended(self, jobs: Iterable[int]) -> None:
        """Attempts of these have ended, and others may wait for them."""
        self._ended.update(jobs)
        self.soon()

    def soon(self) -> None:
        """Something has ended that others wait for."""
        self.run_at = asyncio.get_running_loop().time()
        self._told.set()

    async def look(self) -> int:
        """A round over all, whoever else runs one: how many jobs were started or cancelled."""
        self._ended.clear()
        moved: int = 0
        last: int | None = None
        while True:
            _, released, cancelled, _, last, _ = await self._run(None, last, as_service=False)
            moved += released + cancelled
            if last is None:
                return moved

    async def _run(self, parents: list[int] | None, after: int | None, *, as_service: bool) -> Any:
        async def call(conn: AsyncConnection) -> Any:
            return await (await conn.execute(_RESOLVE.worker, (parents, after, as_service))).fetchone()

        row = await self._link.run(call)
        if row[1]:
            self._on_released()
        return row

    async def serve(self) -> str | float | None:
        """What was told first; else the next part of a round."""
        if self._ended:
            parents = list(self._ended)[:_BATCH]
            self._ended.difference_update(parents)
            _, _, _, busy, _, remain = await self._run(parents, None, as_service=False)
            if busy:  # another's transaction has a child of them: it looks again for what it had not seen
                self._ended.update(parents)
                return _LOCKED * random.uniform(0.5, 1.0)
            return 0.0 if self._ended else _ROUND if remain else None
        ended, _, _, busy, self._after, remain = await self._run(None, self._after, as_service=True)
        if ended is None:
            return _ROUND * random.uniform(0.75, 1.0) if remain else REFUSED
        if self._after is not None:
            return _APART
        if busy:
            return _APART * random.uniform(0.5, 1.0)
        return _ROUND * random.uniform(0.75, 1.0) if remain else None
