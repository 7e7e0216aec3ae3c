"""The verbs over queues, as pure values like those of calls.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tallybook._db.calls import Call, instant, text_array
from tallybook._db.stored import loads
from tallybook._model.options import check_name
from tallybook._model.queue import QueueInfo, TopJob, Truncated
from tallybook.errors import ConfigError, UnknownQueue

__all__ = ["Batch", "drop", "queues", "set_", "top", "truncate"]

_SET = """\
select tallybook.queue_set(queue => cast(%(queue)s as text), retention => cast(%(retention)s as text),
  max_attempts => cast(cast(%(max_attempts)s as text) as int), notify => cast(cast(%(notify)s as text) as boolean),
  by => coalesce(cast(%(by)s as text), session_user))"""
_DROP = """\
select tallybook.queue_drop(queue => cast(%(queue)s as text), by => coalesce(cast(%(by)s as text), session_user))"""
_TRUNCATE = """\
select cast(to_json(t) as text) from tallybook.queue_truncate(queue => cast(%(queue)s as text),
  states => cast(cast(%(states)s as text) as text[]), running => cast(cast(%(running)s as text) as boolean),
  by => coalesce(cast(%(by)s as text), session_user),
  max_jobs => cast(cast(%(max_jobs)s as text) as int), mark => cast(cast(%(mark)s as text) as jsonb)) as t"""
_TOP = """\
select cast(coalesce(json_agg(t order by t.position), '[]') as text)
  from tallybook.queue_top(queue => cast(%(queue)s as text), states => cast(cast(%(states)s as text) as text[]),
    max_jobs => cast(cast(%(max_jobs)s as text) as int), after => cast(%(after)s as text)) as t"""
_QUEUES = """\
select cast(coalesce(json_agg(q order by q.name), '[]') as text) from tallybook.queues as q
 where cast(%(name)s as text) is null or q.name = cast(%(name)s as text)"""


def set_(
    queue: str, *, retention: str | None, max_attempts: int | None, notify: bool | None, by: str | None
) -> Call[str]:
    """Make a queue or change its settings: created, changed or unchanged."""
    check_name("queue", queue, 64)
    if retention is not None and retention not in ("brief", "default", "long"):
        raise ConfigError("retention", retention, "is brief, default or long")
    if max_attempts is not None and (isinstance(max_attempts, bool) or not isinstance(max_attempts, int)):
        raise ConfigError("max_attempts", max_attempts, "is a whole number from 0 to 32767")
    params = {
        "queue": queue,
        "retention": retention,
        "max_attempts": None if max_attempts is None else str(max_attempts),
        "notify": None if notify is None else str(bool(notify)).lower(),
        "by": by,
    }
    return Call("queue_set", _SET, params, str)


def drop(queue: str, by: str | None) -> Call[bool]:
    """Forget a queue that nobody uses; False: there is none."""
    check_name("queue", queue, 64)
    return Call("queue_drop", _DROP, {"queue": queue, "by": by}, bool)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call of queue_truncate has done, and what the next one has to be told."""

    done: Truncated
    remain: bool
    mark: str


def truncate(
    queue: str, *, states: Sequence[str] | None, running: bool, by: str | None, max_jobs: int, mark: str | None
) -> Call[Batch]:
    """One batch of a truncate."""
    check_name("queue", queue, 64)
    params = {
        "queue": queue,
        "states": None if states is None else text_array(tuple(states)),
        "running": str(bool(running)).lower(),
        "by": by,
        "max_jobs": str(max_jobs),
        "mark": mark,
    }
    return Call("queue_truncate", _TRUNCATE, params, _batch, unknown=UnknownQueue)


def _batch(text: str) -> Batch:
    row: dict[str, Any] = loads(text)
    done = Truncated(row["cancelled"], row["cancelling"], row["busy"])
    return Batch(done, row["remain"], json.dumps(row["mark"]))


def top(queue: str, *, states: Sequence[str] | None, max_jobs: int, after: str | None) -> Call[list[TopJob]]:
    """The next jobs of a queue."""
    check_name("queue", queue, 64)
    listed = None if states is None else text_array(tuple(states))
    params = {"queue": queue, "states": listed, "max_jobs": str(max_jobs), "after": after}
    return Call("queue_top", _TOP, params, _top, unknown=UnknownQueue)


def _top(text: str) -> list[TopJob]:
    return [TopJob(**{**row, **_instants(row, "run_at", "enqueued_at")}) for row in loads(text)]


def queues(name: str | None = None) -> Call[list[QueueInfo]]:
    """Every queue that has settings or has seen a job, or the one of this name."""
    return Call("queues", _QUEUES, {"name": name}, _queues)


def _queues(text: str) -> list[QueueInfo]:
    found = []
    for row in loads(text):
        known = {name: value for name, value in row.items() if value is not None}
        found.append(QueueInfo(**{**known, **_instants(row, "paused_at", "created_at", "changed_at")}))
    return found


def _instants(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: instant(row[name]) for name in names}
