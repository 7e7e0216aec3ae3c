"""The verbs that end an iteration of a subject, for the finisher's statement and for transactions of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, timedelta

from tallybook._db.calls import Call
from tallybook._model.subject_outcome import Complete, Drop, Kill, Reschedule, SubjectOutcome

__all__ = ["SubjectEnd", "subject_end"]


@dataclass(frozen=True, slots=True)
class SubjectEnd:
    """One verb with its values, as text; `types` are those of its arguments after lease, job and attempt."""

    verb: str
    types: Sequence[str]
    values: Sequence[str | None]
    wake_in: timedelta | None = None

    @property
    def sql(self) -> str:
        """With psycopg's placeholders; the first three parameters are lease, job and attempt."""
        rest = "".join(f", %s::{kind}" for kind in self.types)
        return f"select tallybook.subject_{self.verb}(%s::uuid, %s::bigint, %s::int{rest})"

    def atomic(self, attempt: tuple[str, int, int]) -> Call[str]:
        """For the transaction of an atomic task; "left" where the handler has left it."""
        rest = "".join(f", cast(cast(%(v{at})s as text) as {kind})" for at, kind in enumerate(self.types))
        sql = (
            "select case when not tallybook._atomic() then 'left'"
            f" else tallybook.subject_{self.verb}(cast(cast(%(lease)s as text) as uuid),"
            f" cast(cast(%(job_id)s as text) as bigint), cast(cast(%(attempt)s as text) as int){rest}) end"
        )
        lease, job_id, number = attempt
        params = {"lease": lease, "job_id": str(job_id), "attempt": str(number)}
        return Call(self.verb, sql, {**params, **{f"v{at}": value for at, value in enumerate(self.values)}}, str)


def subject_end(outcome: SubjectOutcome, args: str | None, version: int) -> SubjectEnd:
    """The verb for an outcome; `args` as JSON text, of this version, where there are new ones."""
    new_args = (args, None if args is None else str(version))
    match outcome:
        case Reschedule():
            run_at, run_in = outcome.run_at, outcome.run_in
            values = (
                None if run_at is None else run_at.astimezone(UTC).isoformat(),
                None if run_in is None else f"{run_in.total_seconds():.6f} s",
                *new_args,
            )
            return SubjectEnd("reschedule", ("timestamptz", "interval", "jsonb", "int"), values, outcome.delay)
        case Complete():
            return SubjectEnd("complete", ("jsonb", "int"), new_args)
        case Drop():
            return SubjectEnd("drop", (), ())
        case Kill():
            return SubjectEnd("kill", ("text", "jsonb", "int"), (outcome.reason or None, *new_args))
        case _:
            raise TypeError(f"{type(outcome).__name__} is none of Reschedule, Complete, Drop, Kill")
