"""The verbs of a task that make subjects. Their module is imported at the first use: most programs have no subject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, ParamSpec

from tallybook._db.verb import Verb, traced

if TYPE_CHECKING:
    from tallybook._model.subject import SubjectReport
    from tallybook._task.subject import Bound, TaskSubject

P = ParamSpec("P")


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
