"""The verbs that end an attempt, as Calls: for the user's transactions that include an end, on any driver."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tallybook._db.declared import Call, Declared

Attempt = tuple[str, int, int]
"""Lease, job, attempt: the arguments of every end."""

ATTEMPT = "lease uuid, job_id bigint, attempt int"
AS_ARRAYS = {"leases": "array[{lease:uuid}]", "job_ids": "array[{job_id:bigint}]", "attempts": "array[{attempt:int}]"}
"""The arguments for one attempt, for functions that accept many."""
COMPLETE = Declared(f"complete({ATTEMPT}, result jsonb) -> boolean")
COMPLETE_MANY = Declared("complete_many(leases uuid[], job_ids bigint[], attempts int[]) -> bigint[]")
COMPLETE_MANY_WITH = Declared(
    "complete_many(leases uuid[], job_ids bigint[], attempts int[], results text[]) -> bigint[]"
)
FAIL = Declared(f"fail({ATTEMPT}, error jsonb, retry_in interval, max_attempts int, final boolean) -> text")
SNOOZE = Declared(f"snooze({ATTEMPT}, delay interval) -> text")
CANCEL_RUNNING = Declared(f"cancel_running({ATTEMPT}, reason text) -> text", verb="cancelled")
CRASH = Declared(f"crash({ATTEMPT}, error jsonb) -> text")
UNCLAIM = Declared(f"unclaim({ATTEMPT}, delay interval) -> text")
MOVE = Declared(f"move({ATTEMPT}) -> text")
ENDED = Declared(f"ended({ATTEMPT}) -> text")


def complete(attempt: Attempt, result: str | None = None) -> Call[bool]:
    """End an attempt as completed, with a result as JSON text; False if it has already ended otherwise."""
    return COMPLETE.call(bool, **named(attempt), result=result)


def atomic_complete(attempt: Attempt, result: str | None) -> Call[str]:
    """Complete in an atomic task's transaction: completed, refused or left. The result is as in complete_many."""
    values = {} if result is None else {"result": result}
    return Call("complete", _completed(result is None), {**named(attempt), **values}, str)


def named(attempt: Attempt) -> dict[str, str]:
    """Return an attempt as the parameters of an end."""
    lease, job_id, number = attempt
    return {"lease": lease, "job_id": str(job_id), "attempt": str(number)}


def atomic(verb: Declared, attempt: Attempt, **values: str | int | None) -> Call[str]:
    """End an attempt in an atomic task's transaction; "left" if the handler has left it: no other may be used.

    Else the answer of the verb: scheduled, available, cancelled, dead, completed or refused.
    """
    return replace(verb.call(str, **named(attempt), **values), sql=_unless_left(verb))


@cache
def _unless_left(verb: Declared) -> str:
    return _UNLESS_LEFT.format(verb.called())


@cache
def _completed(plain: bool) -> str:
    # With a result by complete_many, which also accepts the reason why there is no result.
    many = COMPLETE_MANY_WITH.called(**AS_ARRAYS, results="array[{result:text}]")
    done = COMPLETE.called(result="null") if plain else f"{many} = '{{}}'"
    return _UNLESS_LEFT.format(f"case when {done} then 'completed' else 'refused' end")


_UNLESS_LEFT = "select case when not tallybook._atomic() then 'left' else {} end"
