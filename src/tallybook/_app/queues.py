"""app.queues: settings of queues, and the verbs that pause, truncate, drop and list them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from tallybook._db.declared import Call, Declared, Simple, Value, View
from tallybook._db.texts import duration, loads, record, records
from tallybook._db.verb import ListOf, Noun, Steps, Verb
from tallybook._model.options import check_name
from tallybook._model.queue import QueueInfo, TopJob, Truncated
from tallybook.errors import ConfigError, UnknownQueue

BATCH = 10_000  # jobs per transaction of a truncate
_BY, _WHO = "coalesce({by}, session_user)", "coalesce({who}, session_user)"
_SET = Declared("""
  queue_set(queue text, retention text, max_attempts int, notify boolean, by text, error_retention interval,
            metrics_retention interval, own_names boolean, random_order boolean) -> text""", by=_BY)  # fmt: skip
_DROP = Simple("queue_drop(queue text, by text) -> boolean", bool, names={"queue": ("queue", 64)}, by=_BY)
UNUSED = Simple("_queue_unused(p_queue text) -> boolean", bool, verb="queue_drop")
_TRUNCATE = Declared("""
  queue_truncate(queue text, states text[], running boolean, by text, max_jobs int, mark jsonb)
  -> row (cancelled int, cancelling int, busy boolean, remain boolean, mark jsonb)""",
    unknown=UnknownQueue, by=_BY)  # fmt: skip
_TRUNCATE_ALL = Declared("""
  queue_truncate_all(states text[], running boolean, by text, max_jobs int, mark jsonb)
  -> row (cancelled int, cancelling int, busy boolean, remain boolean, mark jsonb)""", by=_BY)  # fmt: skip
_TOP = Declared("""
  queue_top(queue text, states text[], max_jobs int, after text)
  -> rows (position id bigint, task state text, priority int, run_at enqueued_at timestamptz, place text)
     order by r.position""", unknown=UnknownQueue)  # fmt: skip
_PAUSE = Simple("pause(queue text, who text) -> boolean", bool, unknown=UnknownQueue, who=_WHO)
_RESUME = Simple("resume(queue text, who text) -> boolean", bool, unknown=UnknownQueue, who=_WHO)


def _queues(text: str) -> list[QueueInfo]:
    rows = ({name: value for name, value in row.items() if value is not None} for row in loads(text))
    return [record(QueueInfo, row) for row in rows]


QUEUES = View("queues", "queues", _queues, which="name", seconds=["error_retention", "metrics_retention"])
"""All queues that have settings or have had a job, or the one of this name."""


class Queues(Noun):
    """The queues of the app's database."""

    def list(self) -> Verb[ListOf[QueueInfo]]:
        """List every queue that has settings or has seen a job, by name.

        for queue in await app.queues.list(): print(queue.name, queue.paused_by)
        """
        return self._verb(QUEUES())

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
        random_order: bool | None = None,
    ) -> Verb[str]:
        """Create a queue or change its settings; return "created", "changed" or "unchanged".

        None leaves a setting unchanged.

        `retention` is brief, default or long, for jobs enqueued from now on. `max_attempts` applies to jobs that
        neither set it themselves nor by their task (0: 5 again). `notify` publishes transitions of its jobs.
        `error_retention` and `metrics_retention` are the retention of its error log and its time series ("0 s": the
        general ones again). `own_names`, set before the first job, gives it a separate namespace of subjects. With
        `random_order`, jobs enqueued from now on run in random order. Raises ConfigError, and InvalidArgument for a
        time out of range or for `own_names` of a queue that has had jobs.

            await app.queues.set("mail", retention="brief", max_attempts=3)
        """
        check_name("queue", queue, 64)
        if retention is not None and retention not in ("brief", "default", "long"):
            raise ConfigError("retention", retention, "must be brief, default or long")
        if max_attempts is not None and (isinstance(max_attempts, bool) or not isinstance(max_attempts, int)):
            raise ConfigError("max_attempts", max_attempts, "must be a whole number from 0 to 32767")
        flags = {"notify": notify, "own_names": own_names, "random_order": random_order}
        call = _SET.call(
            str, queue=queue, retention=retention, max_attempts=max_attempts, by=by,
            error_retention=duration("error_retention", error_retention),
            metrics_retention=duration("metrics_retention", metrics_retention),
            **{name: None if on is None else bool(on) for name, on in flags.items()},
        )  # fmt: skip
        return self._verb(call)

    def truncate(
        self,
        queue: str,
        *,
        states: Sequence[str] | None = None,
        running: bool = False,
        by: str | None = None,
        on_batch: Callable[[int], object] | None = None,
    ) -> Verb[Truncated]:
        """Cancel all jobs of a queue except running ones, in batches of 10,000; return the counts. Raises UnknownQueue.

        `states` are some of available, scheduled, retrying, waiting; `running` cancels running jobs, too. On the app's
        own connections each batch is a separate transaction, so a claim waits for one batch at most. `on_batch` is
        called with the size of each batch.

            (await app.queues.truncate("mail")).cancelled
        """
        steps = partial(_truncate, queue, on_batch, states=states, running=running, by=by)
        return self._verb(steps, "truncate")

    def truncate_all(
        self,
        *,
        states: Sequence[str] | None = None,
        running: bool = False,
        by: str | None = None,
        on_batch: Callable[[int], object] | None = None,
    ) -> Verb[Truncated]:
        """Truncate all queues, one by one, as `truncate` does; return the counts.

        (await app.queues.truncate_all(states=["scheduled"])).cancelled
        """
        steps = partial(_truncate, None, on_batch, states=states, running=running, by=by)
        return self._verb(steps, "truncate_all")

    def drop(self, queue: str, *, truncate: bool = False, by: str | None = None) -> Verb[bool]:
        """Remove an unused queue, optionally after a truncate; False: there is none.

        Raises InvalidArgument if it has open jobs, workers or schedules. Its history remains until it is pruned.

            await app.queues.drop("mail", truncate=True)
        """
        return self._verb(partial(_drop, queue, by) if truncate else _DROP(queue, by), "drop")

    def top(
        self, queue: str, *, states: Sequence[str] | None = None, max_jobs: int = 50, after: str | None = None
    ) -> Verb[ListOf[TopJob]]:
        """List the next jobs of a queue in the order in which they would run. Raises UnknownQueue.

        `states` are some of available, scheduled, retrying; `after` is the `place` of the last job of the previous
        page.

            for job in await app.queues.top("mail", max_jobs=10): print(job.position, job.id, job.task)
        """
        check_name("queue", queue, 64)
        those = None if states is None else tuple(states)
        return self._verb(_TOP.call(records(TopJob), queue=queue, states=those, max_jobs=max_jobs, after=after))

    def pause(self, queue: str, by: str | None = None) -> Verb[bool]:
        """Stop starting jobs of a queue until `resume`; running jobs continue. False: it was already paused.

        Raises UnknownQueue.

            await app.queues.pause("mail", by="ada")
        """
        return self._verb(_PAUSE(queue, by))

    def resume(self, queue: str, by: str | None = None) -> Verb[bool]:
        """Resume a paused queue; False: it was not paused. Raises UnknownQueue."""
        return self._verb(_RESUME(queue, by))


def _truncate(queue: str | None, on_batch: Callable[[int], object] | None, **which: Any) -> Steps[Truncated]:
    mark: str | None = None
    cancelled = cancelling = 0
    while True:
        batch = yield truncate_batch(queue, mark, **which)
        cancelled, cancelling = cancelled + batch.done.cancelled, cancelling + batch.done.cancelling
        mark = batch.mark
        if on_batch:
            on_batch(batch.done.cancelled)
        if not batch.remain:
            return Truncated(cancelled, cancelling, batch.done.busy)


def _drop(queue: str, by: str | None) -> Steps[bool]:
    if (yield UNUSED(queue)):  # otherwise its jobs would be cancelled, and the queue would stay
        yield from _truncate(queue, None, by=by)
    found: bool = yield _DROP(queue, by)
    return found


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of one call of queue_truncate, and the input of the next."""

    done: Truncated
    remain: bool
    mark: str


def truncate_batch(
    queue: str | None, mark: str | None, *, states: Sequence[str] | None = None, running: bool = False, by: str | None
) -> Call[Batch]:
    """Run one batch of a truncate, after that with this mark; None: of all queues."""
    those = None if states is None else tuple(states)
    given: dict[str, Value] = {"states": those, "running": bool(running), "by": by, "max_jobs": BATCH, "mark": mark}
    if queue is None:
        return _TRUNCATE_ALL.call(_batch, **given)
    check_name("queue", queue, 64)
    return _TRUNCATE.call(_batch, queue=queue, **given)


def _batch(text: str) -> Batch:
    row: dict[str, Any] = loads(text)
    return Batch(record(Truncated, row), row["remain"], json.dumps(row["mark"]))
