"""Between a claim and the start of its jobs: those that must not start, or not yet.

A claim hands out what stands in line. What has happened to a job since it was put there is read after the claim has
committed: it was cancelled, it has expired, it was given a later time, a producer is just changing it, another job
with its order key has its turn, or a limit holds it. All of that is rare; for the rest this is one look at a null.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

from tallybook._worker.claim.suspects import Suspects
from tallybook._worker.finish.finisher import Finisher
from tallybook._worker.jobs import Book, Running
from tallybook._worker.run.runner import Runner
from tallybook._worker.settings import FAR_AHEAD
from tallybook.errors import QueueUnavailable

log = logging.getLogger("tallybook.worker")

_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0
# What an end that the admission itself has brought is called elsewhere, by what the job is now.
_ENDS = {"cancelled": "cancel", "dead": "expire", "available": "postpone"}
_ANOTHERS = ("ended", None, None, None, None, None, None)
# Then a job whose line is being moved by a transaction that stays open is put aside: it would only hold a slot.
_PATIENCE = 1.0
# So many seconds a start that a limit lets through is put ahead at most, where this process was too busy to start it.
_BUSY_AHEAD = 0.3
# Each key of one question is a lock of the server's, whose table of them has room for some thousands.
_LARGEST_QUESTION = 100


class Admission:
    def __init__(
        self,
        suspects: Suspects,
        finisher: Finisher,
        book: Book,
        runner: Runner,
        ask: Callable[[str, Sequence[bytes | None]], Awaitable[tuple[float, list[tuple[Any, ...]]]]],
    ) -> None:
        self._suspects = suspects
        self._finisher = finisher
        self._book = book
        self._runner = runner
        book.on.missed = self.missed
        self._ask = ask
        self._waiting: dict[int, Running] = {}
        book.held = self._waiting
        self._missed: list[Running] = []
        self._ahead = 0.0
        self._looks: set[asyncio.Task[None]] = set()
        self.moved = asyncio.Event()
        """Set when a job has left."""
        self.started = 0
        """How many jobs have started from here."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def admit(self, jobs: list[Running]) -> list[Running]:
        """Those that may start now; the others end, or start later by themselves."""
        start: list[Running] = []
        later: list[Running] = []
        for job in jobs:
            (start if job.blocked_by is None else later).append(job)
        if later:
            for job in later:
                if (old := self._waiting.get(job.job_id)) is not None:  # a crash has taken its claim back
                    self._let_go(old)
                    self._book.ended(old.lease)
                self._waiting[job.job_id] = job
            later.sort(key=lambda job: job.job_id)  # all who end jobs do so in this order
            self._follow(self._look(later, [job.blocked_by for job in later]))
        return start

    def _follow(self, looking: Coroutine[Any, Any, None]) -> None:
        look = asyncio.create_task(looking, name="tallybook-admission")
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    def _let_go(self, job: Running) -> None:
        self._waiting.pop(job.job_id, None)
        self.moved.set()
        self._book.freed(job)

    async def _look(self, jobs: list[Running], known: list[str | None] | None, *, missed: bool = False) -> None:
        """Ask again and again until each of these has ended, has started or waits for its moment; at first with what is known."""
        wait, until = 0.0, asyncio.get_running_loop().time() + _PATIENCE
        while jobs:
            left: list[Running] = []
            for first in range(0, len(jobs), _LARGEST_QUESTION):
                some = jobs[first : first + _LARGEST_QUESTION]
                said = None if known is None else known[first : first + _LARGEST_QUESTION]
                patient = asyncio.get_running_loop().time() < until
                try:
                    left += await self._ask_for(some, said, patient=patient, missed=missed)
                except QueueUnavailable:  # the worker stops: give_back deals with them
                    return
                except Exception:  # whatever it is, they are asked for again: nobody else knows of them
                    log.exception("%s claimed jobs cannot start yet", len(some))
                    wait = _LONGEST_WAIT
                    left += some
            known, missed = None, False
            if left:
                wait = min(max(wait * 1.5, _FIRST_WAIT), _LONGEST_WAIT)
                await asyncio.sleep(wait)
            jobs = [job for job in left if self._waiting.get(job.job_id) is job]

    async def _ask_for(
        self, jobs: list[Running], known: list[str | None] | None, *, patient: bool, missed: bool
    ) -> list[Running]:
        """Start what may start, each at its moment; what is left has to be asked for again."""
        loop = asyncio.get_running_loop()
        params = (
            _array([job.lease.lease for job in jobs]),
            _array([job.job_id for job in jobs]),
            _array([job.attempt for job in jobs]),
            None if known is None else _array(known),
            b"t" if patient else b"f",
            b"%.4f s" % self._ahead,
            b"t" if missed else b"f",
        )
        asked, rows = await self._ask("admit", params)
        found = {row[0]: row[1:] for row in rows}
        left, start = [], []
        for job in jobs:
            verdict, said, starts_in, late, permits, args, options = found.get(job.job_id, _ANOTHERS)
            if args is not None:
                job.changed(args, options)
            if permits:
                job.holds_permits()
            if verdict == "wait":
                left.append(job)
            elif verdict == "unknown":
                self._runner.cannot_start(job, _no_such_limit(said))
                self._let_go(job)
            elif verdict == "ended":
                self._end(job, said)
            elif late is None:
                start.append(job)
            else:  # from the answer on: not before its time, whatever the way back took
                loop.call_later(starts_in, self._on_time, job, asked + starts_in + late)
        if any(row[4] is not None for row in rows):
            # What the answers took lately, so that a start is not over before its answer is here.
            self._ahead = min(max(0.8 * self._ahead, 1.5 * (loop.time() - asked) - 0.01, 0.0), FAR_AHEAD)
        self._start(start)
        return left

    def _end(self, job: Running, said: str | None) -> None:
        """Its attempt is over in the database."""
        self._let_go(job)
        if verb := _ENDS.get(said or ""):
            self._finisher.ended(job, verb, said or "")
            return
        self._book.ended(job.lease, 1)
        if said == "scheduled":
            self._finisher.counts[said] += 1

    def _on_time(self, job: Running, latest: float) -> None:
        """Start a job that a limit has let through for now; after `latest`, on the loop's clock, it has to ask again."""
        if self._waiting.get(job.job_id) is not job:
            return
        job.latest = latest
        if asyncio.get_running_loop().time() <= latest:
            self._start([job])
        else:
            self._miss(job)

    def missed(self, job: Running) -> None:
        """The loop was busy between this job's start here and its handler's."""
        self.started -= 1
        self._waiting[job.job_id] = job
        self._miss(job)

    def _miss(self, job: Running) -> None:
        assert job.latest is not None
        late = asyncio.get_running_loop().time() - job.latest
        self._ahead = max(self._ahead, min(2 * late, _BUSY_AHEAD))
        self._missed.append(job)
        if len(self._missed) == 1:  # the first of those that are late in this turn of the loop asks for all
            self._follow(self._ask_again())

    async def _ask_again(self) -> None:
        jobs, self._missed = [job for job in self._missed if self._waiting.get(job.job_id) is job], []
        await self._look(jobs, ["limit"] * len(jobs), missed=True)

    def _start(self, jobs: list[Running]) -> None:
        if jobs:
            for job in jobs:
                del self._waiting[job.job_id]
            for job in self._book.surplus(jobs):
                self._finisher.unclaim(job, timedelta(0))
                self._book.freed(job)
            self.started += len(jobs)
            self.moved.set()
            self._suspects.admit(jobs)

    def give_back(self) -> list[Running]:
        """What waits here, for a worker that stops or was given up; it is not started any more."""
        left = [*self._waiting.values(), *self._suspects.take()]
        self._waiting.clear()
        for look in self._looks:
            look.cancel()
        return left

    def forget(self) -> None:
        """What waits here was given to others."""
        for job in self.give_back():
            self._let_go(job)
            self._book.ended(job.lease, 1)


def _array(values: Sequence[object]) -> bytes:
    return ("{" + ",".join("null" if value is None else str(value) for value in values) + "}").encode()


def _no_such_limit(name: str) -> dict[str, Any]:
    return {
        "type": "UnknownLimit",
        "message": f"there is no limit {name!r}: declare it by app.rate_limit, app.concurrency_limit or app.breaker",
    }
