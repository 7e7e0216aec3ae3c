"""Between a claim and the start of its jobs: those that must not start, or not yet.

A claim hands out what stands in line. What has happened to a job since it was put there is read after the claim has
committed: it was cancelled, it has expired, it was given a later time, a producer is just changing it, another job
with its order key has its turn, or a limit holds it. All of that is rare; for the rest this is one look at a null.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from tallybook._worker.finisher import Finisher
from tallybook._worker.jobs import Book, Running
from tallybook._worker.runner import Runner
from tallybook._worker.suspects import Suspects
from tallybook.errors import QueueUnavailable

log = logging.getLogger("tallybook.worker")

CANCELLED, EXPIRED, PUT_OFF, BUSY = 1, 2, 4, 8
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0
# Then a job whose line is being moved by a transaction that stays open is put aside: it would only hold a slot.
_PATIENCE = 1.0
# So many seconds a start that a limit lets through is put ahead at most, where answers are slow to come.
_FAR_AHEAD = 0.3
# Each key of one question is a lock of the server's, whose table of them has room for some thousands.
_LARGEST_QUESTION = 100


class Admission:
    """Lets jobs through to the runner when they may start."""

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
        runner.on_missed = self.missed
        self._ask = ask
        self._waiting: dict[int, Running] = {}
        self._missed: list[Running] = []
        self._ahead = 0.0
        self._looks: set[asyncio.Task[None]] = set()
        self.moved = asyncio.Event()
        """Set when a job has left."""
        self.started = 0
        """How many jobs have started from here."""

    @property
    def waiting(self) -> int:
        """How many jobs are held here."""
        return len(self._waiting)

    def admit(self, rows: list[tuple[int | None, Running]]) -> list[Running]:
        """Those that may start now; the others end, or start later by themselves."""
        start: list[Running] = []
        later: list[Running] = []
        for flags, job in rows:
            if flags is None and job.order_key is None:
                start.append(job)
            elif flags is None or not self._ended(flags, job):
                later.append(job)
        if later:
            for job in later:
                if (old := self._waiting.get(job.job_id)) is not None:  # a crash has taken its claim back
                    self._let_go(old)
                    self._book.ended(old.lease)
                self._waiting[job.job_id] = job
            self._follow(self._look(later))
        return start

    def _follow(self, looking: Coroutine[Any, Any, None]) -> None:
        look = asyncio.create_task(looking, name="tallybook-admission")
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    def _ended(self, flags: int, job: Running) -> bool:
        """Whether the attempt is over before it began."""
        if flags & CANCELLED:
            self._finisher.cancelled(job, None)
        elif flags & EXPIRED:
            self._finisher.expire(job)
        elif flags & BUSY:
            return False
        elif flags & PUT_OFF:
            self._finisher.put_off(job)
        else:
            return False
        self._let_go(job)
        return True

    def _let_go(self, job: Running) -> None:
        self._waiting.pop(job.job_id, None)
        self.moved.set()
        self._book.freed(job)

    async def _look(self, jobs: list[Running]) -> None:
        """Ask again and again until each of these has started or ended."""
        wait, until = 0.0, asyncio.get_running_loop().time() + _PATIENCE
        asked = False
        while jobs := [job for job in jobs if self._waiting.get(job.job_id) is job]:
            try:
                if asked:  # the first answer came with the claim
                    await asyncio.sleep(wait)
                    jobs = await self._again(jobs)
                asked = True
                jobs = await self._turns(jobs, patient=asyncio.get_running_loop().time() < until)
            except QueueUnavailable:  # the worker stops: give_back deals with them
                return
            except Exception:  # whatever it is, they are asked for again: nobody else knows of them
                log.exception("%s claimed jobs cannot be started yet", len(jobs))
                wait = _LONGEST_WAIT
            wait = min(max(wait * 1.5, _FIRST_WAIT), _LONGEST_WAIT)

    async def _again(self, jobs: list[Running]) -> list[Running]:
        left = []
        for job in jobs:
            _, rows = await self._ask("claimed_jobs", (job.lease.lease.encode(), b"%d" % job.job_id))
            if not rows:  # a crash of the server has taken the claim back: it is claimed again
                self._let_go(job)
                self._book.ended(job.lease, 1)
                continue
            fresh = Running(rows[0], job.lease, job.worker_name)
            flags = rows[0][8]
            job.args, job.options, job.busy, job.limited = fresh.args, fresh.options, fresh.busy, fresh.limited
            if flags is None or not self._ended(flags, job):
                left.append(job)
        return left

    async def _turns(self, jobs: list[Running], *, patient: bool) -> list[Running]:
        """Start what may start; what is left has to be asked for again."""
        left = [job for job in jobs if job.busy]
        await self._let_through([job for job in jobs if not job.busy and job.order_key is None])
        ordered = [job for job in jobs if not job.busy and job.order_key is not None]
        for first in range(0, len(ordered), _LARGEST_QUESTION):
            some = ordered[first : first + _LARGEST_QUESTION]
            params = (
                _array([job.lease.lease for job in some]),
                _array([job.job_id for job in some]),
                _array([job.attempt for job in some]),
                b"t" if patient else b"f",
            )
            _, ((ready, busy),) = await self._ask("turn", params)
            for job in some:
                if job.job_id in busy:
                    left.append(job)
                elif job.job_id not in ready:  # put aside until the one before it has ended; its attempt is over
                    self._let_go(job)
                    self._book.ended(job.lease, 1)
            await self._let_through([job for job in some if job.job_id in ready])
        return left

    async def _let_through(self, jobs: list[Running], *, missed: bool = False) -> None:
        """Start what no limit holds, and the rest at the moment that its limits say; what has to wait longer is over here."""
        self._start([job for job in jobs if not job.limited])
        limited = [job for job in jobs if job.limited]
        for first in range(0, len(limited), _LARGEST_QUESTION):
            await self._ask_limits(limited[first : first + _LARGEST_QUESTION], missed=missed)

    async def _ask_limits(self, jobs: list[Running], *, missed: bool) -> None:
        loop = asyncio.get_running_loop()
        params = (
            _array([job.lease.lease for job in jobs]),
            _array([job.job_id for job in jobs]),
            _array([job.attempt for job in jobs]),
            b"%.4f s" % self._ahead,
            b"t" if missed else b"f",
        )
        asked, rows = await self._ask("limit_take", params)
        found, answered = {row[0]: row[1:] for row in rows}, loop.time()
        # What the answers took lately, so that a start is not over before its answer is here.
        self._ahead = min(max(0.8 * self._ahead, 1.5 * (answered - asked) - 0.01, 0.0), _FAR_AHEAD)
        for job in jobs:
            starts_in, unknown, late, permits = found.get(job.job_id, (None, None, None, False))
            if permits:
                job.holds(_keys(job))
            if unknown is not None:
                self._runner.cannot_start(job, _no_such_limit(unknown))
                self._let_go(job)
            elif starts_in is None:  # it stands in scheduled until its turn comes
                self._let_go(job)
                self._book.ended(job.lease, 1)
                self._finisher.counts["scheduled"] += 1
            else:  # from the answer on: not before its time, whatever the way back took
                loop.call_later(starts_in, self._on_time, job, asked + starts_in + late)

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
        self._ahead = min(max(self._ahead, 2 * late), _FAR_AHEAD)
        self._missed.append(job)
        if len(self._missed) == 1:  # the first of those that are late in this turn of the loop asks for all
            self._follow(self._ask_again())

    async def _ask_again(self) -> None:
        jobs, self._missed = self._missed, []
        try:
            await self._let_through([job for job in jobs if self._waiting.get(job.job_id) is job], missed=True)
        except QueueUnavailable:
            return
        except Exception:  # whatever it is, they are asked for again: nobody else knows of them
            log.exception("%s claimed jobs cannot be started yet", len(jobs))
            self._follow(self._look(jobs))

    def _start(self, jobs: list[Running]) -> None:
        if jobs:
            for job in jobs:
                del self._waiting[job.job_id]
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
    return ("{" + ",".join(map(str, values)) + "}").encode()


def _keys(job: Running) -> list[str]:
    return [*(job.options or {}).get("limits", ()), f"queue:{job.queue}", f"task:{job.task_name}"]


def _no_such_limit(name: str) -> dict[str, Any]:
    return {
        "type": "UnknownLimit",
        "message": f"there is no limit {name!r}: declare it by app.rate_limit, app.concurrency_limit or app.breaker",
    }
