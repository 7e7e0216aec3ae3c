"""The verbs that end an iteration of a subject, for the finisher's statement and for the user's transactions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from tallybook._db.declared import Call, Declared
from tallybook._db.ends import ATTEMPT, atomic, named
from tallybook._model.subject_outcome import Complete, Drop, Kill, Reschedule, SubjectOutcome

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
    def sql(self) -> str:
        """The statement with psycopg's placeholders; the first three parameters are lease, job and attempt."""
        return VERBS[self.verb].worker

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

    def call(self, attempt: tuple[str, int, int]) -> Call[str]:
        """Return the Call for a handler's own transaction, on any driver."""
        return VERBS[self.verb].call(str, **named(attempt), **self.values)

    def atomic(self, attempt: tuple[str, int, int]) -> Call[str]:
        """Return the Call for an atomic task's transaction; "left" if the handler has left it."""
        return atomic(VERBS[self.verb], attempt, **self.values)


def subject_end(outcome: SubjectOutcome, args: str | None, version: int) -> SubjectEnd:
    """Return the verb for an outcome; `args` are new args as JSON text, of this version, or None."""
    new_args = {} if args is None else {"args": args, "version": str(version)}
    match outcome:
        case Reschedule():
            run_at, run_in = outcome.run_at, outcome.run_in
            when = {
                "run_at": None if run_at is None else run_at.isoformat(),
                "run_in": None if run_in is None else f"{run_in.total_seconds():.6f} s",
            }
            return SubjectEnd("reschedule", {**when, **new_args}, outcome.delay)
        case Complete():
            return SubjectEnd("complete", new_args)
        case Drop():
            return SubjectEnd("drop", {})
        case Kill():
            return SubjectEnd("kill", {"reason": outcome.reason or None, **new_args})
        case _:
            raise TypeError(f"{type(outcome).__name__} is none of Reschedule, Complete, Drop, Kill")
