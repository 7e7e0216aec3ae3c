"""app.queues: their settings, and the verbs that pause, empty, forget and look at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from tallybook._db import calls, queues
from tallybook._db.verb import ListOf, Noun, Steps, Verb
from tallybook._model.queue import QueueInfo, TopJob, Truncated

BATCH = 10_000


class Queues(Noun):
    """The queues of the app's database."""

    def list(self) -> Verb[ListOf[QueueInfo]]:
        """List every queue that has settings or has seen a job, by name.

        for queue in await app.queues.list(): print(queue.name, queue.paused_by)
        """
        return self._verb(queues.queues())

    def set(
        self,
        queue: str,
        *,
        retention: str | None = None,
        max_attempts: int | None = None,
        notify: bool | None = None,
        by: str | None = None,
        error_retention: str | timedelta | None = None,
        metrics_retention: str | timedelta | None = None,
        own_names: bool | None = None,
    ) -> Verb[str]:
        """Make a queue or change its settings; "created", "changed" or "unchanged". None: as it is.

        `retention` is brief, default or long, for jobs that are enqueued from now on; `max_attempts` counts for jobs where
        neither they nor their task say so (0: 5 again); `notify` publishes its jobs' transitions. `error_retention` and
        `metrics_retention` are how long its error log and its series of counters are kept ("0 s": no times of its own again).
        `own_names`, set before the first job: its subjects have names of their own. ConfigError; InvalidArgument for a time
        out of range, and for `own_names` of a queue that has had jobs.

            await app.queues.set("mail", retention="brief", max_attempts=3)
        """
        kept = {"error_retention": error_retention, "metrics_retention": metrics_retention}
        return self._verb(
            queues.set_(
                queue, retention=retention, max_attempts=max_attempts, notify=notify, own_names=own_names, by=by, **kept
            )
        )

    def truncate(
        self,
        queue: str,
        *,
        states: Sequence[str] | None = None,
        running: bool = False,
        by: str | None = None,
        on_batch: Callable[[int], object] | None = None,
    ) -> Verb[Truncated]:
        """Cancel all that a queue holds but for what runs, in batches of 10,000 jobs; how many. Raises UnknownQueue.

        `states` are some of available, scheduled, retrying, waiting; `running` cancels what runs, too. On the app's own
        connections each batch is a transaction of its own, so that no claim waits longer than for one; `on_batch` is told
        how many it were.

            (await app.queues.truncate("mail")).cancelled
        """
        return self._verb(partial(_truncate, queue, states, running, by, on_batch), "truncate")

    def truncate_all(
        self,
        *,
        states: Sequence[str] | None = None,
        running: bool = False,
        by: str | None = None,
        on_batch: Callable[[int], object] | None = None,
    ) -> Verb[Truncated]:
        """Cancel all that all queues hold but for what runs, queue by queue, as `truncate` does; how many.

        (await app.queues.truncate_all(states=["scheduled"])).cancelled
        """
        return self._verb(partial(_truncate, None, states, running, by, on_batch), "truncate_all")

    def drop(self, queue: str, *, truncate: bool = False, by: str | None = None) -> Verb[bool]:
        """Forget a queue that nobody uses, after a truncate if you like; False: there is none.

        InvalidArgument while it has open jobs, workers or schedules. History stays until it is pruned.

            await app.queues.drop("mail", truncate=True)
        """
        return self._verb(partial(_drop, queue, by) if truncate else queues.drop(queue, by), "drop")

    def top(
        self, queue: str, *, states: Sequence[str] | None = None, max_jobs: int = 50, after: str | None = None
    ) -> Verb[ListOf[TopJob]]:
        """The next jobs of a queue in the order in which they would run. Raises UnknownQueue.

        `states` are some of available, scheduled, retrying; `after` is the `place` of the last job of the page before.

            for job in await app.queues.top("mail", max_jobs=10): print(job.position, job.id, job.task)
        """
        return self._verb(queues.top(queue, states=states, max_jobs=max_jobs, after=after))

    def pause(self, queue: str, by: str | None = None) -> Verb[bool]:
        """Let no more jobs of a queue start, until resume; what runs goes on. False: it was paused. Raises UnknownQueue.

        await app.queues.pause("mail", by="ada")
        """
        return self._verb(calls.pause(queue, by))

    def resume(self, queue: str, by: str | None = None) -> Verb[bool]:
        """Let a paused queue run again; False: it was not paused. Raises UnknownQueue."""
        return self._verb(calls.resume(queue, by))


def _truncate(
    queue: str | None,
    states: Sequence[str] | None,
    running: bool,
    by: str | None,
    on_batch: Callable[[int], object] | None = None,
) -> Steps[Truncated]:
    mark: str | None = None
    cancelled = cancelling = 0
    while True:
        batch = yield queues.truncate(queue, states=states, running=running, by=by, max_jobs=BATCH, mark=mark)
        cancelled, cancelling = cancelled + batch.done.cancelled, cancelling + batch.done.cancelling
        mark = batch.mark
        if on_batch:
            on_batch(batch.done.cancelled)
        if not batch.remain:
            return Truncated(cancelled, cancelling, batch.done.busy)


def _drop(queue: str, by: str | None) -> Steps[bool]:
    if any(known.name == queue for known in (yield queues.queues())):
        yield from _truncate(queue, None, False, by)
    found: bool = yield queues.drop(queue, by)
    return found
