"""The verbs of an App that list jobs by filter, and those that do something to many of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from tallybook._db import jobs as calls
from tallybook._db.jobs import LOOKED, JobFilter
from tallybook._model.job import Job
from tallybook._model.lists import JobDone, JobPage
from tallybook._operations import job_id
from tallybook._run import run, run_sync

__all__ = ["Jobs"]


class Jobs:
    """Mixed into App."""

    async def jobs(
        self,
        conn: object,
        *,
        queue: str | None = None,
        task: str | None = None,
        states: Sequence[str] | None = None,
        links: Mapping[str, object] | None = None,
        error: str | None = None,
        unserved: bool = False,
        since: datetime | None = None,
        before: datetime | None = None,
        after: str | None = None,
        max_jobs: int = 50,
        max_looked: int = LOOKED,
    ) -> JobPage:
        """List the jobs that match all that is given, newest first, at most `max_jobs` (1 to 1000) of them.

        `states` are some of scheduled, retrying, waiting, available, running, completed, cancelled, dead; `error` is contained
        in the last error's type or message, whatever the case; `since` and `before` bound when they were enqueued.
        A page is quick however much history there is: where few jobs match, it ends after `max_looked` rows (1000 to a
        million) with what it has found, and says by `looked_to` how far it has come. `after`: the `next` of a page.

            page = await app.jobs(conn, task="charge", states=["dead"], error="timeout")
            for job in page.jobs: ...
            page = await app.jobs(conn, task="charge", states=["dead"], error="timeout", after=page.next)
        """
        which = JobFilter(
            queue=queue,
            task=task,
            states=states,
            links=links,
            error=error,
            unserved=unserved,
            since=since,
            before=before,
        )
        return await run(conn, calls.jobs(which, after=after, max_jobs=max_jobs, max_looked=max_looked))

    def jobs_sync(
        self,
        conn: object,
        *,
        queue: str | None = None,
        task: str | None = None,
        states: Sequence[str] | None = None,
        links: Mapping[str, object] | None = None,
        error: str | None = None,
        unserved: bool = False,
        since: datetime | None = None,
        before: datetime | None = None,
        after: str | None = None,
        max_jobs: int = 50,
        max_looked: int = LOOKED,
    ) -> JobPage:
        """List the jobs that match; jobs without an event loop."""
        which = JobFilter(
            queue=queue,
            task=task,
            states=states,
            links=links,
            error=error,
            unserved=unserved,
            since=since,
            before=before,
        )
        return run_sync(conn, calls.jobs(which, after=after, max_jobs=max_jobs, max_looked=max_looked))

    async def retry_jobs(self, conn: object, ids: Iterable[int | Job]) -> list[JobDone]:
        """Give each of these jobs, up to 1000, another attempt at once; what became of each, the lowest id first.

        One that is not dead or cancelled any more is refused and keeps no other from it.

            done = await app.retry_jobs(conn, [job.id for job in page.jobs])
        """
        return await run(conn, calls.retry_jobs(map(job_id, ids)))

    def retry_jobs_sync(self, conn: object, ids: Iterable[int | Job]) -> list[JobDone]:
        """Give each of these jobs another attempt; retry_jobs without an event loop."""
        return run_sync(conn, calls.retry_jobs(map(job_id, ids)))

    async def cancel_jobs(self, conn: object, ids: Iterable[int | Job], reason: str | None = None) -> list[JobDone]:
        """Say of each of these jobs, up to 1000, that it shall not run; what became of each, the lowest id first.

        One that has ended meanwhile is refused and keeps no other from it.

            done = await app.cancel_jobs(conn, [4711, 4712], "the order was withdrawn")
        """
        return await run(conn, calls.cancel_jobs(map(job_id, ids), reason))

    def cancel_jobs_sync(self, conn: object, ids: Iterable[int | Job], reason: str | None = None) -> list[JobDone]:
        """Say of each of these jobs that it shall not run; cancel_jobs without an event loop."""
        return run_sync(conn, calls.cancel_jobs(map(job_id, ids), reason))

    async def drop_jobs(self, conn: object, ids: Iterable[int | Job]) -> list[JobDone]:
        """Throw these dead letters, up to 1000, away; what became of each, the lowest id first.

        done = await app.drop_jobs(conn, [4711, 4712])
        """
        return await run(conn, calls.drop_jobs(map(job_id, ids)))

    def drop_jobs_sync(self, conn: object, ids: Iterable[int | Job]) -> list[JobDone]:
        """Throw these dead letters away; drop_jobs without an event loop."""
        return run_sync(conn, calls.drop_jobs(map(job_id, ids)))
