"""app.jobs, app.dead and app.result: the verbs for jobs and dead letters, and the wait for a job's end."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypedDict, Unpack

from tallybook._db import calls
from tallybook._db import jobs as many
from tallybook._db.jobs import LOOKED, DeadFilter, JobFilter
from tallybook._db.verb import ListOf, Noun, Pause, Steps, Verb, on_job, on_jobs
from tallybook._model.job import Job, job_id
from tallybook._model.job_info import Cancelled, DeadLetter, JobDone, JobPage, Reason, Retried, TraceEvent
from tallybook._task import Task
from tallybook.errors import JobCancelled, JobDied, ResultMissing, ResultTimeout

_FIRST_LOOK, _SLOWEST_LOOK = 0.01, 0.5


class Jobs(Noun):
    """The jobs of the app's database."""

    def list(
        self,
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
    ) -> Verb[JobPage]:
        """List the jobs that match all filters, newest first, at most `max_jobs` (1 to 1000).

        `states` are some of scheduled, retrying, waiting, available, running, completed, cancelled, dead. `error` is a
        part of the last error's type or message, ignoring case. `since` and `before` bound the time of the enqueue.
        Pass a page's `next` as `after` to get the next page. A page reads at most `max_looked` rows (1000 to a
        million), so it is quick for any history; `looked_to` is the end of the range that it has read. If a filter
        makes another order cheaper, the order is that in which jobs entered their line, or in which they ended.

            page = await app.jobs.list(task="charge", states=["dead"], error="timeout")
            for job in page.jobs: ...
            page = await app.jobs.list(task="charge", states=["dead"], error="timeout", after=page.next)
        """
        which = JobFilter(
            queue=queue, task=task, states=states, links=links, error=error, unserved=unserved, since=since,
            before=before,
        )  # fmt: skip
        return self._verb(many.jobs(which, after=after, max_jobs=max_jobs, max_looked=max_looked))

    def state(self, job: int | Job) -> Verb[str]:
        """Return only the state of one job, which a producer's role may read. Raises UnknownJob.

        await app.jobs.state(job)
        """
        return on_job(self._app, job_id(job), calls.state(job_id(job)))

    def why(self, job: int | Job) -> Verb[ListOf[Reason]]:
        """Explain why a job does not run, or how it ended: one or more reasons, in the order in which to solve them.

        An unknown or pruned job has the reason "unknown"; a job that nothing holds has "should_start".

            for reason in await app.jobs.why(job): print(reason.explanation)
        """
        call = many.why(job_id(job))
        return on_job(self._app, job_id(job), call, no_job=lambda found: any(one.reason == "unknown" for one in found))

    def trace(
        self,
        *,
        subject: str | None = None,
        unique: str | None = None,
        links: Mapping[str, object] | None = None,
        job: int | Job | None = None,
        task: str | None = None,
        max_events: int = 1000,
        newest_first: bool = False,
    ) -> Verb[ListOf[TraceEvent]]:
        """List all events of a subject, a unique key, links or one job, across queues, in order of time.

        Pass one of `subject`, `unique`, `links` and `job`; `task` limits it to one task, `max_events` to the newest
        events. Pruned history is not included.

            for event in await app.jobs.trace(links={"submission": 42}): print(event.at, event.event)
        """
        call = many.trace(
            subject=subject, unique=unique, links=links, job=None if job is None else job_id(job), task=task,
            max_events=max_events, newest_first=newest_first,
        )  # fmt: skip
        return self._verb(call) if job is None else on_job(self._app, job_id(job), call, no_job=operator.not_)

    def retry(self, ids: Iterable[int | Job]) -> Verb[ListOf[JobDone]]:
        """Retry up to 1000 dead or cancelled jobs at once; return one result per job, lowest id first.

        A job in another state is refused, and does not affect the others.

            done = await app.jobs.retry([job.id for job in page.jobs])
        """
        return on_jobs(self._app, map(job_id, ids), many.retry_jobs)

    def cancel(self, ids: Iterable[int | Job], reason: str | None = None) -> Verb[ListOf[JobDone]]:
        """Cancel up to 1000 jobs; return one result per job, lowest id first.

        A job that has already ended is refused, and does not affect the others.

            done = await app.jobs.cancel([4711, 4712], "the order was withdrawn")
        """
        return on_jobs(self._app, map(job_id, ids), partial(many.cancel_jobs, reason=reason))

    def cancel_matching(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        unique: str | None = None,
        order_key: str | None = None,
        args: Mapping[str, object] | None = None,
        states: Sequence[str] | None = None,
        reason: str | None = None,
        max_jobs: int = 10_000,
    ) -> Verb[Cancelled]:
        """Cancel every open job that matches all filters, at most `max_jobs`; at least one filter is required.

        `args` matches jobs whose args contain these; `states` are some of scheduled, retrying, waiting, available,
        running, and dead: a dead letter is cancelled only where you pass its state.

            await app.jobs.cancel_matching(task="sync_orders", args={"customer": 42}, reason="customer left")
        """
        call = many.cancel_many(
            queue=queue, task=task, unique=unique, order_key=order_key, args=args,
            states=None if states is None else tuple(states), reason=reason, max_jobs=max_jobs,
        )  # fmt: skip
        return self._verb(call)

    def drop(self, ids: Iterable[int | Job]) -> Verb[ListOf[JobDone]]:
        """Delete up to 1000 dead letters; return one result per job, lowest id first.

        done = await app.jobs.drop([4711, 4712])
        """
        return on_jobs(self._app, map(job_id, ids), many.drop_jobs)


class DeadWhich(TypedDict, total=False):
    """Filters of dead letters; an omitted filter matches all."""

    queue: str | None
    task: str | None
    reason: str | None
    """failed, crashed, expired or killed."""
    error: str | None
    """A part of the last error's type or message, ignoring case."""
    args: Mapping[str, object] | None
    """Values that their args contain."""
    since: datetime | None
    """The earliest time of their death."""
    before: datetime | None
    """They died before this time."""


class Dead(Noun):
    """The dead letters: jobs that failed for good, crashed too often, expired or were killed."""

    def list(
        self, *, max_jobs: int = 50, before_id: int | Job | None = None, **which: Unpack[DeadWhich]
    ) -> Verb[ListOf[DeadLetter]]:
        """List the dead letters that match, newest first, at most `max_jobs`.

        Filters: `queue`, `task`, `reason` (failed, crashed, expired or killed), `error` (a part of the last error's
        type or message, ignoring case), `args`, and the time of death, `since` and `before`. Pass the last one's
        `died_at` and `job` as `before` and `before_id` to get the next page: many can die at the same time.

            for letter in await app.dead.list(task="charge", error="timeout"): ...
        """
        after = None if before_id is None else job_id(before_id)
        return self._verb(many.dead_letters(DeadFilter(**which), max_jobs, after))

    def retry(self, *, max_jobs: int = 10_000, **which: Unpack[DeadWhich]) -> Verb[Retried]:
        """Retry the dead letters that match, at most `max_jobs`, the oldest ones; filters as in `list`.

        await app.dead.retry(task="charge", since=outage_began)
        """
        return self._verb(many.retry_dead(DeadFilter(**which), max_jobs))

    def drop(self, job: int | Job) -> Verb[bool]:
        """Delete one dead letter; False: there is none. The job's history remains."""
        return on_job(self._app, job_id(job), many.drop_dead(job_id(job)), no_job=operator.not_)

    def drop_matching(self, *, max_jobs: int = 10_000, **which: Unpack[DeadWhich]) -> Verb[int]:
        """Delete the dead letters that match, oldest first, at most `max_jobs`; return their number."""
        return self._verb(many.drop_dead_many(DeadFilter(**which), max_jobs))


def wait(job_id: int, patience: float, names: Mapping[str, Task[..., Any]]) -> Steps[Any]:
    """Poll until the job has ended; return its result."""
    until, pause = time.monotonic() + patience, _FIRST_LOOK
    while (ended := (yield many.result(job_id)))["state"] is None:
        left = until - time.monotonic()
        if left <= 0:
            raise ResultTimeout(job_id, patience)
        yield Pause(min(pause, left))
        pause = min(pause * 1.5, _SLOWEST_LOOK)
    error = ended["error"] or {}
    if ended["state"] == "dead":
        raise JobDied(job_id, error.get("type"), error.get("message"))
    if ended["state"] == "cancelled":
        raise JobCancelled(job_id, error.get("message"))
    if error:
        raise ResultMissing(job_id, str(error.get("message")))
    known = names.get(ended["task"])
    return ended["result"] if known is None else known.read_result(ended["result"])
