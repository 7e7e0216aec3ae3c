"""The verbs over queues, as pure values."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tallybook._db.declared import Call, Declared, Simple, Value, View
from tallybook._db.texts import duration, loads, record, records, text_array
from tallybook._model.options import check_name
from tallybook._model.queue import QueueInfo, TopJob, Truncated
from tallybook.errors import ConfigError, UnknownQueue

_BY = "coalesce({by}, session_user)"
_SET = Declared("""
  queue_set(queue text, retention text, max_attempts int, notify boolean, by text, error_retention interval,
            metrics_retention interval, own_names boolean, random_order boolean) -> text""", by=_BY)  # fmt: skip
drop = Simple("queue_drop(queue text, by text) -> boolean", bool, names={"queue": ("queue", 64)}, by=_BY)
unused = Simple("_queue_unused(p_queue text) -> boolean", bool, verb="queue_drop")
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


def set_(
    queue: str,
    *,
    retention: str | None,
    max_attempts: int | None,
    notify: bool | None,
    own_names: bool | None,
    random_order: bool | None,
    by: str | None,
    **kept: str | timedelta | None,
) -> Call[str]:
    """`kept`: error_retention and metrics_retention."""
    check_name("queue", queue, 64)
    if retention is not None and retention not in ("brief", "default", "long"):
        raise ConfigError("retention", retention, "must be brief, default or long")
    if max_attempts is not None and (isinstance(max_attempts, bool) or not isinstance(max_attempts, int)):
        raise ConfigError("max_attempts", max_attempts, "must be a whole number from 0 to 32767")
    flags = {"notify": notify, "own_names": own_names, "random_order": random_order}
    flags = {name: None if on is None else bool(on) for name, on in flags.items()}
    times = {name: duration(name, value) for name, value in kept.items()}
    return _SET.call(str, queue=queue, retention=retention, max_attempts=max_attempts, by=by, **flags, **times)


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of one call of queue_truncate, and the input of the next."""

    done: Truncated
    remain: bool
    mark: str


def truncate(
    queue: str | None, *, states: Sequence[str] | None, running: bool, by: str | None, max_jobs: int, mark: str | None
) -> Call[Batch]:
    """Run one batch of a truncate; None: of all queues."""
    those = None if states is None else text_array(tuple(states))
    given: dict[str, Value] = {"states": those, "running": bool(running), "by": by, "max_jobs": max_jobs, "mark": mark}
    if queue is None:
        return _TRUNCATE_ALL.call(_batch, **given)
    check_name("queue", queue, 64)
    return _TRUNCATE.call(_batch, queue=queue, **given)


def _batch(text: str) -> Batch:
    row: dict[str, Any] = loads(text)
    return Batch(record(Truncated, row), row["remain"], json.dumps(row["mark"]))


def top(queue: str, *, states: Sequence[str] | None, max_jobs: int, after: str | None) -> Call[list[TopJob]]:
    check_name("queue", queue, 64)
    those = None if states is None else text_array(tuple(states))
    return _TOP.call(records(TopJob), queue=queue, states=those, max_jobs=max_jobs, after=after)


def _queues(text: str) -> list[QueueInfo]:
    rows = ({name: value for name, value in row.items() if value is not None} for row in loads(text))
    return [record(QueueInfo, row) for row in rows]


queues = View("queues", "queues", _queues, which="name", seconds=["error_retention", "metrics_retention"])
"""All queues that have settings or have had a job, or the one of this name."""
