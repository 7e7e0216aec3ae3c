"""Fairness: jobs with a fair key go to their lanes in rounds, as those in line are claimed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link
from tallybook._maintenance.service import Service

_FAIR_RELEASE = Declared("""
  fair_release(known jsonb, as_service boolean) -> row (known jsonb, released int, busy boolean, remain boolean)""")
_RELEASE = _FAIR_RELEASE.select("known::text, released, busy, remain")
_ROUND = 1.0
# Another deals: what was claimed since it looked is ours to find.
_AGAIN = 0.01


class FairRelease(Service):
    """Runs at once when a producer says so or this worker has claimed such jobs, and about once a second while any wait."""

    name = "fair_release"

    def __init__(self, link: Link, told: asyncio.Event, *, on_released: Callable[[], None]) -> None:
        super().__init__()
        self._link = link
        self._told = told
        self._on_released = on_released
        self._known: str | None = None
        self._last_time = True
        self.run_at = 0.0  # a look sees what is new: what a worker before this one has left is found here

    def soon(self) -> None:
        """There are new jobs, or there is room in line."""
        self.run_at = asyncio.get_running_loop().time()
        self._last_time = False
        self._told.set()

    async def look(self) -> int:
        """Release, whoever else does the same: how many jobs went on."""
        released, _, _ = await self._run(as_service=False)
        return released

    async def _run(self, *, as_service: bool) -> tuple[int, bool, bool]:
        async def call(conn: AsyncConnection) -> Any:
            return await (await conn.execute(_RELEASE, (self._known, as_service))).fetchone()

        # What it knows of a database that was replaced is thrown away with what it knew of the lanes of that one.
        self._known, released, busy, remain = await self._link.run(call)
        if released:
            self._on_released()
        return released, busy, remain

    async def serve(self) -> str | float | None:
        """Release what there is room for."""
        released, busy, remain = await self._run(as_service=True)
        if busy:
            return _AGAIN * random.uniform(0.5, 1.5)
        if released or remain:
            self._last_time = False
            return _ROUND * random.uniform(0.75, 1.0)
        if self._last_time:
            return None
        # Told, and found nothing: what was committed very late is found by the look from the beginning, every few seconds.
        self._last_time = True
        return 3.1
