"""The verbs of an App that steer and read jobs: what an operator, a page or a script calls.

Each has a form without an event loop, `..._sync`. All run on the caller's connection, in its transaction, or, given the
App, on a connection of the App's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tallybook._db import calls, filters
from tallybook._db.filters import DeadFilter
from tallybook._model.durations import parse_duration
from tallybook._model.job import Cancelled, DeadLetter, Job, JobInfo, Retried
from tallybook._model.options import text_problem
from tallybook._task import run, run_sync
from tallybook.errors import InvalidArgument, JobCancelled, JobDied, ResultMissing, ResultTimeout, UnknownJob

if TYPE_CHECKING:
    from tallybook._task import Task

__all__ = ["Operations", "job_id"]

_FIRST_LOOK, _SLOWEST_LOOK = 0.01, 0.5


class Operations:
    """Mixed into App."""

    tasks: dict[str, Task[..., Any]]
    names: dict[str, Task[..., Any]]

    async def cancel(self, conn: object, job: int | Job, reason: str | None = None) -> str:
        """Say that a job shall not run; what that means for it: "cancelled", "cancelling" if it runs, or how it ended.

        A dead letter ends as cancelled, with its errors, and leaves the dead letters.

        Inside `conn`'s transaction. Raises UnknownJob.

            state = await app.cancel(conn, job.id, "the order was withdrawn")
        """
        return await run(conn, calls.cancel(job_id(job), _reason(reason)))

    def cancel_sync(self, conn: object, job: int | Job, reason: str | None = None) -> str:
        """Say that a job shall not run; cancel without an event loop."""
        return run_sync(conn, calls.cancel(job_id(job), _reason(reason)))

    async def retry(self, conn: object, job: int | Job) -> int:
        """Give a dead or cancelled job another attempt, at once; the number of that attempt.

        Raises UnknownJob, and InvalidArgument for a job in another state or whose unique key another job has now.

            attempt = await app.retry(conn, 4711)
        """
        return await run(conn, calls.retry(job_id(job)))

    def retry_sync(self, conn: object, job: int | Job) -> int:
        """Give a dead or cancelled job another attempt; retry without an event loop."""
        return run_sync(conn, calls.retry(job_id(job)))

    async def get(self, conn: object, job: int | Job) -> JobInfo:
        """Read one job as it is now. Raises UnknownJob.

        (await app.get(conn, job)).state
        """
        return await run(conn, calls.get(job_id(job)))

    def get_sync(self, conn: object, job: int | Job) -> JobInfo:
        """Read one job as it is now; get without an event loop."""
        return run_sync(conn, calls.get(job_id(job)))

    async def state(self, conn: object, job: int | Job) -> str:
        """The state of one job, and nothing else of it: all that a producer's role may read. Raises UnknownJob.

        await app.state(conn, job)
        """
        return await run(conn, calls.state(job_id(job)))

    def state_sync(self, conn: object, job: int | Job) -> str:
        """The state of one job; state without an event loop."""
        return run_sync(conn, calls.state(job_id(job)))

    async def cancel_many(
        self,
        conn: object,
        *,
        queue: str | None = None,
        task: str | None = None,
        unique: str | None = None,
        order_key: str | None = None,
        args: Mapping[str, object] | None = None,
        states: Sequence[str] | None = None,
        reason: str | None = None,
        max_jobs: int = 10_000,
    ) -> Cancelled:
        """Cancel every open job that matches all that is given, at most `max_jobs`; one filter is needed.

        `args` matches jobs whose args contain these; `states` are some of scheduled, waiting, available, running.

            await app.cancel_many(conn, task="sync_orders", args={"customer": 42}, reason="customer left")
        """
        listed = None if states is None else tuple(states)
        call = filters.cancel_many(
            queue=queue, task=task, unique=unique, order_key=order_key, args=args, states=listed, reason=reason,
            max_jobs=max_jobs,
        )  # fmt: skip
        return await run(conn, call)

    def cancel_many_sync(
        self,
        conn: object,
        *,
        queue: str | None = None,
        task: str | None = None,
        unique: str | None = None,
        order_key: str | None = None,
        args: Mapping[str, object] | None = None,
        states: Sequence[str] | None = None,
        reason: str | None = None,
        max_jobs: int = 10_000,
    ) -> Cancelled:
        """Cancel every open job that matches; cancel_many without an event loop."""
        listed = None if states is None else tuple(states)
        call = filters.cancel_many(
            queue=queue, task=task, unique=unique, order_key=order_key, args=args, states=listed, reason=reason,
            max_jobs=max_jobs,
        )  # fmt: skip
        return run_sync(conn, call)

    async def dead_letters(
        self,
        conn: object,
        *,
        queue: str | None = None,
        task: str | None = None,
        reason: str | None = None,
        text: str | None = None,
        args: Mapping[str, object] | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        max_jobs: int = 50,
    ) -> list[DeadLetter]:
        """List the dead letters that match, newest first, at most `max_jobs`.

        `reason` is failed, crashed, expired or killed; `text` is contained in the last error's type or message, whatever
        the case; `since` and `before` bound when they died: pass the last one's `died_at` as `before` to read on.

            for letter in await app.dead_letters(conn, task="charge", text="timeout"): ...
        """
        which = DeadFilter(queue=queue, task=task, reason=reason, text=text, args=args, since=since, before=before)
        return await run(conn, filters.dead_letters(which, max_jobs))

    def dead_letters_sync(self, conn: object, *, max_jobs: int = 50, **which: Any) -> list[DeadLetter]:
        """List dead letters; dead_letters without an event loop."""
        return run_sync(conn, filters.dead_letters(DeadFilter(**which), max_jobs))

    async def retry_dead(
        self,
        conn: object,
        *,
        queue: str | None = None,
        task: str | None = None,
        reason: str | None = None,
        text: str | None = None,
        args: Mapping[str, object] | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        max_jobs: int = 10_000,
    ) -> Retried:
        """Give every dead letter that matches another attempt, oldest first; filters as in `dead_letters`.

        await app.retry_dead(conn, task="charge", since=outage_began)
        """
        which = DeadFilter(queue=queue, task=task, reason=reason, text=text, args=args, since=since, before=before)
        return await run(conn, filters.retry_dead(which, max_jobs))

    def retry_dead_sync(self, conn: object, *, max_jobs: int = 10_000, **which: Any) -> Retried:
        """Retry dead letters; retry_dead without an event loop."""
        return run_sync(conn, filters.retry_dead(DeadFilter(**which), max_jobs))

    async def drop_dead(self, conn: object, job: int | Job) -> bool:
        """Throw one dead letter away; False: there is none. What is left of the job is its history."""
        return await run(conn, filters.drop_dead(job_id(job)))

    def drop_dead_sync(self, conn: object, job: int | Job) -> bool:
        """Throw one dead letter away; drop_dead without an event loop."""
        return run_sync(conn, filters.drop_dead(job_id(job)))

    async def drop_dead_many(
        self,
        conn: object,
        *,
        queue: str | None = None,
        task: str | None = None,
        reason: str | None = None,
        text: str | None = None,
        args: Mapping[str, object] | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        max_jobs: int = 10_000,
    ) -> int:
        """Throw away every dead letter that matches, oldest first; how many. Filters as in `dead_letters`."""
        which = DeadFilter(queue=queue, task=task, reason=reason, text=text, args=args, since=since, before=before)
        return await run(conn, filters.drop_dead_many(which, max_jobs))

    def drop_dead_many_sync(self, conn: object, *, max_jobs: int = 10_000, **which: Any) -> int:
        """Throw away dead letters; drop_dead_many without an event loop."""
        return run_sync(conn, filters.drop_dead_many(DeadFilter(**which), max_jobs))

    async def result(
        self, job: int | Job, conn: object | None = None, *, timeout: timedelta | str | None = timedelta(seconds=10)
    ) -> Any:
        """Wait until a job has ended and return what its handler returned; None waits for ever.

        The value has the type of the handler's return annotation where this App knows the task, else JSON's own types.
        Looks again every 10 ms at first, then less often. `conn` is a connection that is not in a transaction; by
        default one of the App's own is used. UnknownJob: there is none, or the transaction that enqueued it has not
        committed. ResultTimeout: it has not ended in time (it goes on). JobDied, JobCancelled: there will be no result.
        ResultMissing: it completed, and its result could not be kept.

            text = await app.result(job, timeout=timedelta(seconds=10))
        """
        wanted, patience = job_id(job), _patience(timeout)
        call = filters.result(wanted)
        until, pause = time.monotonic() + patience, _FIRST_LOOK
        while (ended := await run(self if conn is None else conn, call)).state is None:
            left = until - time.monotonic()
            if left <= 0:
                raise ResultTimeout(wanted, patience)
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, _SLOWEST_LOOK)
        return self._result_of(wanted, ended)

    def result_sync(
        self, job: int | Job, conn: object | None = None, *, timeout: timedelta | str | None = timedelta(seconds=10)
    ) -> Any:
        """Wait until a job has ended and return what its handler returned; result without an event loop."""
        wanted, patience = job_id(job), _patience(timeout)
        call = filters.result(wanted)
        until, pause = time.monotonic() + patience, _FIRST_LOOK
        while (ended := run_sync(self if conn is None else conn, call)).state is None:
            left = until - time.monotonic()
            if left <= 0:
                raise ResultTimeout(wanted, patience)
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _SLOWEST_LOOK)
        return self._result_of(wanted, ended)

    def _result_of(self, job_id: int, ended: filters.Ended) -> Any:
        error = ended.error or {}
        if ended.state == "dead":
            raise JobDied(job_id, error.get("type"), error.get("message"))
        if ended.state == "cancelled":
            raise JobCancelled(job_id, error.get("message"))
        if error:
            raise ResultMissing(job_id, str(error.get("message")))
        known = self.names.get(ended.task)
        return ended.result if known is None else known.read_result(ended.result)


def _patience(timeout: timedelta | str | None) -> float:
    return float("inf") if timeout is None else parse_duration(timeout, option="timeout").total_seconds()


def job_id(job: int | Job) -> int:
    """The id of what a caller names a job by. UnknownJob for a number that no job can have."""
    found = job.id if isinstance(job, Job) else job
    if isinstance(found, bool) or not isinstance(found, int):
        raise InvalidArgument(f"a job id is a whole number, not of type {type(found).__name__}")
    if not 0 < found < 1 << 63:
        raise UnknownJob(found)
    return found


def _reason(reason: str | None) -> str | None:
    if reason is not None and (problem := text_problem(reason)):
        raise InvalidArgument(f"the reason {problem}")
    return reason
