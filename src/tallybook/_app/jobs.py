"""app.jobs, app.dead and app.result: the verbs for jobs and dead letters, and the wait for a job's end."""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypedDict, Unpack

from tallybook._db.calls import STATE
from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.texts import checked, instant, known, loads, moment, record, records, some_of
from tallybook._db.verb import ListOf, Noun, Pause, Steps, Verb, on_job, on_jobs
from tallybook._model.job import Job, job_id
from tallybook._model.job_info import Cancelled, DeadLetter, JobDone, JobLine, JobPage, Reason, Retried, TraceEvent
from tallybook._model.options import check_name, checked_links, whole
from tallybook._model.payload import encode
from tallybook._task import Task
from tallybook.errors import (
    ConfigError,
    InvalidArgument,
    JobCancelled,
    JobDied,
    ResultMissing,
    ResultTimeout,
    UnknownJob,
)

STATES = ("scheduled", "retrying", "waiting", "available", "running", "completed", "cancelled", "dead")
CANCELLABLE = ("scheduled", "retrying", "waiting", "available", "running", "dead")
REASONS = ("failed", "crashed", "expired", "killed")
MOST = 1000  # the maximum of jobs per page, and per call that changes them
_MANY = 2**31 - 1
_FIRST_LOOK, _SLOWEST_LOOK = 0.01, 0.5

JOBS = Declared("""
  jobs(queue task text, states text[], links jsonb, error text, unserved boolean, since before timestamptz, after text,
       max_jobs max_looked int)
  -> rows (id bigint, queue_name task_name state text, priority attempts failures max_attempts int,
           enqueued_at run_at started_at ended_at timestamptz, worker summary reason last_error subject unique_key text,
           progress real, cursor text, looked_to timestamptz)""")
_DONE = "rows (job_id bigint, done text, detail text)"
_RETRY = Declared(f"retry_jobs(jobs bigint[]) -> {_DONE}")
_DROP = Declared(f"drop_jobs(jobs bigint[]) -> {_DONE}")
_CANCEL = Declared(f"cancel_jobs(jobs bigint[], reason text) -> {_DONE}")
_CANCEL_MANY = Declared("""
  cancel_many(queue task unique_key order_key text, args jsonb, states text[], reason text, max_jobs int)
  -> row (cancelled int, cancelling int)""")
_WHY = Simple("why(job_id bigint) -> rows (state text, reason text, explanation text, details jsonb)", records(Reason))
_TRACE = Declared("""
  trace(subject text, unique_key text, links jsonb, job bigint, task text, max_events int, newest_first boolean)
  -> rows (at timestamptz, job_id bigint, queue text, task_name text, attempt int, event text, worker text,
           details jsonb, error jsonb)""")
_RESULT = Declared("result(job_id bigint) -> row (task text, state text, result jsonb, error jsonb)")
_FILTER = "queue task reason text text, args jsonb, since before timestamptz, max_jobs int"
DEAD_LETTERS = Declared(f"""
  dead_letters({_FILTER}, before_id bigint, max_looked int)
  -> rows (job_id bigint, died_at timestamptz, queue_name task_name why text, failures crashes attempt int,
           enqueued_at timestamptz, job_args jsonb, summary text, last_error jsonb)""", max_looked="null")  # fmt: skip
_DEAD_OLDEST = Declared("""
  _dead_oldest(p_queue p_task p_reason p_text text, p_args jsonb, p_since p_before timestamptz, p_max_jobs int)
  -> rows (job_id bigint, died_at timestamptz, queue task reason text, attempt int, error_type text)""")
_RETRY_DEAD = Declared(f"retry_dead({_FILTER}) -> row (retried int, refused int)")
_DROP_DEAD = Simple("drop_dead(job_id bigint) -> boolean", bool)
_DROP_DEAD_MANY = Declared(f"drop_dead_many({_FILTER}) -> int")
_done = records(JobDone, job_id="job")
_letters = records(
    DeadLetter, job_id="job", queue_name="queue", task_name="task", why="reason", job_args="args", last_error="error"
)


def _page(found: str) -> JobPage:
    rows: list[dict[str, Any]] = loads(found)
    more = rows.pop() if rows and rows[-1]["id"] is None else None
    lines = [record(JobLine, row, queue_name="queue", task_name="task") for row in rows]
    return JobPage(lines, None, None) if more is None else JobPage(lines, more["cursor"], instant(more["looked_to"]))


def _ids(ids: Iterable[int]) -> str:
    listed = list(ids)
    for one in listed:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 < one < 2**63:
            raise ConfigError("jobs", one, "is not the id of a job")
    if len(listed) > MOST:
        raise ConfigError("jobs", len(listed), f"at most {MOST} ids are allowed", hint="Pass more ids in several calls")
    return "{" + ",".join(map(str, listed)) + "}"


def _links(links: Mapping[str, object] | None) -> str | None:
    return None if links is None else json.dumps(checked_links(links))


def _args(option: str, args: Mapping[str, object] | None) -> str | None:
    if args is not None and not isinstance(args, Mapping):
        raise ConfigError(option, args, "not a mapping", hint="Write args={'user_id': 42}")
    return None if args is None else encode(dict(args), task="the filter")


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
        max_looked: int = 50_000,
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
        call = JOBS.call(
            _page, queue=checked("queue", queue), task=checked("task", task), states=some_of("states", states, STATES),
            links=_links(links), error=checked("error", error), unserved=bool(unserved), since=moment("since", since),
            before=moment("before", before), after=checked("after", after),
            max_jobs=whole("max_jobs", max_jobs, 1, MOST), max_looked=whole("max_looked", max_looked, 1000, 1_000_000),
        )  # fmt: skip
        return self._verb(call)

    def state(self, job: int | Job) -> Verb[str]:
        """Return only the state of one job, which a producer's role may read. Raises UnknownJob.

        await app.jobs.state(job)
        """
        number = job_id(job)
        return on_job(self._app, number, STATE.call(known(partial(UnknownJob, number), str), job_id=number))

    def why(self, job: int | Job) -> Verb[ListOf[Reason]]:
        """Explain why a job does not run, or how it ended: one or more reasons, in the order in which to solve them.

        An unknown or pruned job has the reason "unknown"; a job that nothing holds has "should_start".

            for reason in await app.jobs.why(job): print(reason.explanation)
        """
        call = _WHY(job_id(job))
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
        if sum(given is not None for given in (subject, unique, links, job)) != 1:
            hint = "Pass a subject, a unique key, links or a job"
            raise InvalidArgument("trace needs exactly one thing to follow", hint=hint)
        if task is not None:
            check_name("task", task, 200)
        number = None if job is None else job_id(job)
        call = _TRACE.call(
            records(TraceEvent, job_id="job", task_name="task"), subject=checked("subject", subject),
            unique_key=checked("unique", unique), links=_links(links), job=number, task=task,
            max_events=whole("max_events", max_events, 1, 10_000), newest_first=bool(newest_first),
        )  # fmt: skip
        return self._verb(call) if number is None else on_job(self._app, number, call, no_job=operator.not_)

    def retry(self, ids: Iterable[int | Job]) -> Verb[ListOf[JobDone]]:
        """Retry up to 1000 dead or cancelled jobs at once; return one result per job, lowest id first.

        A job in another state is refused, and does not affect the others.

            done = await app.jobs.retry([job.id for job in page.jobs])
        """
        return on_jobs(self._app, map(job_id, ids), lambda some: _RETRY.call(_done, jobs=_ids(some)))

    def cancel(self, ids: Iterable[int | Job], reason: str | None = None) -> Verb[ListOf[JobDone]]:
        """Cancel up to 1000 jobs; return one result per job, lowest id first.

        A job that has already ended is refused, and does not affect the others.

            done = await app.jobs.cancel([4711, 4712], "the order was withdrawn")
        """
        why = checked("reason", reason)
        return on_jobs(self._app, map(job_id, ids), lambda some: _CANCEL.call(_done, jobs=_ids(some), reason=why))

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
        if queue is None and task is None and unique is None and order_key is None and args is None:
            raise InvalidArgument("cancel_matching needs a filter", hint="Pass a queue, a task, a key or args")
        call = _CANCEL_MANY.call(
            lambda found: record(Cancelled, loads(found)), queue=checked("queue", queue), task=checked("task", task),
            unique_key=checked("unique", unique), order_key=checked("order_key", order_key), args=_args("args", args),
            states=some_of("states", states, CANCELLABLE), reason=checked("reason", reason),
            max_jobs=whole("max_jobs", max_jobs, 1, _MANY),
        )  # fmt: skip
        return self._verb(call)

    def drop(self, ids: Iterable[int | Job]) -> Verb[ListOf[JobDone]]:
        """Delete up to 1000 dead letters; return one result per job, lowest id first.

        done = await app.jobs.drop([4711, 4712])
        """
        return on_jobs(self._app, map(job_id, ids), lambda some: _DROP.call(_done, jobs=_ids(some)))


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


_CHECKS: dict[str, Callable[[str, Any], str | None]] = {"args": _args, "since": moment, "before": moment}


def _params(which: DeadWhich, max_jobs: int) -> dict[str, Any]:
    """Return a filter as parameters. Raises TypeError for an unknown filter, ConfigError for an invalid value."""
    names = DeadWhich.__annotations__
    if unknown := sorted(which.keys() - names):
        raise TypeError(f"there is no filter {unknown[0]!r}: write {', '.join(names)}")
    given: dict[str, Any] = {**dict.fromkeys(names), **which}
    if given["reason"] not in (None, *REASONS):
        raise ConfigError("reason", given["reason"], f"must be one of {', '.join(REASONS)}")
    params = {name: _CHECKS.get(name, checked)(name, value) for name, value in given.items()}
    return {"text": params.pop("error"), "max_jobs": whole("max_jobs", max_jobs, 1, _MANY), **params}


def dead_count(which: DeadWhich, max_jobs: int) -> Call[int]:
    """Return the number of matching dead letters, at most `max_jobs`."""
    call = DEAD_LETTERS.call(int, **_params(which, max_jobs), before_id=None)
    return replace(call, sql=f"select count(*) from {DEAD_LETTERS.called()}")  # noqa: S608


def dead_oldest(which: DeadWhich, max_jobs: int) -> Call[list[dict[str, Any]]]:
    """Return the dead letters that `retry` and `drop_matching` would change, oldest first."""
    return _DEAD_OLDEST.call(loads, **_params(which, max_jobs))


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
        before = None if before_id is None else job_id(before_id)
        return self._verb(DEAD_LETTERS.call(_letters, **_params(which, max_jobs), before_id=before))

    def retry(self, *, max_jobs: int = 10_000, **which: Unpack[DeadWhich]) -> Verb[Retried]:
        """Retry the dead letters that match, at most `max_jobs`, the oldest ones; filters as in `list`.

        await app.dead.retry(task="charge", since=outage_began)
        """
        return self._verb(_RETRY_DEAD.call(lambda found: record(Retried, loads(found)), **_params(which, max_jobs)))

    def drop(self, job: int | Job) -> Verb[bool]:
        """Delete one dead letter; False: there is none. The job's history remains."""
        return on_job(self._app, job_id(job), _DROP_DEAD(job_id(job)), no_job=operator.not_)

    def drop_matching(self, *, max_jobs: int = 10_000, **which: Unpack[DeadWhich]) -> Verb[int]:
        """Delete the dead letters that match, oldest first, at most `max_jobs`; return their number."""
        return self._verb(_DROP_DEAD_MANY.call(int, **_params(which, max_jobs)))


def wait(job_id: int, patience: float, names: Mapping[str, Task[..., Any]]) -> Steps[Any]:
    """Poll until the job has ended; return its result."""
    until, pause = time.monotonic() + patience, _FIRST_LOOK
    look = _RESULT.call(known(partial(UnknownJob, job_id), loads), job_id=job_id)
    while (ended := (yield look))["state"] is None:
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
    task = names.get(ended["task"])
    return ended["result"] if task is None else task.read_result(ended["result"])
