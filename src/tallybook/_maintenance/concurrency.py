"""Permits: jobs that wait for a permit at a concurrency limit go on when one is free."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link
from tallybook._maintenance.service import REFUSED, Service

_RELEASE = Declared("concurrency_release(names text[], as_service boolean) -> row (released int, remain boolean)")
_BATCH = 500
_ROUND = 1.0


class Permits(Service):
    """Runs at once for ends that this worker has told, and about once a second while any job waits for a permit."""

    name = "concurrency_release"

    def __init__(self, link: Link, told: asyncio.Event, *, on_released: Callable[[], None]) -> None:
        super().__init__()
        self._link = link
        self._told = told
        self._on_released = on_released
        self._free: set[str] = set()

    def ended(self, names: Iterable[str]) -> None:
        """Jobs that held permits of these keys have ended."""
        self._free.update(names)
        self.soon()

    def soon(self) -> None:
        """There may be free permits."""
        self.run_at = asyncio.get_running_loop().time()
        self._told.set()

    async def look(self) -> int:
        """Let go on who may, whoever else does the same: how many were let go on."""
        self._free.clear()
        released, _ = await self._run(None, as_service=False)
        return int(released)

    async def _run(self, names: list[str] | None, *, as_service: bool) -> Any:
        async def call(conn: AsyncConnection) -> Any:
            return await (await conn.execute(_RELEASE.worker, (names, as_service))).fetchone()

        row = await self._link.run(call)
        if row[0]:
            self._on_released()
        return row

    async def serve(self) -> str | float | None:
        """What was told first; else all that jobs wait for."""
        if self._free:
            names = sorted(self._free)[:_BATCH]
            self._free.difference_update(names)
            _, remain = await self._run(names, as_service=False)
            return 0.0 if self._free else _ROUND if remain else None
        released, remain = await self._run(None, as_service=True)
        if released is None:
            return _ROUND * random.uniform(0.75, 1.0) if remain else REFUSED
        return _ROUND * random.uniform(0.75, 1.0) if remain else None
