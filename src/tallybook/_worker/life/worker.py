"""The life of a worker: start, run, stop on the first signal, abort on the second."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tallybook._db.link import Link, aside, dsn_for_people, end
from tallybook._maintenance import services
from tallybook._maintenance.service import ends_or
from tallybook._model.at_node import at_node
from tallybook._task.catalogue import catalogue, check_tasks
from tallybook._task.task import Owner
from tallybook._worker.claim.claimer import Claimer
from tallybook._worker.claim.sleeper import CANCEL, Sleeper
from tallybook._worker.finish.finisher import Finisher
from tallybook._worker.jobs import Book
from tallybook._worker.life import on_record, supervisor
from tallybook._worker.life.heartbeat import Heartbeat
from tallybook._worker.life.maintenance import Background, Maintenance
from tallybook._worker.life.on_record import WHOLE, Part
from tallybook._worker.life.stopping import Stopping, WorkerReport
from tallybook._worker.life.telemetry import Telemetry
from tallybook._worker.life.watchdog import Watchdog
from tallybook._worker.run import children
from tallybook._worker.run.atomic import Atomic
from tallybook._worker.run.calling import Common, Handlers
from tallybook._worker.run.runner import Runner
from tallybook._worker.run.verbs import Verbs
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import NotSupported, QueueUnavailable

log = logging.getLogger("tallybook.worker")


@dataclass(frozen=True, slots=True)
class Place:
    """The objects that the worker of one node shares with those of the other nodes."""

    book: Book
    common: Common
    watchdog: Watchdog
    worn_out: Callable[[], object]
    """Called when too many abandoned handlers are left: they belong to the process, so all of its workers stop."""


class Worker:
    """A process's worker of one database. `run` lasts until `stop`.

    `part` is its share of the limits and schedules that the code declares. With a `place`, it is one of several.
    `drains`: it is for one drain: jobs' ends and maintenance share a connection.
    """

    def __init__(
        self,
        app: Owner,
        dsn: str,
        settings: WorkerSettings,
        *,
        drains: bool = False,
        part: Part = WHOLE,
        place: Place | None = None,
    ) -> None:
        if children.importing_main:
            hint = "Write `if __name__ == '__main__':` before what starts it"
            raise NotSupported("a worker is started while a process of another one imports this program", hint=hint)
        at = at_node.get()
        self._node = at.name if at else None
        self._traced_as = f"{settings.name} {self._node}" if at else settings.name
        self._app = app
        self.settings = settings
        self.dsn = dsn
        self.part, self._place = part, place
        self.book = place.book if place else Book(dict(settings.queues))
        self.maintenance_link = Link(dsn, settings.name, on_connect=services.on_connect)
        handlers = Link(dsn, settings.name)
        finishes = self.maintenance_link if drains else Link(dsn, settings.name)
        self.finisher = Finisher(finishes, self.book)
        self.atomic = Atomic(app, dsn, settings.name)
        self._session_dsn = settings.direct_dsn or dsn
        common = place.common if place else Common(app, settings)
        calls = Handlers(app, Verbs(handlers, self._session_dsn), self.atomic, common, owns=place is None)
        self.runner = Runner(app, self.book, self.finisher, calls, settings)
        listens = self._session_dsn, settings.name, list(settings.queues)
        self.sleeper = Sleeper(*listens, {CANCEL: self._beat_now}) if settings.notify else None
        parts = self.book, self.runner, self.finisher, self.sleeper
        self.claimer = Claimer(dsn, settings, *parts, worker_id=self._id)
        self.maintenance = Maintenance(app, self.maintenance_link, settings, self.claimer, self.book.on, home=part.home)
        self.book.on.many, self.book.on.abandoned = self._beat_now, self._abandoned
        self.links = {
            "claims": self.claimer.link, "ends": finishes, "maintenance": self.maintenance_link, "handlers": handlers,
        }  # fmt: skip
        self.stopping = Stopping(settings, self.book, self.claimer.admission, self.runner, self.finisher)
        check_tasks(app)
        self.heartbeat: Heartbeat | None = None
        self.watchdog: Watchdog | None = None
        self.telemetry = Telemetry(settings, dsn, self) if settings.metrics_port is not None else None
        self._background = Background(self._fail)
        self._failed: BaseException | None = None
        self._drains = drains
        self._starting: asyncio.Task[None] | None = None

    def why_not_ready(self) -> str:
        """Return why it takes no jobs now; empty: it does. Called from the telemetry's thread."""
        if self._failed is not None:
            return f"failed: {type(self._failed).__name__}"
        if self.claimer.stopping.is_set():
            return "stopping"
        if not self._id():
            return "starting: not registered yet"
        away = ", ".join(what for what, link in self.links.items() if link.away and what != "handlers")
        return f"no connection to the database: {away}" if away else ""

    async def take_part(self, part: Part) -> None:
        """Store this node's part of the code's limits and schedules from now on. Raises ConfigError."""
        if part != self.part:
            declared = on_record.limits(self._app, part)
            moved, self.part = part.home != self.part.home, part
            if not self._id():  # still starting: it registers this part there, or an older one
                await self.maintenance_link.first()
            await self.maintenance_link.rows(on_record.REGISTER.worker, self._app.name, declared)
            if moved:
                self.maintenance.clock.declare(self._app._declared_schedules if part.home else lambda: None)

    def _id(self) -> int:
        return self.heartbeat.worker_id if self.heartbeat else 0

    def _given_up(self, worker_id: int) -> None:
        # In one step of the loop: the old jobs must stop before a claim with the new id can return.
        self.runner.lost()
        self.claimer.admission.forget()
        assert self.heartbeat is not None
        self.heartbeat.worker_id = worker_id
        self.claimer.wake()  # the last wake-up may have gone into a claim that was refused

    def _beat_now(self) -> None:
        if self.heartbeat:
            self.heartbeat.beat_now()

    def _abandoned(self) -> None:
        left = self.runner.still_abandoned
        if left >= (self.settings.max_abandoned or self.settings.slots) and not self.claimer.stopping.is_set():
            message = "%s abandoned handlers have not ended: the worker stops, to be started again"
            log.error(message, left, extra={"event": "worn out"})
            self.stopping.worn_out = True
            self._place.worn_out() if self._place else self.stop()

    async def start(self) -> None:
        """Connect, check the schema, register, open the lifespans. Waits for a server that is not up."""
        await self.maintenance_link.first()
        session = await on_record.holds_session(self.maintenance_link, self.settings)
        if not session:
            self.sleeper = self.claimer.sleeper = None
        loop = asyncio.get_running_loop()
        self.heartbeat = Heartbeat(
            self._session_dsn if session else self.dsn,
            self.settings,
            list(self._app._names),
            json.dumps(catalogue(self._app)),
            self.book,
            session=session,
            on_cancel=lambda *said: loop.call_soon_threadsafe(self.runner.cancel, *said),
            on_given_up=lambda worker_id: loop.call_soon_threadsafe(self._given_up, worker_id),
            on_fail=lambda error: loop.call_soon_threadsafe(self._heartbeat_failed, error),
            lag=lambda: self.watchdog.lag(self) if self.watchdog else None,
        )
        check = partial(on_record.checked, self._app, self.settings.queues, self.part, not self._drains)
        await self.maintenance_link.until(partial(self.heartbeat.check, check))
        await self.claimer.link.first()
        await self.runner.handlers.open()
        if self.runner.tracing is not None:
            self.runner.tracing.opened(self.dsn, self._traced_as, self._node)
        await self.maintenance_link.until(self.heartbeat.register)
        self.watchdog = self._place.watchdog if self._place else Watchdog(loop)
        if not self._place:
            self.watchdog.start()
        self.heartbeat.start()
        self._background.start(self.finisher.run(), "finisher")

    def _heartbeat_failed(self, error: Exception) -> None:
        if self._failed is None and not self.claimer.stopping.is_set():
            log.critical("%s; the worker stops", error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failed = error
        self._claim_no_more()

    def _claim_no_more(self) -> None:
        self.claimer.stopping.set()
        self.book.changed.set()
        self.claimer.wake()

    async def run(self) -> WorkerReport:
        """Start, claim until stopped, end the running jobs. Raises ConfigError for a limit that is declared nowhere."""
        async with self.telemetry or contextlib.nullcontext():
            return await self._live()

    async def _live(self) -> WorkerReport:
        try:
            await self._begin()
            served = ", ".join(f"{q}={n}" for q, n in self.settings.queues.items())
            about = self._id(), self.settings.name, served, len(self._app.tasks)
            log.info("worker %s (%s) serves %s, tasks: %s", *about, extra={"event": "started"})
            supervisor.serves()
            if self.sleeper:
                self._background.start(self.sleeper.run(), "listener")
            if self.settings.maintenance:
                self._background.start(self.maintenance.run(), "maintenance")
                self._background.start(self.maintenance.clock.serve(), "schedules")
            else:
                log.info("no maintenance here: another worker must promote, rescue, fire schedules and prune")
            await self._claim()
            return await self.stopping.finish()
        except asyncio.CancelledError:  # the surrounding program ends: act as on a second stop
            await self.give_back()
            raise
        except QueueUnavailable:
            if not self.claimer.stopping.is_set():
                raise
            return WorkerReport(0, 0, 0, 0)  # stopped before the server could be reached
        except Exception as error:  # a bug: running jobs still get their ends
            await self.give_back()
            self._failed = self._failed or error
            raise
        finally:
            await self._close()
            if self._failed:
                expected = self.heartbeat.expected if self.heartbeat else 0
                raise await aside(on_record.explained, self._failed, self.dsn, expected)

    async def _begin(self) -> None:
        self._starting = asyncio.create_task(self.start(), name="tallybook-start")
        try:
            await self._starting
        except asyncio.CancelledError:
            self._starting.cancel()
            await asyncio.wait((self._starting,))
            if not self.claimer.stopping.is_set():
                raise
            raise QueueUnavailable(dsn_for_people(self.dsn), "stopped while starting") from None

    async def _claim(self) -> None:
        claiming = asyncio.create_task(self.claimer.run(), name="tallybook-claimer")
        try:
            await ends_or(claiming, self.claimer.stopping)
            # A server that does not answer does not delay a stop; the jobs of that claim are rescued.
            await asyncio.wait((claiming,), timeout=self.settings.abort_timeout.total_seconds())
        finally:
            claiming.cancel()
            self.book.rests()
        with contextlib.suppress(asyncio.CancelledError):
            await claiming

    async def give_back(self) -> None:
        """Abort running jobs and store their ends, for a caller that cancels a worker or a drain."""
        self.claimer.stopping.set()
        self.stopping.abort()
        await self.stopping.finish()

    def stop(self) -> None:
        """Claim nothing more and finish the running jobs; on a second call, abort them."""
        if self.claimer.stopping.is_set():
            log.warning("stopping now: running jobs are aborted and returned to their queues")
            self.stopping.abort()
            return
        log.info("stopping: waiting for %s running jobs (a second signal aborts them)", len(self.book.running))
        self._claim_no_more()
        self.claimer.link.giving_up.set()
        if not self._id():  # still waiting for the server
            self.maintenance_link.giving_up.set()
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()  # a lifespan may wait for something that never comes

    async def _close(self) -> None:
        if self.watchdog and not self._place:
            self.watchdog.stop()
        await self._background.cancel()
        for link in self.links.values():  # if the server does not answer, nothing waits for it any more
            link.cut()
        await end(self._background.tasks)
        if self.heartbeat:
            await self.heartbeat.leave(self.maintenance_link)
        if self.runner.tracing is not None:
            self.runner.tracing.closed(self._traced_as)
        await self.runner.close()
        await self.atomic.close()
        await self.finisher.doubtful.close()
        if self.sleeper:
            await self.sleeper.close()
        await self.maintenance.clock.queries.close()
        for link in self.links.values():
            await link.close()
