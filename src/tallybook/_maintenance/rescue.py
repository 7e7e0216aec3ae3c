"""Rescue: returns the jobs of dead workers to their queues."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link
from tallybook._maintenance.service import REFUSED, Service

log = logging.getLogger("tallybook.worker")

_RESCUE = Declared("rescue(grace interval, as_service boolean) -> row (lost int, suspects int)")
_GRACE = timedelta(seconds=1)
_AGAIN = 1.05
# Every check covers each worker. So the total work grows only linearly with the number of workers if each checks
# less often the more there are. Together they check twice a second, until `every` is reached.
_SHARE = 0.5
_SOONEST = 1.0


class Rescuer(Service):
    """Runs when a worker seems dead, and again after the grace; checks more often when there are few workers."""

    name = "rescue"

    def __init__(self, link: Link, on_work: Callable[[], object], *, lease: timedelta, every: timedelta | None) -> None:
        super().__init__(link, on_work)
        self._lease = lease
        self._own = every
        self._conn: object = None
        self._since = -math.inf

    def pause(self, workers: int) -> float:
        """Return the seconds to the next check, see _SHARE."""
        every = self.every if self._own is None else self._own.total_seconds()
        return min(every, max(_SOONEST, _SHARE * workers)) * random.uniform(0.5, 1.0)

    def asks(self, now: float) -> bool:
        """Return False while the grace of a suspect runs: an earlier run would only postpone the next one."""
        return self.run_at == math.inf and super().asks(now)

    def connected_by(self, conn: object) -> None:
        """Note the connection of a check. After an outage, others reconnect later: a missing session proves nothing."""
        if conn is not self._conn:
            self._since = -math.inf if self._conn is None else time.monotonic()
            self._conn = conn

    async def look(self) -> None:
        """Run once, even beside other workers."""
        lost, _ = await self._run()
        if lost is None:
            await self._run(as_service=False)

    async def _run(self, *, as_service: bool = True) -> tuple[int | None, int | None]:
        async def call(conn: AsyncConnection) -> Any:
            self.connected_by(conn)
            settled = time.monotonic() - self._since > self._lease.total_seconds()
            grace = _GRACE if settled else self._lease
            return await (await conn.execute(_RESCUE.worker, (grace, as_service))).fetchone()

        lost, suspects = await self._link.run(call)
        if lost:
            log.warning("returned %s jobs of dead workers to their queues", lost)
            self._on_work()
        return lost, suspects

    async def serve(self) -> str | float | None:
        """Claim one run; run again after the grace if there are suspects."""
        lost, suspects = await self._run()
        if lost is None:
            return REFUSED
        if not suspects:
            return None
        # That run also sees workers that have died meanwhile: no check is needed before it.
        self.look_at = max(self.look_at, asyncio.get_running_loop().time() + _AGAIN + _SHARE)
        return _AGAIN
