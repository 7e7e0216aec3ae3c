"""The loop of all services: one query checks all of them, and then only those with work run.

An idle worker sends one statement per check, `services_due`, which writes nothing and also replaces the claimer's poll.
Each answer sets the intervals of the services' checks, so that a change applies within one check. Work that is known to
fall due, such as a scheduled job, runs at its time, without a check.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link
from tallybook._maintenance.clock import ClockWatch
from tallybook._maintenance.service import REFUSED, Service, happens
from tallybook._maintenance.services import Promoter, Rescuer

_DUE = Declared("""
  services_due(services text[], after timestamptz, worker int, queues text[])
  -> row (due text[], next_run_at timestamptz, passed timestamptz, work boolean, workers int, names text[],
          every interval[], next_tick_at timestamptz)""")
_LOOK = _DUE.select(
    "due, extract(epoch from next_run_at - clock_timestamp())::float8, passed, work, workers, names, every,"
    " extract(epoch from next_tick_at - clock_timestamp())::float8, extract(epoch from clock_timestamp())::float8"
)
_FORWARD = Declared("_clock_forward(p_by interval) -> void", p_by="make_interval(secs => {seconds:float8})")
_STEP = 10.0  # seconds; a larger step of the server's clock is stored, see _clock_back.sql
# Seconds: the longest time between two checks, so that changed intervals are noticed, however long they are.
_LONGEST = 5.0
_AGAIN = 0.1  # seconds until a refused service tries again: another worker's run has ended by then

Row = tuple[list[str], float | None, datetime | None, bool, int, list[str], list[timedelta], float | None, float]


@dataclass(eq=False)
class MaintenanceLoop:
    _link: Link
    _services: Sequence[Service]
    _promoter: Promoter
    _rescuer: Rescuer
    _watch: ClockWatch
    _worker_id: Callable[[], int]
    _idle_queues: Callable[[], Sequence[str]]
    _on_looked: Callable[[float, bool], None]
    _look_at: float = 0.0
    _clock: tuple[float, float] = (math.inf, 0.0)  # the server's clock and the loop's clock at the last check

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wait()
            if self._next_look() <= loop.time():
                await self.look()
            for service in self._services:
                if service.run_at <= loop.time():
                    await self._serve(service)

    def _next_look(self) -> float:
        return min(self._look_at, *(service.look_at for service in self._services))

    async def _wait(self) -> None:
        """Wait until a check or a run is due; a run may become due earlier meanwhile."""
        loop, told = asyncio.get_running_loop(), self._promoter.told
        while (left := min(self._next_look(), *(s.run_at for s in self._services)) - loop.time()) > 0:
            told.clear()
            if not await happens(told, left):
                return

    async def look(self) -> None:
        """Check all services whose time has come with one query; those with work are due to run now."""
        now = asyncio.get_running_loop().time()
        asked = [service for service in self._services if service.asks(now)]
        after = None if self._promoter in asked else self._promoter.after
        queues = list(self._idle_queues())
        params = ([s.name for s in asked], after, self._worker_id(), queues)

        async def call(conn: AsyncConnection) -> Row:
            self._rescuer.connected_by(conn)
            asked_at = asyncio.get_running_loop().time()
            row = cast(Row, await (await conn.execute(_LOOK, params)).fetchone())
            await self._look_at_clock(conn, row[-1], asked_at)
            return row

        due, next_in, passed, work, workers, names, every, tick_in, _ = await self._link.run(call)
        if queues:
            self._on_looked(now, work)
        self._promoter.looked(next_in, passed, behind=after is None)
        if self._watch in asked:
            self._watch.looked(tick_in)
        self._look_at = now + _LONGEST * random.uniform(0.8, 1.0)
        told = dict(zip(names, (time.total_seconds() for time in every), strict=True))
        for service in self._services:
            before, service.every = service.every, told.get(service.name, service.every)
            if service in asked:
                service.looked_at, service.look_at = now, now + service.pause(workers)
            elif service.every != before:
                service.look_at = service.looked_at + service.pause(workers)
            if service.name in due:
                service.run_at = now

    async def _look_at_clock(self, conn: AsyncConnection, server: float, asked_at: float) -> None:
        """Store a forward step of the server's clock beyond the elapsed time. SQL itself finds a step back."""
        (before, asked_before), self._clock = self._clock, (server, asked_at)
        step = server - before - (asyncio.get_running_loop().time() - asked_before)
        if step > _STEP:
            await conn.execute(_FORWARD.worker, (step,))

    async def _serve(self, service: Service) -> None:
        service.run_at = math.inf  # notifications during the run count for the next one
        again = await service.serve()
        now = asyncio.get_running_loop().time()
        if again is REFUSED:
            service.look_at = min(service.look_at, now + _AGAIN * random.uniform(0.5, 1.0))
        elif isinstance(again, float):
            service.run_at = min(service.run_at, now + again)
