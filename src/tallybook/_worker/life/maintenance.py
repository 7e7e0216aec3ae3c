"""What one worker does in the background: its services, the loop that runs them, and the asyncio tasks.

An idle worker sends one statement per check, `services_due`, which writes nothing and also replaces the claimer's poll.
Each answer sets the intervals of the services' checks, so that a change applies within one check. Work that is known to
fall due, such as a scheduled job, runs at its time, without a check.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link
from tallybook._maintenance.clock import Clock, ClockWatch
from tallybook._maintenance.releases import FairRelease, Parents, Permits
from tallybook._maintenance.service import REFUSED, Service, happens
from tallybook._maintenance.services import Folder, Promoter, Pruner, Rebaser, Rescuer
from tallybook._task.task import Owner
from tallybook._worker.claim.claimer import Claimer
from tallybook._worker.claim.sleeper import DEAL, PLACES, PROMOTE, SCHEDULE, SETTLE
from tallybook._worker.jobs import Callbacks
from tallybook._worker.settings import WorkerSettings

log = logging.getLogger("tallybook.worker")

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

    async def cancel(self) -> None:
        """Cancel all tasks and wait a moment for their ends; their errors are ignored from now on."""
        self._closing = True
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=1.0)


class Maintenance:
    """A worker's services, over one connection; queries of schedules use another.

    One query checks all of them, and then only those with work run.
    """

    def __init__(
        self, app: Owner, link: Link, settings: WorkerSettings, claimer: Claimer, on: Callbacks, *, home: bool
    ) -> None:
        self._link, self._claimer, wake = link, claimer, claimer.wake
        self.promoter = Promoter(link, wake)
        self.rescuer = Rescuer(link, wake, lease=settings.lease, every=settings.rescue_look)
        self.rebaser = Rebaser(link, wake)
        claimer.on_foreign = self.rebaser.foreign_cursor
        self.parents = Parents(link, self.promoter.told, wake)
        self.permits = Permits(link, self.promoter.told, wake)
        self.fairness = FairRelease(link, self.promoter.told, wake, slots=settings.slots)
        queries = Link(link.dsn, settings.name)
        declared = app._declared_schedules if home else lambda: None  # on other nodes they are removed
        self.clock = Clock(link, queries, app=app.name, declared=declared, on_fired=wake)
        if settings.maintenance:
            on.followed, on.permits = self.parents.ended, self.permits.ended
            on.fair = self.fairness.claimed
            on.scheduled = lambda delay: self.promoter.at_latest_in(delay.total_seconds())
        self._watch = ClockWatch(link, self.clock)
        self._services: list[Service] = [
            self.promoter, self.rescuer, self.rebaser, self.parents, self.permits, self.fairness, Folder(link),
            Pruner(link), self._watch,
        ]  # fmt: skip
        self._look_at = 0.0
        self._clocks = (math.inf, 0.0)  # the server's clock and the loop's clock at the last check
        if claimer.sleeper is not None:
            claimer.sleeper.heard |= {
                SCHEDULE: self.clock.changed, SETTLE: self.parents.soon, PLACES: self.permits.soon,
                DEAL: self.fairness.soon, PROMOTE: partial(self.promoter.at_latest_in, 0, behind=True),
            }  # fmt: skip

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
        loop, told = asyncio.get_running_loop(), self.promoter.told
        while (left := min(self._next_look(), *(s.run_at for s in self._services)) - loop.time()) > 0:
            told.clear()
            if not await happens(told, left):
                return

    async def look(self) -> None:
        """Check all services whose time has come with one query; those with work are due to run now."""
        now = asyncio.get_running_loop().time()
        asked = [service for service in self._services if service.asks(now)]
        after = None if self.promoter in asked else self.promoter.after
        queues = self._claimer.idle_queues()
        params = ([s.name for s in asked], after, self._claimer.worker_id(), queues)

        async def call(conn: AsyncConnection) -> Any:
            self.rescuer.connected_by(conn)
            asked_at = asyncio.get_running_loop().time()
            row: Any = await (await conn.execute(_LOOK, params)).fetchone()
            await self._look_at_clock(conn, row[-1], asked_at)
            return row

        due, next_in, passed, work, workers, names, every, tick_in, _ = await self._link.run(call)
        if queues:
            self._claimer.looked(now, work)
        self.promoter.looked(next_in, passed, behind=after is None)
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
        (before, asked_before), self._clocks = self._clocks, (server, asked_at)
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
