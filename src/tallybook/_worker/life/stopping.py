"""The stop of a worker or a drain: running jobs end in time, are aborted or abandoned, and every end is stored."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from tallybook._worker.claim.admission import Admission
from tallybook._worker.finish.finisher import Finisher, snooze
from tallybook._worker.jobs import Book, Running
from tallybook._worker.run.runner import Runner
from tallybook._worker.settings import WorkerSettings

log = logging.getLogger("tallybook.worker")


@dataclass(frozen=True)
class WorkerReport:
    """The counts of a worker's life."""

    completed: int
    failed: int
    """Attempts that failed and are retried after a backoff."""
    dead: int
    released: int
    """Jobs that were given back unfinished at the stop."""
    abandoned: int = 0
    """Handlers that did not end after their deadline and the grace."""
    worn_out: bool = False
    """It stopped because too many abandoned handlers were left: start the process again."""
    snoozed: int = 0
    """Attempts that were put off, by their handlers or by a limit; they do not count as failures."""
    nodes: Mapping[str, WorkerReport] = field(default_factory=dict)
    """The same for each node, from a worker of several nodes."""


@dataclass(eq=False)
class Stopping:
    _settings: WorkerSettings
    _book: Book
    _admission: Admission
    _runner: Runner
    _finisher: Finisher
    aborted: bool = False
    """There was a second stop."""
    worn_out: bool = False
    """As in the report."""

    def abort(self) -> None:
        """Let `finish` abort running jobs now."""
        self.aborted = True
        self._book.changed.set()

    async def finish(self) -> WorkerReport:
        """Give back unstarted jobs, let handlers end, abort them after `stop_timeout`; return the worker's report."""
        for job in self._admission.give_back():  # claimed, and not started
            self._give_back_one(job)
        patience, grace = self._settings.stop_timeout, self._settings.abort_timeout
        await self._end_running(patience.total_seconds(), grace.total_seconds(), unless_aborted=True)
        await self.told()
        counts, failed = self._finisher.counts, self._finisher.failed
        return WorkerReport(
            completed=counts["completed"],
            failed=failed["scheduled"] + failed["available"],
            snoozed=counts["scheduled"] - failed["scheduled"],
            dead=counts["dead"],
            released=counts["available"] - failed["available"],
            abandoned=self._runner.abandoned,
            worn_out=self.worn_out,
        )

    async def let_go(self, seconds: float) -> int:
        """End running jobs within this time, then by force; give back unstarted jobs and return how many."""
        await self._end_running(seconds, 5.0)
        held = self._admission.give_back()
        for job in held:
            self._give_back_one(job)
        return len(held)

    async def _end_running(self, seconds: float, grace: float, *, unless_aborted: bool = False) -> None:
        """Let handlers end within this time, then abort them, and leave those that ignore it for the grace."""
        running, until = self._book.running, self._book.until
        if not await until(lambda: not running, time.monotonic() + seconds, lambda: unless_aborted and self.aborted):
            self._runner.abort()
            await until(lambda: not running, time.monotonic() + grace, lambda: False)
        # A thread cannot be killed: the end that it may still send is refused.
        for job in list(self._book.running.values()):
            self._give_back_one(job)
            self._runner.leave(job)

    def _give_back_one(self, job: Running) -> None:
        self._finisher.end(job, snooze(timedelta(0)))
        self._book.freed(job)

    async def told(self) -> None:
        """Wait until the database has every end, up to `abort_timeout`."""
        try:
            async with asyncio.timeout(self._settings.abort_timeout.total_seconds()):
                await self._finisher.drained()
        except TimeoutError:
            unsent = sum(lease.left for lease in self._book.leases.values())
            log.error("%s outcomes could not be sent to the server; those jobs will be rescued", unsent)
