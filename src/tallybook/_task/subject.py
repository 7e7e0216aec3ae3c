"""Subjects of a task: named jobs that reschedule themselves.

See https://github.com/tallybook/tallybook/blob/main/docs/subjects.md.

    asset = refresh.subject("asset:42")
    await asset.push(42)                     create it if it does not exist
    await asset.upsert(42).on(conn)          create or change it, in conn's transaction; never while its handler runs
    await refresh.append(42)                 create one with a new name
    await app.subjects.upsert_many(refresh.subject(f"asset:{n}").job(n) for n in ids)

Pass options by `with_`, as for any job: `refresh.with_(delay="5 min").subject("asset:42").push(42)`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Generic, ParamSpec, Protocol, TypeVar

from tallybook._db import subjects
from tallybook._db.declared import Call
from tallybook._db.source import Source
from tallybook._db.verb import Made, Verb, traced
from tallybook._model.job import JobCall
from tallybook._model.options import Options
from tallybook._model.subject import SubjectCall, SubjectInfo, SubjectReport, check_subject
from tallybook.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class Bound(Protocol[P]):
    """The part of a BoundTask that a subject needs."""

    name: str
    options: Options

    @property
    def app(self) -> Source: ...
    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobCall: ...


class TaskSubject(Generic[P]):
    """One subject of a task, made by `task.subject(name)`; it can be kept and used many times."""

    __slots__ = ("_bound", "name")

    def __init__(self, bound: Bound[P], name: str) -> None:
        self._bound = bound
        self.name = check_subject(name)
        _check(bound.options)

    def push(self, *args: P.args, **kwargs: P.kwargs) -> Verb[SubjectReport]:
        """Create the subject if none has this name; an existing one is not changed, in any state.

        `report.created` is True if this call created it.

            report = await refresh.subject("asset:42").push(42)
        """
        return self._verb(traced(self._bound.app._tracing, self.job(*args, **kwargs), subjects.push), "push")

    def upsert(self, *args: P.args, **kwargs: P.kwargs) -> Verb[SubjectReport]:
        """Create the subject, or change args, priority and time of the existing one; a running one is not changed.

        Without `run_at` and `delay` an existing one keeps its time. A completed subject starts again with its
        iterations. `report.report` is created, updated, unchanged, active (it runs) or dead (also if it was killed).
        The report has the old and new run_at, None for active and dead.

            report = await refresh.with_(delay="1 hour").subject("asset:42").upsert(42)
        """
        made = traced(self._bound.app._tracing, self.job(*args, **kwargs), subjects.upsert, keeps=True)
        return self._verb(made, "upsert")

    def job(self, *args: P.args, **kwargs: P.kwargs) -> SubjectCall:
        """Describe the subject, checked and encoded, for `app.subjects.push_many` and `upsert_many`."""
        found = self._bound.job(*args, **kwargs)
        return SubjectCall(found.task, self.name, found.args, found.options)

    def get(self) -> Verb[SubjectInfo | None]:
        """Read the subject as it is now; None: there is none."""
        return self._verb(subjects.get(self._bound.name, self.name, self._bound.options.queue), "get")

    def forget(self) -> Verb[str]:
        """Cancel the subject's next run and free its name, so that the next push creates a new subject.

        Returns "forgotten", "active" (it runs and is not changed) or "unknown" (there is none).
        """
        return self._verb(subjects.forget(self._bound.name, self.name, self._bound.options.queue), "forget")

    def move(self, run_at: datetime) -> Verb[str]:
        """Change only the time of a planned subject; return "moved", or its state if it is not planned.

        await refresh.subject("asset:42").move(datetime.now(UTC))  # at once
        """
        return self._verb(subjects.move(self._bound.name, self.name, run_at, self._bound.options.queue), "move")

    def _verb(self, made: Made[T], name: str) -> Verb[T]:
        return Verb(self._bound.app, made, name)

    def __repr__(self) -> str:
        return f"<Subject {self.name!r} of task {self._bound.name}>"


def appending(call: JobCall) -> Call[SubjectReport]:
    _check(call.options)
    if call.options.run_at is not None or call.options.delay is not None:
        hint = "Give it a name and push it: task.with_(...).subject(name).push(...)"
        when = call.options.run_at or call.options.delay
        raise ConfigError("run_at", when, "what is appended runs at once", hint=hint)
    return subjects.append(call.task, call.args, call.options)


def _check(options: Options) -> None:
    for option, none in (("unique", (None, False)), ("order_key", (None,)), ("expires_at", (None,)), ("after", ((),))):
        if (value := getattr(options, option)) not in none:
            hint = "A subject's name is its unique key" if option == "unique" else None
            raise ConfigError(option, value, "a subject has none", hint=hint)
