"""app.subjects: many subjects at once, and the list of them; one subject is `task.subject(name)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tallybook._db import subjects
from tallybook._db.declared import Declared
from tallybook._db.texts import checked, loads, record, some_of
from tallybook._db.verb import ListOf, Noun, Steps, Verb, traced
from tallybook._model.job import checked_calls
from tallybook._model.options import whole
from tallybook._model.subject import SubjectCall, SubjectInfo, SubjectPage, SubjectReport

LISTED = Declared("""
  subjects(task text, queue text, states text[], prefix text, after text, max_subjects int, max_looked int)
  -> rows (task_name text, subject text, job_id bigint, queue_name text, state text, priority int, args jsonb,
           iterations int, failures int, attempts int, next_run_at timestamptz, last_at timestamptz, last_error text,
           error jsonb, made_at timestamptz, ended_at timestamptz, cursor text)""")
STATES = ("planned", "pending", "active", "completed", "killed", "dead")
_LOOKED = 50_000
_HOW = "task.subject(name).job(...)"


class Subjects(Noun):
    """The subjects of the app's database: named jobs that reschedule themselves."""

    def list(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        states: Sequence[str] | None = None,
        prefix: str | None = None,
        after: str | None = None,
        max_subjects: int = 50,
    ) -> Verb[SubjectPage]:
        """List the subjects that match all filters, by task and name, at most `max_subjects` (1 to 1000).

        `states` are some of planned, pending, active, completed, killed, dead. If only the last three are passed, the
        list has stopped subjects, the last one to stop first, with `state` and `last_error`. Pass a page's `next` as
        `after` to get the next page.

            stopped = await app.subjects.list(task="refresh", states=["killed", "dead"])
        """
        call = LISTED.call(
            _page, task=checked("task", task), queue=checked("queue", queue), states=some_of("states", states, STATES),
            prefix=checked("prefix", prefix), after=checked("after", after),
            max_subjects=whole("max_subjects", max_subjects, 1, 1000), max_looked=_LOOKED,
        )  # fmt: skip
        return self._verb(call)

    def push_many(self, calls: Iterable[SubjectCall]) -> Verb[ListOf[SubjectReport]]:
        """Create the missing ones of these subjects by one statement; return one report each, in their order.

        `report` is created, or unchanged for a subject that exists, in any state.

            await app.subjects.push_many(refresh.subject(f"asset:{n}").job(n) for n in ids)
        """
        listed = checked_calls(calls, SubjectCall, "subject", _HOW)
        return self._verb(traced(self._app._tracing, listed, subjects.push_many) if listed else _nothing, "push_many")

    def upsert_many(self, calls: Iterable[SubjectCall]) -> Verb[ListOf[SubjectReport]]:
        """Create or change these subjects by one statement; return one report each, in their order.

        Running subjects are not changed. A thousand per call is a good size. `report` as in TaskSubject.upsert.

            reports = await app.subjects.upsert_many(refresh.subject(f"asset:{n}").job(n) for n in ids)
        """
        listed = checked_calls(calls, SubjectCall, "subject", _HOW)
        made = traced(self._app._tracing, listed, subjects.upsert_many, keeps=True) if listed else _nothing
        return self._verb(made, "upsert_many")


def _page(found: str) -> SubjectPage:
    rows: list[dict[str, Any]] = loads(found)
    more = rows.pop() if rows and rows[-1]["subject"] is None else None
    infos = [record(SubjectInfo, row, task_name="task", queue_name="queue") for row in rows]
    return SubjectPage(infos, None if more is None else more["cursor"])


def _nothing() -> Steps[list[SubjectReport]]:
    yield from ()
    return []
