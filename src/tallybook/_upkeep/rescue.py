"""Rescue: the work of dead workers goes back in line."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg

from tallybook._db.link import Link

log = logging.getLogger("tallybook.worker")

_RESCUE = (
    "select lost, suspects, (select count(*) from tallybook.worker where ended_at is null)"
    " from tallybook.rescue(grace => %s::interval)"
)
_GRACE = timedelta(seconds=1)
# Every look asks for each worker, so the work of all looks grows with the number of workers only as long as each looks
# less often the more there are. One of them looks twice a second that way, until `every` is reached.
_SHARE = 0.5
_SOONEST = 1.0


class Rescuer:
    """Looks every few seconds, more often where workers are few, and again after the grace where a session has gone."""

    def __init__(self, link: Link, *, lease: timedelta, every: timedelta, on_rescued: Callable[[], None]) -> None:
        self._link = link
        self._lease = lease
        self._every = every.total_seconds()
        self._on_rescued = on_rescued
        self._conn: object = None
        self._since = -math.inf
        self._living = 1

    async def look(self) -> tuple[int, int]:
        """One call: how many attempts were lost, how many workers are suspects."""

        async def call(conn: psycopg.AsyncConnection[Any]) -> Any:
            # After an outage the others' sessions come back in their own time: that one is not there proves nothing yet.
            if conn is not self._conn:
                self._since = -math.inf if self._conn is None else time.monotonic()
                self._conn = conn
            settled = time.monotonic() - self._since > self._lease.total_seconds()
            return await (await conn.execute(_RESCUE, (_GRACE if settled else self._lease,))).fetchone()

        lost, suspects, self._living = await self._link.run(call)
        if lost:
            log.warning("%s jobs of dead workers are back in line", lost)
            self._on_rescued()
        return lost, suspects

    async def run(self) -> None:
        """For ever."""
        while True:
            _, suspects = await self.look()
            await asyncio.sleep(1.05 if suspects else self._pause())

    def _pause(self) -> float:
        # Wide apart at random: workers that were started together must not look together.
        return min(self._every, max(_SOONEST, _SHARE * self._living)) * random.uniform(0.5, 1.0)
