"""What an App can tell of its jobs: why one does not run, and what has happened for a thing of yours."""

from __future__ import annotations

from collections.abc import Mapping

from tallybook._db import why
from tallybook._model.job import Job
from tallybook._model.why import Reason, TraceEvent
from tallybook._operations import job_id
from tallybook._run import run, run_sync

__all__ = ["Why"]


class Why:
    """Mixed into App."""

    async def why(self, conn: object, job: int | Job) -> list[Reason]:
        """Tell why a job does not run, or what has become of it: one or more reasons, in the order in which to solve them.

        A job that there is not, or not any more, has the reason "unknown"; one that nothing holds "should_start".

            for reason in await app.why(conn, job): print(reason.explanation)
        """
        return await run(conn, why.why(job_id(job)))

    def why_sync(self, conn: object, job: int | Job) -> list[Reason]:
        """Tell why a job does not run; why without an event loop."""
        return run_sync(conn, why.why(job_id(job)))

    async def trace(
        self,
        conn: object,
        *,
        subject: str | None = None,
        unique: str | None = None,
        links: Mapping[str, object] | None = None,
        job: int | Job | None = None,
        task: str | None = None,
        max_events: int = 1000,
        newest_first: bool = False,
    ) -> list[TraceEvent]:
        """List all that happened for a subject, a unique key, links or one job, across queues, in order of time.

        Of `subject`, `unique`, `links` and `job` give one; `task` keeps to jobs of one task. `max_events`: the newest so many.
        What has left the history is not in it.

            for event in await app.trace(conn, links={"submission": 42}): print(event.at, event.event)
        """
        call = why.trace(
            subject=subject, unique=unique, links=links, job=None if job is None else job_id(job), task=task,
            max_events=max_events, newest_first=newest_first,
        )  # fmt: skip
        return await run(conn, call)

    def trace_sync(
        self,
        conn: object,
        *,
        subject: str | None = None,
        unique: str | None = None,
        links: Mapping[str, object] | None = None,
        job: int | Job | None = None,
        task: str | None = None,
        max_events: int = 1000,
        newest_first: bool = False,
    ) -> list[TraceEvent]:
        """List all that happened for a thing; trace without an event loop."""
        call = why.trace(
            subject=subject, unique=unique, links=links, job=None if job is None else job_id(job), task=task,
            max_events=max_events, newest_first=newest_first,
        )  # fmt: skip
        return run_sync(conn, call)
