"""The verbs over many jobs, and what waits for one, as pure values like those of calls.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tallybook._db.calls import Call, instant, text_array
from tallybook._db.stored import loads
from tallybook._model.job import Cancelled, DeadLetter, Retried
from tallybook._model.options import text_problem
from tallybook._model.payload import encode
from tallybook.errors import ConfigError, InvalidArgument, UnknownJob

__all__ = [
    "DeadFilter",
    "Ended",
    "cancel_many",
    "dead_count",
    "dead_letters",
    "drop_dead",
    "drop_dead_many",
    "result",
    "retry_dead",
]

_CANCEL_MANY = """\
select cast(to_json(r) as text) from tallybook.cancel_many(
  queue => cast(%(queue)s as text), task => cast(%(task)s as text), unique_key => cast(%(unique_key)s as text),
  order_key => cast(%(order_key)s as text), args => cast(cast(%(args)s as text) as jsonb),
  states => cast(cast(%(states)s as text) as text[]), reason => cast(%(reason)s as text),
  max_jobs => cast(cast(%(max_jobs)s as text) as int)) as r"""

_FILTER = """\
  queue => cast(%(queue)s as text), task => cast(%(task)s as text), reason => cast(%(reason)s as text),
  text => cast(%(error)s as text), args => cast(cast(%(args)s as text) as jsonb),
  since => cast(cast(%(since)s as text) as timestamptz), before => cast(cast(%(before)s as text) as timestamptz),
  max_jobs => cast(cast(%(max_jobs)s as text) as int)"""

_DEAD_LETTERS = f"select cast(coalesce(json_agg(r), '[]') as text) from tallybook.dead_letters(\n{_FILTER}) as r"  # noqa: S608
_DEAD_COUNT = f"select count(*) from tallybook.dead_letters(\n{_FILTER})"  # noqa: S608
_RETRY_DEAD = f"select cast(to_json(r) as text) from tallybook.retry_dead(\n{_FILTER}) as r"  # noqa: S608
_DROP_DEAD_MANY = f"select tallybook.drop_dead_many(\n{_FILTER})"
_DROP_DEAD = "select tallybook.drop_dead(cast(cast(%(job_id)s as text) as bigint))"
_RESULT = "select cast(to_json(r) as text) from tallybook.result(cast(cast(%(job_id)s as text) as bigint)) as r"

_STATES = ("scheduled", "waiting", "available", "running", "dead")
_REASONS = ("failed", "crashed", "expired", "killed")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadFilter:
    """Which dead letters; None matches all. ConfigError for what cannot be meant."""

    queue: str | None = None
    task: str | None = None
    reason: str | None = None
    error: str | None = None
    args: Mapping[str, object] | None = None
    since: datetime | None = None
    before: datetime | None = None

    def params(self, max_jobs: int) -> dict[str, str | None]:
        """As the statements take them."""
        if self.reason is not None and self.reason not in _REASONS:
            raise ConfigError("reason", self.reason, f"is one of {', '.join(_REASONS)}")
        return {
            "queue": _text("queue", self.queue),
            "task": _text("task", self.task),
            "reason": self.reason,
            "error": _text("error", self.error),
            "args": _args(self.args),
            "since": _instant_text("since", self.since),
            "before": _instant_text("before", self.before),
            "max_jobs": _limit(max_jobs),
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended; `state` is None while it goes on."""

    task: str
    state: str | None
    result: Any
    error: dict[str, Any] | None


def cancel_many(
    *,
    queue: str | None,
    task: str | None,
    unique: str | None,
    order_key: str | None,
    args: Mapping[str, object] | None,
    states: tuple[str, ...] | None,
    reason: str | None,
    max_jobs: int,
) -> Call[Cancelled]:
    """Cancel every open job that matches all that is given, or dead ones by `states`; one filter is needed."""
    if queue is None and task is None and unique is None and order_key is None and args is None:
        raise InvalidArgument("cancel_many needs a filter", hint="Name a queue, a task, a key or args")
    if states is not None and (unknown := [state for state in states if state not in _STATES]):
        raise ConfigError("states", unknown, f"are some of {', '.join(_STATES)}")
    params = {
        "queue": _text("queue", queue),
        "task": _text("task", task),
        "unique_key": _text("unique", unique),
        "order_key": _text("order_key", order_key),
        "args": _args(args),
        "states": None if states is None else text_array(states),
        "reason": _text("reason", reason),
        "max_jobs": _limit(max_jobs),
    }
    return Call("cancel_many", _CANCEL_MANY, params, lambda found: Cancelled(**loads(found)))


def dead_letters(which: DeadFilter, max_jobs: int) -> Call[list[DeadLetter]]:
    """List dead letters, newest first."""
    return Call("dead_letters", _DEAD_LETTERS, which.params(max_jobs), _letters)


def dead_count(which: DeadFilter, max_jobs: int) -> Call[int]:
    """How many dead letters match, at most `max_jobs`."""
    return Call("dead_letters", _DEAD_COUNT, which.params(max_jobs), int)


def retry_dead(which: DeadFilter, max_jobs: int) -> Call[Retried]:
    """Give every dead letter that matches another attempt, oldest first."""
    return Call("retry_dead", _RETRY_DEAD, which.params(max_jobs), lambda found: Retried(**loads(found)))


def drop_dead(job_id: int) -> Call[bool]:
    """Throw one dead letter away; False: there is none."""
    return Call("drop_dead", _DROP_DEAD, {"job_id": str(job_id)}, bool)


def drop_dead_many(which: DeadFilter, max_jobs: int) -> Call[int]:
    """Throw away every dead letter that matches, oldest first; how many."""
    return Call("drop_dead_many", _DROP_DEAD_MANY, which.params(max_jobs), int)


def result(job_id: int) -> Call[Ended]:
    """How a job ended, if it has; UnknownJob if there is none, or it is not committed."""

    def read(found: str | None) -> Ended:
        if found is None:
            raise UnknownJob(job_id)
        columns = loads(found)
        return Ended(columns["task"], columns["state"], columns["result"], columns["error"])

    return Call("result", _RESULT, {"job_id": str(job_id)}, read)


def _letters(found: str) -> list[DeadLetter]:
    letters = []
    for row in loads(found):
        died_at, enqueued_at = instant(row["died_at"]), instant(row["enqueued_at"])
        assert died_at is not None and enqueued_at is not None
        letters.append(
            DeadLetter(
                job=row["job_id"],
                died_at=died_at,
                queue=row["queue_name"],
                task=row["task_name"],
                reason=row["why"],
                failures=row["failures"],
                crashes=row["crashes"],
                attempt=row["attempt"],
                enqueued_at=enqueued_at,
                args=row["job_args"],
                summary=row["summary"],
                error=row["last_error"],
            )
        )
    return letters


def _text(option: str, value: str | None) -> str | None:
    if value is not None and (not isinstance(value, str) or (problem := text_problem(value))):
        raise ConfigError(option, value, "not a text" if not isinstance(value, str) else problem)
    return value


def _args(args: Mapping[str, object] | None) -> str | None:
    if args is not None and not isinstance(args, Mapping):
        raise ConfigError("args", args, "not a mapping", hint="Write args={'user_id': 42}")
    return None if args is None else encode(dict(args), task="the filter")


def _instant_text(option: str, value: datetime | None) -> str | None:
    if value is not None and (not isinstance(value, datetime) or value.utcoffset() is None):
        raise ConfigError(option, value, "not an aware datetime", hint="Write datetime.now(UTC) - ...")
    return None if value is None else value.astimezone(UTC).isoformat()


def _limit(max_jobs: int) -> str:
    if isinstance(max_jobs, bool) or not isinstance(max_jobs, int) or not 1 <= max_jobs <= 2**31 - 1:
        raise ConfigError("max_jobs", max_jobs, "is a whole number from 1 on")
    return str(max_jobs)
