"""The verbs that end an attempt or an iteration of a subject, for the finisher and for the users' own transactions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache

from tallybook._db.declared import Call, Declared
from tallybook._model.durations import seconds_text
from tallybook._model.outcome import Complete, Drop, Kill, Reschedule, SubjectOutcome

Attempt = tuple[str, int, int]  # lease, job, attempt: the arguments of every end

ATTEMPT = "lease uuid, job_id bigint, attempt int"
AS_ARRAYS = {"leases": "array[{lease:uuid}]", "job_ids": "array[{job_id:bigint}]", "attempts": "array[{attempt:int}]"}
"""The arguments for one attempt, for functions that accept many."""
COMPLETE = Declared(f"complete({ATTEMPT}, result jsonb) -> boolean")
_ATTEMPTS = "leases uuid[], job_ids bigint[], attempts int[]"
COMPLETE_MANY = Declared(f"complete_many({_ATTEMPTS}) -> bigint[]")
COMPLETE_MANY_WITH = Declared(f"complete_many({_ATTEMPTS}, results text[]) -> bigint[]")
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
    """End an attempt in an atomic task's transaction. "left": the handler has left it; no other may be used."""
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

_VERBS = {
    "reschedule": f"({ATTEMPT}, run_at timestamptz, run_in interval, args jsonb, version int)",
    "complete": f"({ATTEMPT}, args jsonb, version int)",
    "drop": f"({ATTEMPT})",
    "kill": f"({ATTEMPT}, reason text, args jsonb, version int)",
}
VERBS = {name: Declared(f"subject_{name}{params} -> text", verb=name) for name, params in _VERBS.items()}


@dataclass(frozen=True, slots=True)
class SubjectEnd:
    """One verb with its values by name, after lease, job and attempt; missing values are null."""

    verb: str
    given: Mapping[str, str | None]
    wake_in: timedelta | None = None

    @property
    def values(self) -> dict[str, str | None]:
        """The values of the following parameters, in order."""
        return {name: self.given.get(name) for name in list(VERBS[self.verb].params)[3:]}

    @property
    def state(self) -> str:
        """The answer of `ended` for an attempt that ended this way."""
        return {"reschedule": "snoozed", "kill": "dead"}.get(self.verb, "completed")

    @property
    def said(self) -> str:
        """The verb's answer when it succeeds."""
        if self.verb == "reschedule":
            return "scheduled" if self.wake_in else "available"
        return {"kill": "dead", "drop": "dropped"}.get(self.verb, "completed")

    def call(self, attempt: Attempt) -> Call[str]:
        """Return the Call for a handler's own transaction, on any driver."""
        return VERBS[self.verb].call(str, **named(attempt), **self.values)


def subject_end(outcome: SubjectOutcome, args: str | None, version: int) -> SubjectEnd:
    """Return the verb for an outcome; `args` are new args as JSON text, of this version, or None."""
    new_args = {} if args is None else {"args": args, "version": str(version)}
    match outcome:
        case Reschedule():
            run_at, run_in = outcome.run_at, outcome.run_in
            when = {"run_at": run_at.isoformat() if run_at else None}
            when["run_in"] = None if run_in is None else seconds_text(run_in)
            return SubjectEnd("reschedule", {**when, **new_args}, outcome.delay)
        case Complete():
            return SubjectEnd("complete", new_args)
        case Drop():
            return SubjectEnd("drop", {})
        case Kill():
            return SubjectEnd("kill", {"reason": outcome.reason or None, **new_args})
        case _:
            raise TypeError(f"{type(outcome).__name__} is none of Reschedule, Complete, Drop, Kill")
