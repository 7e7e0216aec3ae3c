"""The life of a worker: start, run, stop on the first signal, abort on the second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import psycopg

from tallybook._db import migrate, rates
from tallybook._db.link import CONNECT, Link, dsn_for_people
from tallybook._db.schema import UNDEFINED, refusal
from tallybook._upkeep import rebase
from tallybook._upkeep.clock import Clock, ClockWatch
from tallybook._upkeep.concurrency import Permits
from tallybook._upkeep.fairness import FairRelease
from tallybook._upkeep.fold import FOLD, Folder
from tallybook._upkeep.loop import Upkeep
from tallybook._upkeep.parents import Parents
from tallybook._upkeep.promote import Promoter
from tallybook._upkeep.prune import Pruner
from tallybook._upkeep.rescue import Rescuer
from tallybook._worker.claim.claimer import Claimer
from tallybook._worker.claim.limits import check_limits
from tallybook._worker.claim.sleeper import CANCEL, DEAL, PLACES, SCHEDULE, SETTLE, Sleeper
from tallybook._worker.finish.finisher import Finisher
from tallybook._worker.jobs import Book
from tallybook._worker.life import pooler_check
from tallybook._worker.life.heartbeat import STOP, Heartbeat
from tallybook._worker.life.telemetry import Telemetry
from tallybook._worker.life.watchdog import Watchdog
from tallybook._worker.run import children
from tallybook._worker.run.atomic import Atomic
from tallybook._worker.run.runner import Runner
from tallybook._worker.run.verbs import Verbs
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import NotSupported, QueueUnavailable, SchemaError

if TYPE_CHECKING:
    from tallybook._app import App

log = logging.getLogger("tallybook.worker")

_TWINS = """\
select n.name, t.app, t.definition ->> 'queue' from tallybook.tasks t, unnest(t.aliases || t.name) n(name)
 where t.app <> %s and n.name = any (%s) order by n.name"""


@dataclass(frozen=True)
class WorkerReport:
    """What a worker did in its life."""

    completed: int
    failed: int
    """Attempts that failed and go on after a backoff."""
    dead: int
    released: int
    """Jobs that were given back unfinished at the stop."""
    abandoned: int = 0
    """Handlers that did not end after their deadline and the grace."""
    worn_out: bool = False
    """It stopped by itself, since too many abandoned handlers were left: start the process again."""
    snoozed: int = 0
    """Attempts that were put off, by their handlers or by a limit; they count as no attempts."""


class Worker:
    """One process's worker. `run` lives until `stop`."""

    def __init__(self, app: App, dsn: str, settings: WorkerSettings, *, keeps_error: bool = False) -> None:
        self.settings = settings
        self.dsn = dsn
        self.book = Book(dict(settings.queues))
        self.finishes = Link(dsn, settings.name)
        self.upkeep = Link(dsn, settings.name, on_connect=rebase.on_connect)
        self.finisher = Finisher(self.finishes, self.book, on_scheduled=self._on_scheduled)
        if children.importing_main:
            hint = "Write `if __name__ == '__main__':` before what starts it"
            raise NotSupported("a worker is started while a process of another one imports this program", hint=hint)
        self.handlers = Link(dsn, settings.name)
        self.atomic = Atomic(app, dsn, settings.name)
        self.runner = Runner(
            app,
            self.book,
            self.finisher,
            Verbs(self.handlers, app),
            threads=settings.slots,
            worker_name=settings.name,
            grace=settings.abort_timeout,
            on_abandoned=self._abandoned,
            atomic=self.atomic,
            keeps_error=keeps_error,
        )
        self._session_dsn = settings.direct_dsn or dsn
        self.sleeper = (
            Sleeper(self._session_dsn, settings.name, list(settings.queues), on_word=self._on_word)
            if settings.notify
            else None
        )
        self.promoter = Promoter(self.upkeep, on_promoted=self._wake)
        self.rescuer = Rescuer(self.upkeep, lease=settings.lease, every=settings.rescue_look, on_rescued=self._wake)
        self.parents = Parents(self.upkeep, self.promoter.told, on_released=self._wake)
        self.finisher.on_followed = self.parents.ended
        self.permits = Permits(self.upkeep, self.promoter.told, on_released=self._wake)
        self.finisher.on_permits = self.permits.ended
        self.fairness = FairRelease(self.upkeep, self.promoter.told, on_released=self._wake)
        self.folder = Folder(self.upkeep)
        self.rebaser = rebase.Rebaser(self.upkeep, on_rebased=self._wake)
        self.pruner = Pruner(self.upkeep)
        self.clock = Clock(
            self.upkeep,
            Link(dsn, settings.name),
            app=app.name,
            declared=app._declared_schedules,
            on_fired=self._wake,
        )
        self.heartbeat: Heartbeat | None = None
        self.claimer = Claimer(
            dsn,
            settings,
            self.book,
            self.runner,
            self.finisher,
            self.sleeper,
            worker_id=self._id,
            on_many=self._beat_now,
            on_foreign=self._foreign,
            on_fair=self.fairness.soon,
        )
        watch = ClockWatch(self.clock)
        self.services = Upkeep(
            self.upkeep,
            [
                self.promoter,
                self.rescuer,
                self.rebaser,
                self.parents,
                self.permits,
                self.fairness,
                self.folder,
                self.pruner,
                watch,
            ],
            self.promoter,
            self.rescuer,
            watch,
            worker_id=self._id,
            idle_queues=self.claimer.idle_queues,
            on_looked=self.claimer.looked,
        )
        app._check_policies()
        app._check_tasks()
        self.watchdog: Watchdog | None = None
        self.telemetry = Telemetry(settings, dsn, self) if settings.metrics_port is not None else None
        self.worn_out = False
        self._app = app
        self._aborted = asyncio.Event()
        self._services: list[asyncio.Task[None]] = []

    def why_not_ready(self) -> str:
        """Why it takes no jobs now; empty: it does. Asked from the thread of the telemetry."""
        if self._failed is not None:
            return f"failed: {type(self._failed).__name__}"
        if self.claimer.stopping.is_set():
            return "stopping"
        if not self._id():
            return "starting: it is not on record yet"
        links = {"claims": self.claimer.link, "ends": self.finishes, "upkeep": self.upkeep}
        away = ", ".join(what for what, link in links.items() if link.away)
        return f"no connection to the database: {away}" if away else ""

    def _id(self) -> int:
        return self.heartbeat.worker_id if self.heartbeat else 0

    def _given_up(self, worker_id: int) -> None:
        # In one step of the loop: no claim under the new number can come before the old one's jobs are told.
        self.runner.lost()
        self.claimer.admission.forget()
        assert self.heartbeat is not None
        self.heartbeat.worker_id = worker_id
        self._wake()  # the last wake-up may have gone into a claim that was refused

    async def _foreign(self) -> bool:
        # The database was replaced under the claimer's connection, or its data came without the row in installation.
        return (await self.rebaser.look(cursors=True)).rebased

    def _beat_now(self) -> None:
        if self.heartbeat:
            self.heartbeat.beat_now()

    def _wake(self) -> None:
        self.claimer.wake()

    def _abandoned(self) -> None:
        left = self.runner.still_abandoned
        if left >= self.settings.most_abandoned and not self.claimer.stopping.is_set():
            log.error(
                "%s abandoned handlers are still there: the worker stops, to be started again",
                left,
                extra={"event": "worn out"},
            )
            self.worn_out = True
            self.stop()

    def _on_word(self, word: str) -> None:
        if word == CANCEL:
            self._beat_now()
        elif word == SCHEDULE:
            self.clock.changed()
        elif word == SETTLE:
            self.parents.soon()
        elif word == PLACES:
            self.permits.soon()
        elif word == DEAL:
            self.fairness.soon()
        else:
            self.promoter.at_latest_in(0, behind=True)

    def _on_scheduled(self, delay: Any) -> None:
        self.promoter.at_latest_in(delay.total_seconds())

    async def start(self) -> None:
        """Connect, check the schema, go on record, open the lifespans. Waits for a server that is not up."""
        await self.upkeep.first()
        await self.upkeep.until(self._check_schema)
        session = await pooler_check.hold(self.upkeep, self.settings)
        if not session:
            self.sleeper = None
            self.claimer.only_poll()
        await self.claimer.link.first()
        await self.runner.handlers.open()
        if self.runner.tracing is not None:
            self.runner.tracing.opened(self.dsn, self.settings.name)
        loop = asyncio.get_running_loop()
        self.heartbeat = Heartbeat(
            self._session_dsn if session else self.dsn,
            self.settings,
            list(self._app._names),
            self.book,
            session=session,
            on_cancel=lambda *said: loop.call_soon_threadsafe(self.runner.cancel, *said),
            on_given_up=lambda worker_id: loop.call_soon_threadsafe(self._given_up, worker_id),
            on_schema=lambda error: loop.call_soon_threadsafe(self._schema_changed, error),
            catalogue=self._app._catalogue(),
            expected=self._expected,
            lag=lambda: self.watchdog.lag() if self.watchdog else None,
        )
        await self.upkeep.until(self.heartbeat.register)
        self.watchdog = Watchdog(loop)
        self.watchdog.start()
        self.heartbeat.start()
        self._serve(self.finisher.run(), "finisher")

    def _check_schema(self) -> None:
        with psycopg.connect(self.dsn, connect_timeout=10, autocommit=True) as conn:
            self._expected = migrate.check(conn).expected
            self._warn_of_twins(conn)
            said = rates.registered(
                self._app._rate_rules.values(), self._app._concurrency_rules.values(), self._app._breaker_rules.values()
            )
            conn.execute(rates.REGISTER, (self._app.name, said))
            if self._lives:
                check_limits(self._app.tasks.values(), conn.execute(rates.NAMES).fetchone())
            known = [row[0] for row in conn.execute("select name from tallybook.queues")]
        for queue in self.settings.queues:
            if queue not in known and (near := get_close_matches(queue, known, 1, 0.75)):
                log.warning(
                    "no job was ever put into queue %r; did you mean %r? It is served all the same", queue, near[0]
                )

    def _warn_of_twins(self, conn: psycopg.Connection[Any]) -> None:
        """Two apps with one task name would run each other's jobs on one queue; the catalogue has one entry for both."""
        for name, app, queue in conn.execute(_TWINS, (self._app.name, list(self._app._names))).fetchall():
            both = " It has the same queue there: each runs jobs that are meant for the other." * (
                queue == self._app._names[name].queue
            )
            log.warning(
                "task %r is on record as one of app %r, not of app %r.%s Give one of them another name, unless the app was renamed",
                name, app, self._app.name, both,
            )  # fmt: skip

    def _schema_changed(self, error: SchemaError) -> None:
        if self._failed is None and not self.claimer.stopping.is_set():
            log.critical("%s: the worker stops", error)
            self._failed = error
            self.claimer.stopping.set()
            self.book.changed.set()
            self._wake()

    def _explained(self, error: BaseException) -> BaseException:
        """What is missing in the schema may be so because it is another one by now; then that is the error."""
        if not isinstance(error, psycopg.Error) or error.sqlstate not in UNDEFINED:
            return error
        with contextlib.suppress(psycopg.Error), psycopg.connect(self.dsn, **CONNECT) as conn:
            return refusal(conn, self._expected) or error
        return error

    def _serve(self, service: Any, name: str) -> None:
        running = asyncio.create_task(service, name=f"tallybook-{name}")
        running.add_done_callback(self._service_ended)
        self._services.append(running)

    def _service_ended(self, service: asyncio.Task[None]) -> None:
        if not service.cancelled() and (error := service.exception()):
            # A service that ends is a defect of ours: do not go on without it as if nothing were.
            log.critical("%s failed, the worker stops", service.get_name(), exc_info=error)
            self._failed = error
            self.claimer.stopping.set()
            self.book.changed.set()
            self._wake()

    _failed: BaseException | None = None
    _expected = 0
    _lives = False
    """Not only for one drain: what is wrong with the program stops it now."""
    _starting: asyncio.Task[None] | None = None

    async def run(self) -> WorkerReport:
        """Start, claim until told to stop, end what runs. ConfigError: a limit that is declared nowhere."""
        self._lives = True
        if self.telemetry is None:
            return await self._live()
        self.telemetry.listen()
        try:
            return await self._live()
        finally:
            await self.telemetry.close()

    async def _live(self) -> WorkerReport:
        try:
            await self._begin()
            log.info(
                "worker %s (%s) serves %s with %s tasks",
                self._id(),
                self.settings.name,
                ", ".join(f"{q}={n}" for q, n in self.settings.queues.items()),
                len(self._app.tasks),
                extra={"event": "started"},
            )
            if self.sleeper:
                self._serve(self.sleeper.run(), "listener")
            self._serve(self.services.run(), "upkeep")
            self._serve(self.clock.serve(), "schedules")
            await self._claim()
            return await self._finish()
        except asyncio.CancelledError:  # the program that runs us ends: what a second stop does
            await self.give_back()
            raise
        except QueueUnavailable:
            if not self.claimer.stopping.is_set():
                raise
            return WorkerReport(0, 0, 0, 0)  # told to stop before the server could be reached
        except Exception as error:  # a defect of ours: what runs gets its end all the same
            await self.give_back()
            self._failed = self._failed or error
            raise
        finally:
            await self._close()
            if self._failed:
                raise await asyncio.to_thread(self._explained, self._failed)

    async def _begin(self) -> None:
        self._starting = asyncio.create_task(self.start(), name="tallybook-start")
        try:
            await self._starting
        except asyncio.CancelledError:
            self._starting.cancel()
            await asyncio.wait((self._starting,))
            if not self.claimer.stopping.is_set():
                raise
            raise QueueUnavailable(dsn_for_people(self.dsn), "told to stop while starting") from None

    async def _claim(self) -> None:
        claiming = asyncio.create_task(self.claimer.run(), name="tallybook-claimer")
        stopping = asyncio.create_task(self.claimer.stopping.wait())
        try:
            await asyncio.wait((claiming, stopping), return_when=asyncio.FIRST_COMPLETED)
            # A server that does not answer holds up no stop; what that claim took is rescued.
            await asyncio.wait((claiming,), timeout=self.settings.abort_timeout.total_seconds())
        finally:
            stopping.cancel()
            claiming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await claiming

    async def give_back(self) -> None:
        """Abort what runs and tell the database its end, for whoever cancels a worker or a drain."""
        self.claimer.stopping.set()
        self._aborted.set()
        await self._finish()

    def stop(self) -> None:
        """Claim nothing more and finish what runs; a second time: abort it."""
        if self.claimer.stopping.is_set():
            log.warning("stopping now: running jobs are aborted and given back")
            self._aborted.set()
            return
        log.info("stopping: finishing %s running jobs (again: now)", len(self.book.running))
        self.claimer.stopping.set()
        self.claimer.link.giving_up.set()
        if self.heartbeat is None:  # still waiting for the server
            self.upkeep.giving_up.set()
        self.book.changed.set()
        self._wake()
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()  # a lifespan may wait for something that does not come

    async def _finish(self) -> WorkerReport:
        for job in self.claimer.admission.give_back():  # claimed, and not started
            self.finisher.snooze(job, timedelta(0))
            self.book.freed(job)
        if not await self._ended_within(self.settings.stop_timeout.total_seconds(), self._aborted):
            self.runner.abort()
            await self._ended_within(self.settings.abort_timeout.total_seconds(), None)
        left = list(self.book.running.values())
        for job in left:  # a thread cannot be ended: whatever it still does, its end will be refused
            self.finisher.snooze(job, timedelta(0))
            self.book.freed(job)
            self.runner.leave(job)
        await self._told()
        counts, failed = self.finisher.counts, self.finisher.failed
        return WorkerReport(
            completed=counts["completed"],
            failed=failed["scheduled"] + failed["available"],
            snoozed=counts["scheduled"] - failed["scheduled"],
            dead=counts["dead"],
            released=len(left) + counts["available"] - failed["available"],
            abandoned=self.runner.abandoned,
            worn_out=self.worn_out,
        )

    async def _told(self) -> None:
        """Wait until the database knows every end; not for ever where it cannot be reached."""
        try:
            async with asyncio.timeout(self.settings.abort_timeout.total_seconds()):
                await self.finisher.drained()
        except TimeoutError:
            log.error("%s ends could not be told to the server; those jobs will be rescued", self.finisher.waiting)

    async def _ended_within(self, seconds: float, sooner: asyncio.Event | None) -> bool:
        until = time.monotonic() + seconds
        while self.book.running:
            left = until - time.monotonic()
            if left <= 0 or (sooner and sooner.is_set()):
                return False
            self.book.changed.clear()
            waits = [asyncio.create_task(self.book.changed.wait())]
            if sooner:
                waits.append(asyncio.create_task(sooner.wait()))
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        return True

    async def _close(self) -> None:
        if self.watchdog:
            self.watchdog.stop()
        for service in self._services:
            service.cancel()
        await asyncio.gather(*self._services, return_exceptions=True)
        if self.heartbeat and self.heartbeat.worker_id:
            # First: a beat after worker_stop would be refused, and put the worker on record again.
            self.heartbeat.stop()
            if self.heartbeat.ident is not None:  # told to stop between its registration and its start
                await asyncio.to_thread(self.heartbeat.join, 2.0)
            with contextlib.suppress(Exception):  # the others rescue it if this does not get through
                async with asyncio.timeout(5):
                    conn = await self.upkeep.connect()
                    await conn.execute(STOP.worker, (self.heartbeat.worker_id,))
                    await conn.execute(FOLD.worker, (False,))  # there may be nobody else to do it
        if self.runner.tracing is not None:
            self.runner.tracing.closed(self.settings.name)
        await self.runner.handlers.close()
        await self.atomic.close()
        await self.finisher.doubtful.close()
        if self.sleeper:
            await self.sleeper.close()
        for link in (self.claimer.link, self.finishes, self.upkeep, self.clock.queries, self.handlers):
            await link.close()
