"""The bases of App and of tasks: what a task needs of its App, and the verbs that make subjects.

The module of subjects is imported at the first use: most programs have no subject.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, ParamSpec

from tallybook._db.declared import Call
from tallybook._db.source import Source
from tallybook._db.verb import Verb, traced
from tallybook._model.backoff import Backoff
from tallybook._model.job import Job, JobCall

if TYPE_CHECKING:
    from tallybook._model.subject import SubjectReport
    from tallybook._task.subject import Bound, TaskSubject

P = ParamSpec("P")


class Owner(Source):
    """The base of App: tasks use its connections, traces, retry policies and verbs."""

    def _policy(self, name: str, *, task: str | None = None) -> Backoff:
        raise NotImplementedError

    def _putting(self, job: JobCall) -> Call[Job]:
        raise NotImplementedError


class HasSubjects(Generic[P]):
    """Mixed into Task and BoundTask."""

    __slots__ = ()

    def _with_options(self) -> Bound[P]:
        raise NotImplementedError

    def subject(self, name: str) -> TaskSubject[P]:
        """Return the subject of this name (1 to 512 bytes), to push, upsert, read or forget it. Sends nothing yet.

        await refresh.subject("asset:42").push(42).on(conn)
        """
        from tallybook._task.subject import TaskSubject

        return TaskSubject(self._with_options(), name)

    def append(self, *args: P.args, **kwargs: P.kwargs) -> Verb[SubjectReport]:
        """Create a subject with a new name, to run at once; the report has the name.

        report = await refresh.append(42).on(conn)
        """
        from tallybook._task.subject import appending

        bound = self._with_options()
        return Verb(bound.app, traced(bound.app._tracing, bound.job(*args, **kwargs), appending), "append")
