"""The step between a claim and the start of its jobs: it holds jobs that must not start, or not yet.

A claim returns the next jobs in line. Changes to a job since it was queued are read after the claim has committed. The
job may be cancelled, expired, postponed, being changed by a producer, held by a limit, or waiting for another job with
its order key. All of these are rare; for other jobs this costs one check of a null.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tallybook._worker.claim.suspects import Suspects
from tallybook._worker.finish.finisher import Finisher
from tallybook._worker.jobs import Book, Running, spawn
from tallybook._worker.settings import FAR_AHEAD
from tallybook.errors import QueueUnavailable

log = logging.getLogger("tallybook.worker")

_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0
# The verb of an end that the admission itself caused, by the job's state now.
_ENDS = {"cancelled": "cancel", "dead": "expire", "available": "postpone"}
_ANOTHERS = ("ended", None, None, None, None, None, None)
# A job whose queue entry is being moved by an open transaction is put aside after this time, to free its slot.
_PATIENCE = 1.0
# The most seconds that a start, once admitted by a limit, is put ahead because this process was too busy to start it.
_BUSY_AHEAD = 0.3
# Each key of one question takes a server lock, and the server's lock table holds some thousands.
_LARGEST_QUESTION = 100


@dataclass(eq=False)
class Admission:
    _suspects: Suspects
    _finisher: Finisher
    _book: Book
    _ask: Callable[[str, Sequence[bytes | None]], Awaitable[tuple[float, list[tuple[Any, ...]]]]]
    started: int = 0
    """How many jobs were started from here."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a job has left the admission."""
    _waiting: dict[int, Running] = field(default_factory=dict)
    _missed: list[Running] = field(default_factory=list)
    _ahead: float = 0.0
    _looks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._book.on.missed, self._book.held = self.missed, self._waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def admit(self, jobs: list[Running]) -> list[Running]:
        """Return the jobs that may start now; the others end here, or start later."""
        later = [job for job in jobs if job.blocked_by is not None]
        if not later:
            return jobs
        for job in later:
            if (old := self._waiting.get(job.job_id)) is not None:  # a server crash undid its claim
                self._let_go(old)
                self._book.ended(old.lease)
            self._waiting[job.job_id] = job
        later.sort(key=lambda job: job.job_id)  # every caller that ends jobs uses this order
        spawn(self._looks, self._look(later), "tallybook-admission")
        return [job for job in jobs if job.blocked_by is None]

    def _let_go(self, job: Running) -> None:
        self._waiting.pop(job.job_id, None)
        self.moved.set()
        self._book.freed(job)

    async def _look(self, jobs: list[Running], *, missed: bool = False) -> None:
        """Ask until each job has ended, has started or has a start time; the first question passes what is known."""
        again, wait, until = False, 0.0, asyncio.get_running_loop().time() + _PATIENCE
        while jobs:
            left: list[Running] = []
            for first in range(0, len(jobs), _LARGEST_QUESTION):
                some = jobs[first : first + _LARGEST_QUESTION]
                known = None if again else ["limit" if missed else job.blocked_by for job in some]
                patient = asyncio.get_running_loop().time() < until
                try:
                    left += await self._ask_for(some, known, patient=patient, missed=missed)
                except QueueUnavailable:  # the worker stops: give_back returns them
                    return
                except Exception:  # on any error ask again: nothing else will start these jobs
                    log.exception("%s claimed jobs cannot start yet", len(some))
                    wait = _LONGEST_WAIT
                    left += some
            again, missed = True, False
            if left:
                wait = min(max(wait * 1.5, _FIRST_WAIT), _LONGEST_WAIT)
                await asyncio.sleep(wait)
            jobs = [job for job in left if self._waiting.get(job.job_id) is job]

    async def _ask_for(
        self, jobs: list[Running], known: list[str | None] | None, *, patient: bool, missed: bool
    ) -> list[Running]:
        """Start the jobs that may start, each at its time; return the rest, which must be asked for again."""
        loop = asyncio.get_running_loop()
        params = (
            array([job.lease.lease for job in jobs]),
            array([job.job_id for job in jobs]),
            array([job.attempt for job in jobs]),
            None if known is None else array(known),
            b"t" if patient else b"f",
            b"%.4f s" % self._ahead,
            b"t" if missed else b"f",
        )
        asked, rows = await self._ask("admit", params)
        found = {row[0]: row[1:] for row in rows}
        left, start = [], []
        for job in jobs:
            if self._waiting.get(job.job_id) is not job:  # let go meanwhile: claimed again after a server crash
                continue
            verdict, said, starts_in, late, permits, args, options = found.get(job.job_id, _ANOTHERS)
            if args is not None:
                job.changed(args, options)
            if permits:
                job.holds_permits()
            if verdict == "wait":
                left.append(job)
            elif verdict == "unknown":
                hint = "declare it with app.rate_limit, app.concurrency_limit or app.breaker"
                error = {"type": "UnknownLimit", "message": f"there is no limit {said!r}: {hint}"}
                self._suspects.runner.cannot_start(job, error)
                self._let_go(job)
            elif verdict == "ended":
                self._end(job, said)
            elif late is None:
                start.append(job)
            else:  # count from the answer: never early, however long the answer took
                loop.call_later(starts_in, self._on_time, job, asked + starts_in + late)
        if any(row[4] is not None for row in rows):
            # The recent answer times, so that a start is not past before its answer arrives.
            self._ahead = min(max(0.8 * self._ahead, 1.5 * (loop.time() - asked) - 0.01, 0.0), FAR_AHEAD)
        self._start(start)
        return left

    def _end(self, job: Running, said: str | None) -> None:
        """Let go of a job whose attempt has ended in the database."""
        self._let_go(job)
        if verb := _ENDS.get(said or ""):
            self._finisher.ended(job, verb, said or "")
            return
        self._book.ended(job.lease, 1)
        if said == "scheduled":
            self._finisher.counts[said] += 1

    def _on_time(self, job: Running, latest: float) -> None:
        """Start a job that a limit has admitted for now; after `latest`, on the loop's clock, it has to ask again."""
        if self._waiting.get(job.job_id) is not job:
            return
        job.latest = latest
        if asyncio.get_running_loop().time() <= latest:
            self._start([job])
        else:
            self._miss(job)

    def missed(self, job: Running) -> None:
        """Take back a job that was started too late: the loop was busy before its handler could begin."""
        self.started -= 1
        self._waiting[job.job_id] = job
        self._miss(job)

    def _miss(self, job: Running) -> None:
        assert job.latest is not None
        late = asyncio.get_running_loop().time() - job.latest
        self._ahead = max(self._ahead, min(2 * late, _BUSY_AHEAD))
        self._missed.append(job)
        if len(self._missed) == 1:  # the first late job in this turn of the loop asks for all
            spawn(self._looks, self._ask_again(), "tallybook-admission")

    async def _ask_again(self) -> None:
        jobs, self._missed = [job for job in self._missed if self._waiting.get(job.job_id) is job], []
        await self._look(jobs, missed=True)

    def _start(self, jobs: list[Running]) -> None:
        if jobs:
            for job in jobs:
                del self._waiting[job.job_id]
            for job in self._book.surplus(jobs):
                self._suspects.give_back(job)
            self.started += len(jobs)
            self.moved.set()
            self._suspects.admit(jobs)

    def give_back(self) -> list[Running]:
        """Return the waiting jobs, which will not be started: the worker stops or was given up for dead."""
        left = [*self._waiting.values(), *self._suspects.take()]
        self._waiting.clear()
        for look in self._looks:
            look.cancel()
        return left

    def forget(self) -> None:
        """Drop the waiting jobs: other workers have them now."""
        for job in self.give_back():
            self._let_go(job)
            self._book.ended(job.lease, 1)


def array(values: Sequence[object]) -> bytes:
    return ("{" + ",".join("null" if value is None else str(value) for value in values) + "}").encode()
