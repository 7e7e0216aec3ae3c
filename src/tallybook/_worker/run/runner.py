"""Running handlers: async ones on the loop, plain ones on threads, each in its own context.

A job does not always need its own asyncio task. A relay is one asyncio task that runs jobs one after the other while
they end without waiting. The first job that waits keeps the relay, and another relay runs the rest. So each handler
that waits has its own asyncio task (cancel, timeout, task groups work as usual); one that does not costs 1 us, not 5.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from tallybook._model.outcome import Outcome
from tallybook._task.task import Owner
from tallybook._worker.deadline import Guard, deadline_passed
from tallybook._worker.finish.finisher import SET_ASIDE, Finisher, cancel, fail, snooze
from tallybook._worker.jobs import AnyTask, Book, Running, spawn
from tallybook._worker.run.calling import DaemonThreads, Handlers, is_newer
from tallybook._worker.run.ending import Ends, log_failure
from tallybook._worker.settings import WorkerSettings

log = logging.getLogger("tallybook.worker")

# Seconds that one relay may keep the loop with handlers that never wait.
_TURN = 0.005
# Seconds after which an abandoned handler has ended, if it can be ended.
_A_MOMENT = 0.05
# Seconds between two warnings of the same unknown task; and the maximum number of such names that are kept.
_QUIET, _MANY_NAMES = 60.0, 1000


class Runner:
    """Starts claimed jobs and passes each end to the finisher."""

    def __init__(
        self, app: Owner, book: Book, finisher: Finisher, handlers: Handlers, settings: WorkerSettings
    ) -> None:
        self._app = app
        self._book = book
        self._finisher = finisher
        self._ready: deque[tuple[Running, AnyTask]] = deque()
        self._relays: set[asyncio.Task[None]] = set()
        self._grace = settings.abort_timeout.total_seconds()
        self._slot_pause = settings.slot_pause.total_seconds()
        self._freed = self._rest if self._slot_pause else book.freed
        self.handlers = handlers
        self._call, self._threads = handlers.call, handlers.common.threads
        self._interrupts = DaemonThreads(4, "tallybook-interrupt")
        self.ends = Ends(finisher)
        self._left: set[asyncio.Task[None]] = set()
        self._unclosed = 0
        self._unknown: dict[str, float] = {}
        """For each unknown task, the time until which no further warning is due."""
        self.abandoned = 0
        """How many handlers did not end after their deadline and the grace."""
        self.tracing = app._tracing
        self._run = self._one if self.tracing is None else self._traced

    async def close(self) -> None:
        await self.handlers.close()
        self._interrupts.shutdown(wait=False)

    def start(self, jobs: list[Running]) -> None:
        """Start these jobs; each has its slot already."""
        for job in jobs:
            known = self._app._names.get(job.task_name)
            if known is None or (job.options and is_newer(job.options, known)):
                self._warn_of_unknown(job, known)
                self._finisher.end(job, SET_ASIDE)
                self._book.freed(job)
                continue
            if (old := self._book.running.get(job.job_id)) is not None:  # its lease is no longer stored
                self._book.freed(old)
                self._book.ended(old.lease)
            self._book.running[job.job_id] = job
            self._ready.append((job, known))
        self._spawn()

    def _warn_of_unknown(self, job: Running, known: AnyTask | None) -> None:
        what = f"task {job.task_name!r}" if known is None else f"such version of the args of {job.task_name!r}"
        now = asyncio.get_running_loop().time()
        is_quiet = now < self._unknown.get(what, now)
        if not is_quiet:
            if len(self._unknown) >= _MANY_NAMES:
                self._unknown.clear()
            self._unknown[what] = now + _QUIET
        log.log(
            logging.DEBUG if is_quiet else logging.WARNING,
            "job %s: no %s here, set aside for a worker that knows it", job.job_id, what,
            extra={"event": "unknown_task", "job": job.job_id, "task_name": job.task_name, "queue": job.queue},
        )  # fmt: skip

    def cannot_start(self, job: Running, error: dict[str, Any]) -> None:
        """Fail an attempt that has not started; its task's own limit of attempts applies."""
        known = self._app._names.get(job.task_name)
        limit = None if known is None else known.max_attempts
        log_failure(job, error)
        self._finisher.end(job, fail({**error, "worker": job.worker_name}, limit=limit, final=False))

    def cancel(self, job_id: int, reason: str | None, attempt: int | None = None) -> None:
        """Ask one running job to stop; with `attempt`, only that attempt."""
        job = self._book.running.get(job_id)
        if job is not None and job.cancel_reason is None and attempt in (None, job.attempt):
            job.cancel_reason = reason or ""
            self._stop(job)
            if job.guard is not None:
                job.guard.told()

    def _stop(self, job: Running) -> None:
        if job.handle is not None and not job.handle.done():
            job.handle.cancel()
        elif job.interrupt is not None:  # a network round trip
            asyncio.get_running_loop().run_in_executor(self._interrupts, job.interrupt)

    def abort(self) -> None:
        """Cancel every running handler; their jobs are given back without a failure."""
        self.ends.aborting = True
        for job in list(self._book.running.values()):
            self._stop(job)
            if job.guard is not None:
                job.guard.aborted()

    def isolated(self, job: Running) -> bool:
        """Return whether this job runs in its own process and can damage no other job."""
        known = self._app._names.get(job.task_name)
        return known is not None and known.execution.process

    @property
    def still_abandoned(self) -> int:
        """The number of abandoned handlers that have not ended: threads, and coroutines that cannot be closed."""
        return len(self._threads.abandoned) + len(self._left) + self._unclosed

    def leave(self, job: Running) -> None:
        """Abandon a handler whose attempt has an end: close its coroutine, replace its thread, kill its process."""
        guard = job.guard = job.guard or Guard(job)
        guard.left = True
        guard.clear()
        relay = guard.relay or job.handle
        if guard.child is not None:
            guard.child.kill()
        if guard.thread is not None and self._threads.abandon(guard.thread):
            guard.thread = None
        elif relay is not None and not relay.done():
            self._left.add(relay)
            relay.add_done_callback(partial(self._gone, guard))
        if relay is not None and not relay.done():
            relay.cancel()

    def _gone(self, guard: Guard, relay: asyncio.Task[None]) -> None:
        self._left.discard(relay)
        self._unclosed += guard.unclosed

    def _overdue(self, job: Running) -> None:
        """Fail an attempt that neither the cancel nor the grace has ended, and abandon its handler."""
        known = self._app._names[job.task_name]
        if self._book.running.get(job.job_id) is not job or known.execution.timeout is None:
            return
        self.abandoned += 1
        log.warning(
            "%s %s did not end within %g s after its deadline and was abandoned; its result is ignored",
            known.name, job.job_id, self._grace,
            extra={"event": "abandoned", "job": job.job_id, "task_name": known.name},
        )  # fmt: skip
        self.ends.raised(job, known, deadline_passed(known.execution.timeout))
        self._book.freed(job)
        self.leave(job)
        if self._threads.abandoned:
            self._book.on.abandoned()  # before the claimer takes a job for the free slot
        asyncio.get_running_loop().call_later(_A_MOMENT, self._book.on.abandoned)

    def lost(self) -> None:
        """Stop all jobs, which others have or will get, and give back those that no other worker has taken yet."""
        for job in list(self._book.running.values()):
            job.lost = True
            self.cancel(job.job_id, "the other workers gave this worker up for dead")

    def _spawn(self) -> None:
        if self._ready:
            spawn(self._relays, self._relay())

    async def _relay(self) -> None:
        loop = asyncio.get_running_loop()
        me = asyncio.current_task()
        handed_on = [False]

        def hand_on() -> None:  # the loop is free: this relay's job waits for something
            handed_on[0] = True
            self._spawn()

        loop.call_soon(hand_on)
        until = loop.time() + _TURN
        while self._ready:
            job, known = self._ready.popleft()
            if (
                job.cancel_reason is not None or job.lost or self.ends.aborting or job.latest is not None
            ) and self._told_before_it_began(job):
                continue
            job.handle = me
            if known.guarded:
                await self._guarded(job, known, me)
            else:
                await self._run(job, known)
            if handed_on[0]:
                return
            if me is not None and me.cancelling():
                # The handler cancelled its own asyncio task and returned: that cancel must not reach the next job.
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                return
            if loop.time() > until:
                await asyncio.sleep(0)
                return

    def _told_before_it_began(self, job: Running) -> bool:
        if self.ends.aborting or job.lost:
            self._finisher.end(job, snooze(timedelta(0)))
        elif job.cancel_reason is not None:
            self._finisher.end(job, cancel(job.cancel_reason or None))
        elif job.latest is not None and asyncio.get_running_loop().time() > job.latest:
            del self._book.running[job.job_id]
            self._book.on.missed(job)
            return True
        else:
            return False
        self._book.freed(job)
        return True

    async def _guarded(self, job: Running, known: AnyTask, me: asyncio.Task[None] | None) -> None:
        execution = known.execution
        job.guard = guard = Guard(job, execution.timeout, self._grace, self._stop, self._overdue)
        guard.relay = me
        guard.inner = bool(known.atomic) and known.is_async
        if not execution.process:  # a process has to start before its job does
            guard.start()
        try:
            await self._run(job, known)
        finally:
            guard.clear()

    async def _traced(self, job: Running, known: AnyTask) -> None:
        assert self.tracing is not None
        with self.tracing.processing(job):
            await self._one(job, known)

    async def _one(self, job: Running, known: AnyTask) -> None:
        value: Any = None
        raised: BaseException | None = None
        try:
            value = await self._call(job, known)
        except GeneratorExit:
            raise  # the loop is closing
        except Outcome as outcome:
            value = outcome
        except BaseException as error:
            raised = error if job.guard is None else job.guard.explained(error)
        if self._book.running.get(job.job_id) is not job:
            return  # given back at the stop: its end and its slot are done
        if value is None and raised is None and job.guard is None and not job.in_doubt:  # nearly all of them
            self._finisher.complete(job)
            self._freed(job)
            return
        try:
            if raised is not None:
                self.ends.raised(job, known, raised)
            else:
                self.ends.returned(job, known, value)
        except BaseException as error:  # on any error, also of user code, the attempt gets an end and the slot is freed
            self.ends.failed(job, known, raised or error)
        self._freed(job)

    def _rest(self, job: Running) -> None:
        """Free the slot after the pause, when its handler has returned."""
        self._book.running.pop(job.job_id, None)
        self._book.changed.set()  # a stop waits for handlers only
        asyncio.get_running_loop().call_later(self._slot_pause, self._book.rested, job)
