"""The claimer: the one loop of a process that claims jobs, in batches as large as its free slots."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link
from tallybook._db.roundtrip import RoundTrips
from tallybook._db.texts import text_array
from tallybook._maintenance import services
from tallybook._maintenance.service import happens
from tallybook._worker.claim.admission import Admission, array
from tallybook._worker.claim.shares import PATIENCE, SharedBook
from tallybook._worker.claim.sleeper import Sleeper, jittered
from tallybook._worker.claim.suspects import Suspects
from tallybook._worker.finish.finisher import Finisher
from tallybook._worker.jobs import Book, Lease, Running
from tallybook._worker.run.runner import Runner
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import ForeignCursor, QueueUnavailable, WorkerEnded

# durable => false: a server crash may lose the claim. Its jobs are then claimed again, and its lease is refused. The
# flush stays out of the lane's lock.
_CLAIM = Declared("""
  claim(worker int, queues text[], max_jobs int[], lease uuid, durable boolean, retried boolean)
  -> row (claim_id bigint, queue text, jobs int)""", durable="false")  # fmt: skip
# job: one job, or null for all. Rare fields come in one text (see admission), so that they cost no more than a null.
_CLAIMED_JOBS = Declared("""
  claimed_jobs(lease uuid, job bigint)
  -> rows (job_id bigint, attempt int, task text, args headers jsonb, failures crashes max_attempts int,
           unique_key text, order_key text, options jsonb, blocked_by text)""")
_ADMIT = Declared("""
  admit(leases uuid[], job_ids bigint[], attempts int[], known text[], patient boolean, ahead interval, missed boolean)
  -> rows (job_id bigint, verdict text, said text, starts_in late float8, permits boolean, args options jsonb)""")
_STATEMENTS = {
    "claim": _CLAIM.select("claim_id, queue, jobs", "dollar"),
    "claimed_jobs": _CLAIMED_JOBS.select(
        "job_id, attempt, task, args::text, headers::text, failures, crashes, max_attempts, blocked_by, order_key,"
        " case when options ? 'subject' then options || jsonb_build_object('subject_name', unique_key)"
        " else options end::text",
        "dollar",
    ),
    "admit": _ADMIT.select("job_id, verdict, said, starts_in, late, permits, args::text, options::text", "dollar"),
}
# After this many claims in a row with work, producers need not wake this worker.
_BUSY = 8
# The most seconds that a claim waits while jobs wait for a child process: a job of another kind may be behind them.
_CLAIM_PAUSE = 0.1
# After this many claims the watermark is sent early: a rescuer has to read all claims after it.
_MANY = 500


@dataclass(eq=False, repr=False)
class Claimer:
    _dsn: str
    _settings: WorkerSettings
    _book: Book
    _runner: Runner
    _finisher: Finisher
    sleeper: Sleeper | None
    """The session to be woken on; None: only poll."""
    worker_id: Callable[[], int]
    on_foreign: Callable[[], Awaitable[bool]] = field(init=False)
    claimed: int = 0
    asleep: bool = False
    """Whether it waits for work: no claim is open."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    awake: asyncio.Event = field(init=False)
    _trips: RoundTrips | None = None
    _foreign: int = 0
    _told: int = 0
    _unclear: int = 0
    _looked_at: float = 0.0

    def __post_init__(self) -> None:
        settings, parts = self._settings, (self._book, self._runner, self._finisher)
        self.link = Link(self._dsn, settings.name, on_connect=self._prepare, on_close=self._forget)
        self._waiting = self._runner.handlers.common.children.waiting
        self._order = list(settings.queues)
        self._most_unsaid = max(2000, 2 * settings.slots)
        patience = settings.suspect_wait.total_seconds()
        self.suspects = Suspects(*parts, patience, self.stopping, on_found=self.wake)
        self.admission = Admission(self.suspects, self._finisher, self._book, self._ask)
        self._book.on.room = self.wake
        self.awake = self.sleeper.woken if self.sleeper else asyncio.Event()

    async def _prepare(self, conn: AsyncConnection) -> None:
        await services.on_connect(conn, cursors=False)  # a claim checks its lane's cursor itself
        self._trips = RoundTrips(conn, _STATEMENTS, prepared=not self.link.pooled)
        await self._trips.open()

    async def _ask(self, name: str, params: Sequence[bytes | None]) -> tuple[float, list[tuple[Any, ...]]]:
        """Run one of the statements above for the admission; return when it was sent (loop's clock) and its rows."""

        async def call(_: object) -> tuple[float, list[tuple[Any, ...]]]:
            assert self._trips is not None
            asked = asyncio.get_running_loop().time()  # not before the connection is free
            return asked, (await self._trips.run((name, params)))[0]

        if not isinstance(self._book, SharedBook):
            return await self.link.run(call)
        silent = asyncio.get_running_loop().call_later(PATIENCE, self._book.lend)
        try:
            return await self.link.run(call)
        finally:
            silent.cancel()

    def _forget(self) -> None:
        self._book.forget()
        if self._trips:
            self._trips.close()

    def wake(self) -> None:
        self.awake.set()

    async def run(self) -> None:
        in_a_row = 0
        while not self.stopping.is_set():
            await self._room()
            if self._waiting:
                await self._behind_children()
            if self.stopping.is_set():
                return
            await self.suspects.start_found()
            woken = self.sleeper is not None and self.awake.is_set()
            self.awake.clear()
            jobs = await self.claim(expect_work=woken or in_a_row > 0, most=self.suspects.most())
            if jobs:
                in_a_row += 1
                await self.suspects.start(jobs)
                if in_a_row == _BUSY and self.sleeper:
                    await self.sleeper.listen_end()
                # Handlers that never wait end in this turn of the loop, and the next claim can use their slots at once.
                await asyncio.sleep(0)
                continue
            in_a_row = 0
            self.suspects.careful = False
            self.asleep, self._looked_at = True, asyncio.get_running_loop().time()
            try:
                await self._sleep()
            finally:
                self.asleep = False

    async def _room(self) -> None:
        while not self.stopping.is_set():
            self._book.changed.clear()
            if self.suspects.found:  # one of them may hold the last slot
                return
            if self._book.has_room():
                if self._finisher.waiting < self._most_unsaid:
                    return
                self._book.rests()
            await self._book.changed.wait()

    async def _behind_children(self) -> None:
        """Wait while jobs of each queue with free slots wait for a child process: one claim then takes several jobs."""
        loop, changed = asyncio.get_running_loop(), self._book.changed
        until = loop.time() + _CLAIM_PAUSE
        timer = loop.call_at(until, changed.set)
        while loop.time() < until and not self.stopping.is_set():
            free = [queue for queue, slots in self._book.free.items() if slots > 0]
            if not free or not all(self._waiting[queue] for queue in free):
                break
            changed.clear()
            await changed.wait()
        timer.cancel()

    def idle_queues(self) -> list[str]:
        """Return the queues with a free slot, if a claim is due soon: maintenance checks these in its place."""
        near = self._looked_at + 0.5 * self._settings.poll.total_seconds() < asyncio.get_running_loop().time()
        return [queue for queue in self._order if self._book.free[queue] > 0] if self.asleep and near else []

    def looked(self, at: float, work: bool) -> None:
        """Note that maintenance checked at this time of the loop's clock, unless a claim since then has seen more."""
        if self.asleep and at >= self._looked_at:
            self._looked_at = at
            if work:
                self.wake()

    async def _poll(self) -> None:
        """Wait until `awake` is set, or until nothing has checked for work for about one poll."""
        loop, poll = asyncio.get_running_loop(), self._settings.poll.total_seconds()
        since, pause = self._looked_at, jittered(poll)
        while not self.awake.is_set():
            if self._looked_at > since:  # maintenance has checked: its next check is due soon
                pause = max(pause, 1.25 * poll)
            if (left := self._looked_at + pause - loop.time()) <= 0:
                return
            await happens(self.awake, left)

    async def _sleep(self) -> None:
        poll = self._settings.poll.total_seconds()
        if self.sleeper is None:
            await self._poll()
            return
        if not self.sleeper.clear:
            if not await self.sleeper.listen_begin():
                # A transaction that checked before we armed is still open: its job would wake nobody.
                # It may stay open for long: check less and less often.
                self._unclear += 1
                await happens(self.awake, min(0.05 * 1.2 ** max(0, self._unclear - 20), poll))
                return
            self._unclear = 0
            if not self.awake.is_set():
                return  # claim once more, now that producers wake us; then come back here
        await self._poll()

    async def claim(self, *, expect_work: bool, most: int | None = None) -> list[Running]:
        """Claim one batch, of at most `most` jobs; an empty list means no work for a free slot."""
        while True:
            try:
                jobs = await self._claim(expect_work=expect_work, most=most)
                self._foreign = 0
                if jobs is not None:
                    return jobs
            except ForeignCursor:
                self._foreign += 1
                if not await self.on_foreign() and self._foreign > 3:  # another worker may have rebased: try 3 times
                    raise
            expect_work = True
            if self.stopping.is_set():
                return []

    async def _claim(self, *, expect_work: bool, most: int | None) -> list[Running] | None:
        # None: all jobs that it met were cancelled; there may be more behind them.
        self._order = [*self._order[1:], self._order[0]]  # queues take turns where priorities do not decide
        free = [self._book.room(queue) for queue in self._order]
        if most is not None:
            free = [min(slots, most) for slots in free]
        lease, worker_id = str(uuid.uuid4()), self.worker_id()
        params = [b"%d" % worker_id, text_array(self._order).encode(), array(free), lease.encode(), b"f"]

        async def call(_: object) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
            trips = self._trips
            assert trips is not None
            claim = ("claim", tuple(params))
            params[4] = b"t"  # after a lost connection, the same lease returns the first answer again
            if expect_work:
                claimed, rows = await trips.run(claim, ("claimed_jobs", [params[3], None]))
                return claimed[0], rows
            (claimed,) = await trips.run(claim)
            rows = (await trips.run(("claimed_jobs", [params[3], None])))[0] if claimed[0][2] else []
            return claimed[0], rows

        book = self._book
        reserved = book.asks(dict(zip(self._order, free, strict=True))) if isinstance(book, SharedBook) else None
        try:
            found, rows = await self.link.run(call)
        except WorkerEnded:
            # The heartbeat notices it as well, and registers again under a new id.
            await asyncio.sleep(0.2)
            return []
        except QueueUnavailable:
            if self.stopping.is_set():
                return []
            raise
        finally:
            if reserved is not None:
                reserved()
        claim_id, queue, jobs = found
        if claim_id is None:
            self._book.on.fair(0, True)
            return []
        if not jobs:  # all jobs that it met were cancelled: there may be more behind them
            return None
        if worker_id != self.worker_id():  # given up for dead before the answer came: others have the jobs already
            return []
        # A claim covers one lane, and every job of a fair lane is fair: there is room in line for the next ones.
        if rows and (options := rows[0][-1]) is not None and '"fair_key"' in options:
            self._book.on.fair(jobs, jobs < free[self._order.index(queue)])
        taken = Lease(lease, claim_id, queue)
        self._book.opened(taken, jobs)
        self.claimed += jobs
        if claim_id >= self._told + _MANY:
            self._told = claim_id
            self._book.on.many()
        running = [Running(row, taken, self._settings.name) for row in rows]
        for job in self._book.surplus(running):
            self.suspects.give_back(job)
        return self.admission.admit(running)
