"""What one worker does in the background: its services, how they notify each other, and the asyncio tasks."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tallybook._db.link import Link
from tallybook._maintenance.clock import Clock, ClockWatch
from tallybook._maintenance.loop import MaintenanceLoop
from tallybook._maintenance.releases import FairRelease, Parents, Permits
from tallybook._maintenance.services import Folder, Promoter, Pruner, Rebaser, Rescuer
from tallybook._task.task import Owner
from tallybook._worker.claim.claimer import Claimer
from tallybook._worker.claim.sleeper import DEAL, PLACES, PROMOTE, SCHEDULE, SETTLE
from tallybook._worker.jobs import Callbacks
from tallybook._worker.settings import WorkerSettings

log = logging.getLogger("tallybook.worker")


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
    """A worker's maintenance, over one connection; queries of schedules use another."""

    def __init__(
        self, app: Owner, link: Link, settings: WorkerSettings, claimer: Claimer, on: Callbacks, *, home: bool
    ) -> None:
        wake = claimer.wake
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
        watch = ClockWatch(link, self.clock)
        services = [
            self.promoter, self.rescuer, self.rebaser, self.parents, self.permits, self.fairness, Folder(link),
            Pruner(link), watch,
        ]  # fmt: skip
        parts = link, services, self.promoter, self.rescuer, watch
        self.loop = MaintenanceLoop(*parts, claimer.worker_id, claimer.idle_queues, claimer.looked)
        self._heard: dict[str, Callable[[], object]] = {
            SCHEDULE: self.clock.changed, SETTLE: self.parents.soon, PLACES: self.permits.soon,
            DEAL: self.fairness.soon, PROMOTE: partial(self.promoter.at_latest_in, 0, behind=True),
        }  # fmt: skip

    def heard(self, word: str) -> None:
        """Run the service that this notification of the listening session names."""
        self._heard[word]()
