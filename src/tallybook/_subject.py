"""Subjects of a task: jobs with a name that live on. See docs/subjects.md.

    asset = refresh.subject("asset:42")
    await asset.push(conn, 42)               make it, unless it is there
    await asset.upsert(conn, 42)             make it or change it; never while its handler runs
    await refresh.append(conn, 42)           with a name that nobody has
    await app.upsert_many(conn, [refresh.subject(f"asset:{n}").job(n) for n in ids])

Options are given by `with_`, as for any job: `refresh.with_(delay="5 min").subject("asset:42").push(conn, 42)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Generic, ParamSpec

from tallybook._db import subjects
from tallybook._db.calls import Call
from tallybook._model.job import JobCall
from tallybook._model.options import Options
from tallybook._model.subject import SubjectCall, SubjectInfo, SubjectPage, SubjectReport, check_subject
from tallybook._model.tracing import Tracing
from tallybook._run import run, run_sync, send, send_sync
from tallybook.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from tallybook._task import BoundTask

__all__ = ["HasSubjects", "SubjectVerbs", "TaskSubject"]

P = ParamSpec("P")


class HasSubjects(Generic[P]):
    """Mixed into Task and BoundTask."""

    __slots__ = ()

    def _with_options(self) -> BoundTask[P]:
        raise NotImplementedError

    def subject(self, name: str) -> TaskSubject[P]:
        """The subject of this name, to push, upsert, read or forget it; nothing is sent yet. 1 to 512 bytes.

        await refresh.subject("asset:42").push(conn, 42)
        """
        return TaskSubject(self._with_options(), check_subject(name))

    async def append(self, conn: object, /, *args: P.args, **kwargs: P.kwargs) -> SubjectReport:
        """Make a subject with a name that nobody has, to run at once; the report says the name. `conn` as in Task.enqueue.

        report = await refresh.append(conn, 42)
        """
        bound = self._with_options()
        return await send(bound.tracing, conn, bound.job(*args, **kwargs), _appending)

    def append_sync(self, conn: object, /, *args: P.args, **kwargs: P.kwargs) -> SubjectReport:
        """Make a subject with a name that nobody has; append without an event loop."""
        bound = self._with_options()
        return send_sync(bound.tracing, conn, bound.job(*args, **kwargs), _appending)


class TaskSubject(Generic[P]):
    """One subject of a task, made by `task.subject(name)`; it can be kept and used many times."""

    __slots__ = ("_bound", "name")

    def __init__(self, bound: BoundTask[P], name: str) -> None:
        self._bound = bound
        self.name = name
        _check(bound.options)

    async def push(self, conn: object, /, *args: P.args, **kwargs: P.kwargs) -> SubjectReport:
        """Make the subject, unless there is one of this name, in whatever state: that one is left alone.

        In `conn`'s transaction, as in Task.enqueue. `report.created` says whether this call made it.

            report = await refresh.subject("asset:42").push(conn, 42)
        """
        return await send(self._bound.tracing, conn, self.job(*args, **kwargs), subjects.push)

    def push_sync(self, conn: object, /, *args: P.args, **kwargs: P.kwargs) -> SubjectReport:
        """Make the subject, unless there is one; push without an event loop."""
        return send_sync(self._bound.tracing, conn, self.job(*args, **kwargs), subjects.push)

    async def upsert(self, conn: object, /, *args: P.args, **kwargs: P.kwargs) -> SubjectReport:
        """Make the subject, or give the one that is there these args and this time; one that runs is not touched.

        `report.report` is created, updated, unchanged, active (it runs) or dead; with the run_at before and after.

            report = await refresh.with_(delay="1 hour").subject("asset:42").upsert(conn, 42)
        """
        return await send(self._bound.tracing, conn, self.job(*args, **kwargs), subjects.upsert, keeps=True)

    def upsert_sync(self, conn: object, /, *args: P.args, **kwargs: P.kwargs) -> SubjectReport:
        """Make or change the subject; upsert without an event loop."""
        return send_sync(self._bound.tracing, conn, self.job(*args, **kwargs), subjects.upsert, keeps=True)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> SubjectCall:
        """Describe the subject, checked and encoded, for `app.push_many` and `app.upsert_many`."""
        found = self._bound.job(*args, **kwargs)
        return SubjectCall(found.task, self.name, found.args, found.options)

    async def get(self, conn: object) -> SubjectInfo | None:
        """Read the subject as it is now; None: there is none."""
        return await run(conn, subjects.get(self._bound.name, self.name))

    def get_sync(self, conn: object) -> SubjectInfo | None:
        """Read the subject as it is now; get without an event loop."""
        return run_sync(conn, subjects.get(self._bound.name, self.name))

    async def forget(self, conn: object) -> str:
        """Let the name be free, so that the next push makes a new subject; what waits for its time will not run.

        "forgotten"; "active": it runs and is left alone; "unknown": there is none.
        """
        return await run(conn, subjects.forget(self._bound.name, self.name))

    def forget_sync(self, conn: object) -> str:
        """Let the name be free; forget without an event loop."""
        return run_sync(conn, subjects.forget(self._bound.name, self.name))

    async def move(self, conn: object, run_at: datetime) -> str:
        """Let a planned subject run at another time, with all else as it is: "moved", or the state that it has instead.

        await refresh.subject("asset:42").move(conn, datetime.now(UTC))  # at once
        """
        return await run(conn, subjects.move(self._bound.name, self.name, run_at))

    def move_sync(self, conn: object, run_at: datetime) -> str:
        """Let a planned subject run at another time; move without an event loop."""
        return run_sync(conn, subjects.move(self._bound.name, self.name, run_at))

    def __repr__(self) -> str:
        return f"<Subject {self.name!r} of task {self._bound.name}>"


class SubjectVerbs:
    """Mixed into App."""

    tracing: Tracing | None

    async def push_many(self, conn: object, calls: Iterable[SubjectCall]) -> list[SubjectReport]:
        """Make those of these subjects that there are not, by one statement in `conn`'s transaction; one report each.

        In their order; `report` is created or unchanged, or says how the one that is there is.

            await app.push_many(conn, [refresh.subject(f"asset:{n}").job(n) for n in ids])
        """
        listed = _listed(calls)
        return await send(self.tracing, conn, listed, subjects.push_many) if listed else []

    def push_many_sync(self, conn: object, calls: Iterable[SubjectCall]) -> list[SubjectReport]:
        """Make those subjects that there are not; push_many without an event loop."""
        listed = _listed(calls)
        return send_sync(self.tracing, conn, listed, subjects.push_many) if listed else []

    async def upsert_many(self, conn: object, calls: Iterable[SubjectCall]) -> list[SubjectReport]:
        """Make or change these subjects, by one statement in `conn`'s transaction; one report each, in their order.

        What runs is not touched. A thousand at a time is a good size. `report` as in TaskSubject.upsert.

            reports = await app.upsert_many(conn, [refresh.subject(f"asset:{n}").job(n) for n in ids])
        """
        listed = _listed(calls)
        return await send(self.tracing, conn, listed, subjects.upsert_many, keeps=True) if listed else []

    def upsert_many_sync(self, conn: object, calls: Iterable[SubjectCall]) -> list[SubjectReport]:
        """Make or change these subjects; upsert_many without an event loop."""
        listed = _listed(calls)
        return send_sync(self.tracing, conn, listed, subjects.upsert_many, keeps=True) if listed else []

    async def subjects(
        self,
        conn: object,
        *,
        task: str | None = None,
        queue: str | None = None,
        states: Sequence[str] | None = None,
        prefix: str | None = None,
        after: str | None = None,
        max_subjects: int = 50,
    ) -> SubjectPage:
        """List the subjects that match all that is given, by task and name, at most `max_subjects` (1 to 1000).

        `states` are some of planned, pending, active, completed, killed, dead. Where only the last three are asked for, they
        are those that have stopped: the last one to stop first, and why by `state` and `last_error`. `after`: the `next` of a page.

            stopped = await app.subjects(conn, task="refresh", states=["killed", "dead"])
        """
        call = subjects.listed(
            task=task, queue=queue, states=states, prefix=prefix, after=after, max_subjects=max_subjects
        )
        return await run(conn, call)

    def subjects_sync(
        self,
        conn: object,
        *,
        task: str | None = None,
        queue: str | None = None,
        states: Sequence[str] | None = None,
        prefix: str | None = None,
        after: str | None = None,
        max_subjects: int = 50,
    ) -> SubjectPage:
        """List the subjects that match; subjects without an event loop."""
        call = subjects.listed(
            task=task, queue=queue, states=states, prefix=prefix, after=after, max_subjects=max_subjects
        )
        return run_sync(conn, call)


def _appending(call: JobCall) -> Call[SubjectReport]:
    _check(call.options)
    if call.options.run_at is not None or call.options.delay is not None:
        hint = "Give it a name and push it: task.with_(...).subject(name).push(...)"
        raise ConfigError(
            "run_at", call.options.run_at or call.options.delay, "what is appended runs at once", hint=hint
        )
    return subjects.append(call.task, call.args, call.options)


def _check(options: Options) -> None:
    for option, none in (("unique", (None, False)), ("order_key", (None,)), ("expires_at", (None,)), ("after", ((),))):
        if (value := getattr(options, option)) not in none:
            hint = "A subject's name is its unique key" if option == "unique" else None
            raise ConfigError(option, value, "a subject has none", hint=hint)


def _listed(calls: Iterable[SubjectCall]) -> list[SubjectCall]:
    listed = list(calls)
    for at, call in enumerate(listed):
        if type(call) is not SubjectCall:
            hint = "Describe it by task.subject(name).job(...)"
            raise InvalidArgument(f"subject {at} is of type {type(call).__name__}", hint=hint)
    return listed
