"""The verbs that end an iteration of a subject, for the finisher's statement and for transactions of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from tallybook._db.declared import Call
from tallybook._model.subject_outcome import Complete, Drop, Kill, Reschedule, SubjectOutcome

__all__ = ["SubjectEnd", "subject_end"]


@dataclass(frozen=True, slots=True)
class SubjectEnd:
    """One verb with its values; each is named, with its type and its text, after lease, job and attempt."""

    verb: str
    given: Sequence[tuple[str, str, str | None]]
    wake_in: timedelta | None = None

    @property
    def sql(self) -> str:
        """With psycopg's placeholders; the first three parameters are lease, job and attempt."""
        rest = "".join(f", {name} => %s::{kind}" for name, kind, _ in self.given)
        return f"select tallybook.subject_{self.verb}(%s::uuid, %s::bigint, %s::int{rest})"

    @property
    def values(self) -> tuple[str | None, ...]:
        """Of the parameters that follow."""
        return tuple(value for _, _, value in self.given)

    @property
    def state(self) -> str:
        """What `ended` says of an attempt that has ended so."""
        return {"reschedule": "snoozed", "kill": "dead"}.get(self.verb, "completed")

    @property
    def said(self) -> str:
        """What the verb answers when it is done."""
        if self.verb == "reschedule":
            return "scheduled" if self.wake_in else "available"
        return {"kill": "dead", "drop": "dropped"}.get(self.verb, "completed")

    def call(self, attempt: tuple[str, int, int]) -> Call[str]:
        """For a transaction of the handler's own, on any driver."""
        return self._call(attempt, "select {}")

    def atomic(self, attempt: tuple[str, int, int]) -> Call[str]:
        """For the transaction of an atomic task; "left" where the handler has left it."""
        return self._call(attempt, "select case when not tallybook._atomic() then 'left' else {} end")

    def _call(self, attempt: tuple[str, int, int], around: str) -> Call[str]:
        rest = "".join(f", {name} => cast(cast(%({name})s as text) as {kind})" for name, kind, _ in self.given)
        sql = around.format(
            f"tallybook.subject_{self.verb}(cast(cast(%(lease)s as text) as uuid),"
            f" cast(cast(%(job_id)s as text) as bigint), cast(cast(%(attempt)s as text) as int){rest})"
        )
        lease, job_id, number = attempt
        params = {"lease": lease, "job_id": str(job_id), "attempt": str(number)}
        return Call(self.verb, sql, {**params, **{name: value for name, _, value in self.given}}, str)


def subject_end(outcome: SubjectOutcome, args: str | None, version: int) -> SubjectEnd:
    """The verb for an outcome; `args` as JSON text, of this version, where there are new ones."""
    new_args = (("args", "jsonb", args), ("version", "int", str(version))) if args is not None else ()
    match outcome:
        case Reschedule():
            run_at, run_in = outcome.run_at, outcome.run_in
            when = ("run_in", "interval", f"{run_in.total_seconds():.6f} s") if run_in is not None else None
            at = ("run_at", "timestamptz", run_at.isoformat()) if run_at is not None else None
            return SubjectEnd("reschedule", (*filter(None, (when, at)), *new_args), outcome.delay)
        case Complete():
            return SubjectEnd("complete", new_args)
        case Drop():
            return SubjectEnd("drop", ())
        case Kill():
            return SubjectEnd("kill", (("reason", "text", outcome.reason or None), *new_args))
        case _:
            raise TypeError(f"{type(outcome).__name__} is none of Reschedule, Complete, Drop, Kill")
