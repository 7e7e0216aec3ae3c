"""The verbs that end an attempt, as Calls: for transactions of the user's that carry an end, on any driver."""

from __future__ import annotations

from datetime import timedelta

from tallybook._db.declared import Call

__all__ = ["atomic_cancelled", "atomic_complete", "atomic_dead", "atomic_fail", "atomic_snooze", "complete"]

Attempt = tuple[str, int, int]
"""Lease, job, attempt: what every end names."""

_COMPLETE = """\
select tallybook.complete(cast(cast(%(lease)s as text) as uuid), cast(cast(%(job_id)s as text) as bigint),
  cast(cast(%(attempt)s as text) as int), cast(cast(%(result)s as text) as jsonb))"""

# `left`: the handler has left the transaction that it was given; nothing may be ended in another one.
_ATOMIC_COMPLETE = """\
select case when not tallybook._atomic() then 'left'
  when tallybook.complete(cast(cast(%(lease)s as text) as uuid), cast(cast(%(job_id)s as text) as bigint),
    cast(cast(%(attempt)s as text) as int)) then 'completed' else 'refused' end"""

# By complete_many, which also takes the reason why there is no result.
_ATOMIC_COMPLETE_WITH = """\
select case when not tallybook._atomic() then 'left'
  when tallybook.complete_many(array[cast(cast(%(lease)s as text) as uuid)], array[cast(cast(%(job_id)s as text) as bigint)],
    array[cast(cast(%(attempt)s as text) as int)], array[cast(%(result)s as text)]) = '{}' then 'completed' else 'refused' end"""

_ATOMIC_SNOOZE = """\
select case when not tallybook._atomic() then 'left'
  else tallybook.snooze(cast(cast(%(lease)s as text) as uuid), cast(cast(%(job_id)s as text) as bigint),
    cast(cast(%(attempt)s as text) as int), cast(cast(%(delay)s as text) as interval)) end"""

_ATOMIC_CANCELLED = """\
select case when not tallybook._atomic() then 'left'
  else tallybook.cancel_running(cast(cast(%(lease)s as text) as uuid), cast(cast(%(job_id)s as text) as bigint),
    cast(cast(%(attempt)s as text) as int), cast(%(reason)s as text)) end"""

_ATOMIC_DEAD = """\
select case when not tallybook._atomic() then 'left'
  else tallybook.fail(cast(cast(%(lease)s as text) as uuid), cast(cast(%(job_id)s as text) as bigint),
    cast(cast(%(attempt)s as text) as int), cast(cast(%(error)s as text) as jsonb), final => true) end"""


_ATOMIC_FAIL = """\
select case when not tallybook._atomic() then 'left'
  else tallybook.fail(cast(cast(%(lease)s as text) as uuid), cast(cast(%(job_id)s as text) as bigint),
    cast(cast(%(attempt)s as text) as int), cast(cast(%(error)s as text) as jsonb),
    retry_in => cast(cast(%(retry_in)s as text) as interval), max_attempts => cast(cast(%(limit)s as text) as int),
    final => cast(cast(%(final)s as text) as boolean)) end"""


def _params(attempt: Attempt) -> dict[str, str | None]:
    lease, job_id, number = attempt
    return {"lease": lease, "job_id": str(job_id), "attempt": str(number)}


def complete(attempt: Attempt, result: str | None = None) -> Call[bool]:
    """End an attempt as completed, with a result as JSON text; False: refused, it has ended otherwise."""
    return Call("complete", _COMPLETE, {**_params(attempt), "result": result}, bool)


def atomic_complete(attempt: Attempt, result: str | None) -> Call[str]:
    """The same in an atomic task's transaction: completed, refused or left. The result is as in complete_many."""
    if result is None:
        return Call("complete", _ATOMIC_COMPLETE, _params(attempt), str)
    return Call("complete", _ATOMIC_COMPLETE_WITH, {**_params(attempt), "result": result}, str)


def atomic_snooze(attempt: Attempt, seconds: float) -> Call[str]:
    """Run the job again after so many seconds: scheduled, available, refused or left."""
    return Call("snooze", _ATOMIC_SNOOZE, {**_params(attempt), "delay": f"{seconds:.6f} s"}, str)


def atomic_cancelled(attempt: Attempt, reason: str | None) -> Call[str]:
    """End the attempt as cancelled: cancelled, refused or left."""
    return Call("cancelled", _ATOMIC_CANCELLED, {**_params(attempt), "reason": reason}, str)


def atomic_dead(attempt: Attempt, error: str) -> Call[str]:
    """Give the job up, with an error as JSON text: dead, refused or left."""
    return Call("fail", _ATOMIC_DEAD, {**_params(attempt), "error": error}, str)


def atomic_fail(
    attempt: Attempt, error: str, retry_in: timedelta | None, limit: int | None, *, final: bool
) -> Call[str]:
    """End the attempt as failed, its writes committed: scheduled, available, dead, refused or left."""
    more = {
        "error": error,
        "retry_in": None if retry_in is None else f"{retry_in.total_seconds():.6f} s",
        "limit": None if limit is None else str(limit),
        "final": str(final).lower(),
    }
    return Call("fail", _ATOMIC_FAIL, {**_params(attempt), **more}, str)
