"""Queues of an App: their settings, and the verbs that empty, forget and look at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tallybook._db import calls, queues
from tallybook._model.queue import QueueInfo, TopJob, Truncated
from tallybook._run import run, run_sync

__all__ = ["Queues"]

BATCH = 10_000


class Queues:
    """Mixed into App."""

    async def queue_set(
        self,
        conn: object,
        queue: str,
        *,
        retention: str | None = None,
        max_attempts: int | None = None,
        notify: bool | None = None,
        by: str | None = None,
    ) -> str:
        """Make a queue or change its settings; "created", "changed" or "unchanged". None: as it is.

        `retention` is brief, default or long, for jobs that are enqueued from now on; `max_attempts` counts for jobs where
        neither they nor their task say so (0: 5 again); `notify` publishes its jobs' transitions. ConfigError.

            await app.queue_set(conn, "mail", retention="brief", max_attempts=3)
        """
        call = queues.set_(queue, retention=retention, max_attempts=max_attempts, notify=notify, by=by)
        return await run(conn, call)

    def queue_set_sync(
        self,
        conn: object,
        queue: str,
        *,
        retention: str | None = None,
        max_attempts: int | None = None,
        notify: bool | None = None,
        by: str | None = None,
    ) -> str:
        """Make a queue or change its settings; queue_set without an event loop."""
        call = queues.set_(queue, retention=retention, max_attempts=max_attempts, notify=notify, by=by)
        return run_sync(conn, call)

    async def queue_truncate(
        self,
        conn: object,
        queue: str,
        *,
        states: Sequence[str] | None = None,
        running: bool = False,
        by: str | None = None,
        on_batch: Callable[[int], object] | None = None,
    ) -> Truncated:
        """Cancel all that a queue holds but for what runs, in batches of 10,000 jobs; how many. Raises UnknownQueue.

        `states` are some of available, scheduled, retrying, waiting; `running` cancels what runs, too. Given the App, each
        batch is a transaction of its own, so that no claim waits longer than for one; `on_batch` is told how many it were.

            (await app.queue_truncate(app, "mail")).cancelled
        """
        mark: str | None = None
        cancelled = cancelling = 0
        while True:
            call = queues.truncate(queue, states=states, running=running, by=by, max_jobs=BATCH, mark=mark)
            batch = await run(conn, call)
            cancelled, cancelling, mark = (
                cancelled + batch.done.cancelled,
                cancelling + batch.done.cancelling,
                batch.mark,
            )
            if on_batch:
                on_batch(batch.done.cancelled)
            if not batch.remain:
                return Truncated(cancelled, cancelling, batch.done.busy)

    def queue_truncate_sync(
        self,
        conn: object,
        queue: str,
        *,
        states: Sequence[str] | None = None,
        running: bool = False,
        by: str | None = None,
        on_batch: Callable[[int], object] | None = None,
    ) -> Truncated:
        """Cancel all that a queue holds but for what runs; queue_truncate without an event loop."""
        mark: str | None = None
        cancelled = cancelling = 0
        while True:
            call = queues.truncate(queue, states=states, running=running, by=by, max_jobs=BATCH, mark=mark)
            batch = run_sync(conn, call)
            cancelled, cancelling, mark = (
                cancelled + batch.done.cancelled,
                cancelling + batch.done.cancelling,
                batch.mark,
            )
            if on_batch:
                on_batch(batch.done.cancelled)
            if not batch.remain:
                return Truncated(cancelled, cancelling, batch.done.busy)

    async def queue_drop(self, conn: object, queue: str, *, truncate: bool = False, by: str | None = None) -> bool:
        """Forget a queue that nobody uses, after a truncate if you like; False: there is none.

        InvalidArgument while it has open jobs, workers or schedules. History stays until it is pruned.

            await app.queue_drop(app, "mail", truncate=True)
        """
        if truncate and any(known.name == queue for known in await self.queues(conn)):
            await self.queue_truncate(conn, queue, by=by)
        return await run(conn, queues.drop(queue, by))

    def queue_drop_sync(self, conn: object, queue: str, *, truncate: bool = False, by: str | None = None) -> bool:
        """Forget a queue that nobody uses; queue_drop without an event loop."""
        if truncate and any(known.name == queue for known in self.queues_sync(conn)):
            self.queue_truncate_sync(conn, queue, by=by)
        return run_sync(conn, queues.drop(queue, by))

    async def queue_top(
        self,
        conn: object,
        queue: str,
        *,
        states: Sequence[str] | None = None,
        max_jobs: int = 50,
        after: str | None = None,
    ) -> list[TopJob]:
        """The next jobs of a queue in the order in which they would run. Raises UnknownQueue.

        `states` are some of available, scheduled, retrying; `after` is the `place` of the last job of the page before.

            for job in await app.queue_top(conn, "mail", max_jobs=10): print(job.position, job.id, job.task)
        """
        return await run(conn, queues.top(queue, states=states, max_jobs=max_jobs, after=after))

    def queue_top_sync(
        self,
        conn: object,
        queue: str,
        *,
        states: Sequence[str] | None = None,
        max_jobs: int = 50,
        after: str | None = None,
    ) -> list[TopJob]:
        """The next jobs of a queue; queue_top without an event loop."""
        return run_sync(conn, queues.top(queue, states=states, max_jobs=max_jobs, after=after))

    async def queues(self, conn: object) -> list[QueueInfo]:
        """List every queue that has settings or has seen a job, by name.

        for queue in await app.queues(conn): print(queue.name, queue.paused_by)
        """
        return await run(conn, queues.queues())

    def queues_sync(self, conn: object) -> list[QueueInfo]:
        """List every queue; queues without an event loop."""
        return run_sync(conn, queues.queues())

    async def pause(self, conn: object, queue: str, by: str | None = None) -> bool:
        """Let no more jobs of a queue start, until resume; what runs goes on. False: it was paused. Raises UnknownQueue.

        await app.pause(conn, "mail", by="ada")
        """
        return await run(conn, calls.pause(queue, by))

    def pause_sync(self, conn: object, queue: str, by: str | None = None) -> bool:
        """Let no more jobs of a queue start; pause without an event loop."""
        return run_sync(conn, calls.pause(queue, by))

    async def resume(self, conn: object, queue: str, by: str | None = None) -> bool:
        """Let a paused queue run again; False: it was not paused. Raises UnknownQueue."""
        return await run(conn, calls.resume(queue, by))

    def resume_sync(self, conn: object, queue: str, by: str | None = None) -> bool:
        """Let a paused queue run again; resume without an event loop."""
        return run_sync(conn, calls.resume(queue, by))
