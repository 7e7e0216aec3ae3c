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
        if not await self.ended_within(self._settings.stop_timeout.total_seconds(), unless_aborted=True):
            self._runner.abort()
            await self.ended_within(self._settings.abort_timeout.total_seconds())
        # A thread cannot be killed: the end that it may still send is refused.
        for job in list(self._book.running.values()):
            self._give_back_one(job)
            self._runner.leave(job)
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
        if not await self.ended_within(seconds):
            self._runner.abort()
            await self.ended_within(5.0)
        held = self._admission.give_back()
        for job in [*held, *self._book.running.values()]:
            self._give_back_one(job)
            if job not in held:  # it ignores its cancel: whatever it still does is ignored
                self._runner.leave(job)
        return len(held)

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

    async def ended_within(self, seconds: float, *, unless_aborted: bool = False) -> bool:
        """Return whether all handlers have ended within this time; `unless_aborted`: False at once after an abort."""
        until = time.monotonic() + seconds
        return await self._book.until(lambda: not self._book.running, until, lambda: unless_aborted and self.aborted)
