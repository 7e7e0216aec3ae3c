"""Drain: run everything that is due, then return. For routes that a cron calls, for tests, for scripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from tallybook._db.link import Link, dsn_for_people
from tallybook._maintenance.service import happens
from tallybook._task.task import Owner
from tallybook._worker.jobs import Running
from tallybook._worker.life.on_record import WHOLE, Part
from tallybook._worker.life.worker import Worker
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import JobFailed, QueueUnavailable

T = TypeVar("T")

# Seconds between two looks for jobs that fall due, or whose worker has died, while there is other work.
_LOOK = 1.0


@dataclass(frozen=True)
class DrainReport:
    """The counts of one drain."""

    processed: int
    """Attempts that ran to an end."""
    completed: int
    retrying: int
    """Attempts that failed or were snoozed, and continue later."""
    cancelled: int
    dead: int
    moved: int
    """Jobs of unknown tasks, or of a newer version of args, set aside for a worker that knows these."""
    unreachable: tuple[str, ...] = ()
    """Nodes that did not answer, were lost during their drain or have no usable schema: their jobs are not counted."""

    def __add__(self, other: DrainReport) -> DrainReport:
        return DrainReport(*(mine + others for mine, others in zip(astuple(self), astuple(other), strict=True)))


async def drain(
    app: Owner,
    dsn: str,
    settings: WorkerSettings,
    max_jobs: int | None,
    max_seconds: float | None,
    *,
    raise_on_failure: bool = False,
    part: Part = WHOLE,
) -> DrainReport:
    """Run what is due, up to a limit. Raises JobFailed if asked to, QueueUnavailable if the server is away then."""
    worker = Worker(app, dsn, settings, drains=True, part=part)
    worker.finisher.keeps_failure = raise_on_failure
    admission, suspects = worker.claimer.admission, worker.claimer.suspects
    until = time.monotonic() + max_seconds if max_seconds is not None else None
    started, look_at = 0, 0.0

    async def claim() -> list[Running]:
        nonlocal started
        most = None if max_jobs is None else max_jobs - started - admission.started - admission.waiting
        if most is not None and most <= 0:
            return []
        jobs = await worker.claimer.claim(expect_work=True, most=suspects.most(most))
        if jobs:
            await suspects.start(jobs, until=until)
        started += len(jobs)
        return jobs

    timers = _timers(worker.claimer.link, until, settings.abort_timeout.total_seconds())
    try:
        await _start(worker, until)
        # Once: a schedule that is due meanwhile is for the next drain. One of every second would never let this end.
        await _in_time(worker, until, worker.maintenance.clock.run())
        await _in_time(worker, until, worker.maintenance.clock.run_queries())
        while until is None or time.monotonic() < until:
            if worker._failed:
                raise worker._failed
            if max_jobs is not None and started + admission.started >= max_jobs:
                break
            await suspects.start_found(until=until)
            look_at = await _in_time(worker, until, _look(worker, look_at)) or look_at
            jobs = await claim()
            if not jobs and not worker.book.running and not worker.finisher.waiting:
                before = (admission.started, admission.waiting)
                await _told(worker, until)
                if worker.book.leases and not admission.waiting:
                    await asyncio.sleep(0.01)
                    continue
                promoted = await _in_time(worker, until, _more(worker))
                if await claim() or promoted or worker.book.running or before != (admission.started, admission.waiting):
                    continue
                if admission.waiting and await _admission_moved(worker, until):
                    continue
                break  # the jobs still in the admission wait for an open transaction: give them back
            await _turn(worker, until)
        held = await worker.stopping.let_go(_left(until))
        await worker.stopping.told()
    except BaseException:
        await worker.give_back()
        raise
    finally:
        for timer in timers:
            timer.cancel()
        await worker._close()
    return _report(worker, held)


def _timers(claims: Link, until: float | None, grace: float) -> list[asyncio.TimerHandle]:
    """Let claims give up on a server that is away at the limit, and after the grace on one that does not answer."""
    if until is None:
        return []
    loop = asyncio.get_running_loop()
    return [loop.call_later(_left(until), claims.giving_up.set), loop.call_later(_left(until) + grace, claims.cut)]


async def _start(worker: Worker, until: float | None) -> None:
    giving_up = worker.maintenance_link.giving_up  # and that of the claims: see _timers
    timer = asyncio.get_running_loop().call_later(_left(until), giving_up.set)
    try:
        await worker.start()
    finally:
        timer.cancel()
    giving_up.clear()  # the ends are stored over this connection, and have more time


def _report(worker: Worker, held: int) -> DrainReport:
    """Count what ran, without jobs that were held and given back. Raises the first failure as JobFailed if asked to."""
    if worker.finisher.first_failure is not None:
        job, error = worker.finisher.first_failure
        failure = JobFailed(job.job_id, job.task_name, error.get("type"), error.get("message"))
        raise failure from getattr(job, "raised", None)
    counts = worker.finisher.counts
    completed, cancelled, dead = counts["completed"], counts["cancelled"], counts["dead"]
    retrying = counts["scheduled"] + max(0, counts["available"] - held)  # retried at once
    return DrainReport(completed + retrying + cancelled + dead, completed, retrying, cancelled, dead, counts["moved"])


async def _in_time(worker: Worker, until: float | None, look: Coroutine[Any, Any, T]) -> T | None:
    """Return what this maintenance returns, None at the limit. Raises QueueUnavailable if the server is away then."""
    try:
        async with asyncio.timeout(_left(until)):
            return await look
    except TimeoutError:
        # Not by `giving_up`: the ends are stored over the same connection, and have more time.
        if worker.maintenance_link.away:
            raise QueueUnavailable(dsn_for_people(worker.dsn), "lost before the time limit of the drain") from None
        return None


async def _more(worker: Worker) -> int:
    """Put jobs in line that may follow those that have just ended; return how many."""
    services = worker.maintenance
    return sum([await one.look() for one in (services.promoter, services.parents, services.permits, services.fairness)])


async def _look(worker: Worker, at: float) -> float:
    """Promote and rescue if it is time, by the monotonic clock; return when the next time is."""
    if time.monotonic() < at:
        return at
    await worker.maintenance.promoter.look()
    await worker.maintenance.rescuer.look()
    return time.monotonic() + _LOOK


async def _told(worker: Worker, until: float | None) -> None:
    """Wait until the database has every end, up to the limit; stop waiting if the finisher has failed."""
    drained = asyncio.create_task(worker.finisher.drained())
    ends = {drained, *worker._background.tasks}
    try:
        await asyncio.wait(ends, timeout=_left(until), return_when=asyncio.FIRST_COMPLETED)
    finally:
        drained.cancel()


async def _admission_moved(worker: Worker, until: float | None) -> bool:
    """Return whether a held job has started or ended within a second; a producer's transaction may take longer."""
    admission = worker.claimer.admission
    before = admission.waiting
    admission.moved.clear()
    return await happens(admission.moved, min(1.0, _left(until))) or admission.waiting != before


async def _turn(worker: Worker, until: float | None) -> None:
    """Let handlers run until a slot is free."""
    worker.book.changed.clear()
    if worker.book.running:
        await happens(worker.book.changed, _left(until))
    else:
        await asyncio.sleep(0)


def _left(until: float | None) -> float:
    return 3600.0 * 24 if until is None else max(0.0, until - time.monotonic())
