"""Suspects: jobs that were running when their workers died, and would be dead after one more crash. They run alone.

A worker that dies takes all its running jobs with it, and the server cannot tell which of them caused it. So at first
all of them run again as usual. A job that was there once too often runs while this process holds nothing else. If the
process dies again, the job was alone and is dead as crashed; otherwise it ends normally. The database has the same rule
(see _lost.sql): a crash makes a job dead only if its worker held nothing else.

While a suspect waits for the process to become idle, and while it runs, nothing is claimed. If the process does not
become idle, the suspect is given back, to be tried later or by another worker. A task's own process is alone anyway.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from tallybook._worker.claim.shares import SharedBook
from tallybook._worker.finish.finisher import Finisher, unclaim
from tallybook._worker.jobs import Book, Running
from tallybook._worker.run.runner import Runner

log = logging.getLogger("tallybook.worker")

CRASH_LIMIT = 3
"""This many crashes make a job dead: the default of rescue and crash."""
# Seconds until a suspect that could not run alone here is tried again; random, so that they do not all come at once.
_AGAIN = (3.0, 6.0)
# If the process did not become idle once, suspects do not wait for it again for this many times `suspect_wait`.
_BUSY_FOR = 10


@dataclass(eq=False)
class Suspects:
    """Starts claimed jobs; a suspect only when it is alone. `patience` is in seconds."""

    book: Book
    runner: Runner
    finisher: Finisher
    patience: float
    stopping: asyncio.Event
    on_found: Callable[[], object]
    careful: bool = False
    """More suspects may be in line: claim one job at a time."""
    _busy_until: float = 0.0
    found: list[Running] = field(default_factory=list)
    """Suspects that `admit` has kept; each holds a slot that only `start_found` uses."""
    _first: Running | None = None

    def most(self, limit: int | None = None) -> int | None:
        """Return how many of `limit` jobs the next claim may take; None: as many as there are slots."""
        return 1 if self.careful and limit != 0 else limit

    def admit(self, jobs: list[Running]) -> None:
        """Start these jobs, for a caller that cannot wait; keep suspects among them for `start_found`."""
        suspects, others = self._apart(jobs)
        if suspects:
            self.found.extend(suspects)
            self.book.changed.set()
            self.on_found()
        self.runner.start(others)

    def take(self) -> list[Running]:
        """Return the suspects that are held here, for a caller that gives them back."""
        found = [*self.found, *filter(None, (self._first,))]
        self.found, self._first = [], None
        return found

    async def start_found(self, *, until: float | None = None) -> None:
        while self.found and not self.stopping.is_set():
            found, self.found = self.found, []
            await self.start(found, until=until)

    def _apart(self, jobs: list[Running]) -> tuple[list[Running], list[Running]]:
        """Return those of these jobs that have to run alone, and the others."""
        # If another node's suspect may run beside it, a process of its own is not enough: see take_turn.
        shared = isinstance(self.book, SharedBook)
        alone = [j for j in jobs if j.crashes >= CRASH_LIMIT - 1 and (shared or not self.runner.isolated(j))]
        return (alone, [job for job in jobs if job not in alone]) if alone else ([], jobs)

    async def start(self, jobs: list[Running], *, until: float | None = None) -> None:
        """Start these jobs; return when a suspect among them has ended, or was not alone by `until` (monotonic)."""
        suspects, rest = self._apart(jobs)
        self.runner.start(rest)
        if not suspects:
            self.careful = False
            return
        first, *others = suspects
        for job in others:  # in this process they would die with it
            self.give_back(job)
        self.careful = bool(others) or self.careful
        self.book.rests()
        try:
            await self._start_alone(first, until)
        finally:
            self.book.end_turn()

    async def _start_alone(self, first: Running, until: float | None) -> None:
        self._first = first
        alone = self.book.take_turn() and await self._idle_but_for(first, until)
        if self._first is not first:  # given back, or taken over by now
            return
        self._first = None
        if not alone:
            later = 0.0 if self.stopping.is_set() else random.uniform(*_AGAIN)
            self.give_back(first, timedelta(seconds=later))
            self.careful = False
            return
        log.warning(
            "%s %s was running when %s workers died: it runs alone now, and nothing is claimed meanwhile",
            first.task_name, first.job_id, first.crashes, extra={"event": "suspect", "job": first.job_id},
        )  # fmt: skip
        self.runner.start([first])
        await self.book.until(lambda: first.job_id not in self.book.running, until, self.stopping.is_set)

    def give_back(self, job: Running, delay: timedelta = timedelta(0)) -> None:
        """Give back a job that was claimed but never started."""
        self.finisher.end(job, unclaim(delay))
        self.book.freed(job)

    async def _idle_but_for(self, job: Running, until: float | None) -> bool:
        """Wait until this process has no other attempt, running or unstored; return whether that came in time."""

        def alone() -> bool:
            leases = self.book.leases.values()
            return self._first is not job or (not self.book.running and sum(lease.left for lease in leases) == 1)

        if alone():
            return True
        now = time.monotonic()
        limit = min(now + (self.patience if now >= self._busy_until else 0.0), until or now + self.patience)
        if await self.book.until(alone, limit, self.stopping.is_set):
            return not self.stopping.is_set()
        if now >= self._busy_until and not self.stopping.is_set() and until is None:
            log.warning(
                "%s %s must run alone, but this process did not become idle in %g s: the job is returned behind others",
                job.task_name, job.job_id, self.patience,
            )  # fmt: skip
            self._busy_until = time.monotonic() + _BUSY_FOR * self.patience
        return False
