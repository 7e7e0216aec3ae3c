"""The verbs over many jobs, by filter or by id, and result, why and trace, as pure values."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.texts import checked, instant, known, loads, moment, record, records, some_of, text_array
from tallybook._model.job_info import Cancelled, DeadLetter, JobDone, JobLine, JobPage, Reason, Retried, TraceEvent
from tallybook._model.options import check_name, checked_links, whole
from tallybook._model.payload import encode
from tallybook.errors import ConfigError, InvalidArgument, UnknownJob

STATES = ("scheduled", "retrying", "waiting", "available", "running", "completed", "cancelled", "dead")
CANCELLABLE = ("scheduled", "retrying", "waiting", "available", "running", "dead")
REASONS = ("failed", "crashed", "expired", "killed")
MOST = 1000  # the maximum of jobs per page, and per call that changes them
LOOKED = 50_000

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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """A filter of jobs; None matches all. Raises ConfigError for invalid values."""

    queue: str | None = None
    task: str | None = None
    states: Sequence[str] | None = None
    links: Mapping[str, object] | None = None
    error: str | None = None
    unserved: bool = False
    since: datetime | None = None
    before: datetime | None = None

    def params(self, after: str | None, max_jobs: int, max_looked: int) -> dict[str, str | None]:
        states = some_of("states", self.states, STATES)
        return {
            "queue": checked("queue", self.queue),
            "task": checked("task", self.task),
            "states": None if states is None else text_array(states),
            "links": None if self.links is None else json.dumps(checked_links(self.links)),
            "error": checked("error", self.error),
            "unserved": "true" if self.unserved else "false",
            "since": moment("since", self.since),
            "before": moment("before", self.before),
            "after": checked("after", after),
            "max_jobs": str(whole("max_jobs", max_jobs, 1, MOST)),
            "max_looked": str(whole("max_looked", max_looked, 1000, 1_000_000)),
        }


def jobs(which: JobFilter, *, after: str | None, max_jobs: int, max_looked: int = LOOKED) -> Call[JobPage]:
    return JOBS.call(_page, **which.params(after, max_jobs, max_looked))


_done = records(JobDone, job_id="job")


def retry_jobs(ids: Iterable[int]) -> Call[list[JobDone]]:
    return _RETRY.call(_done, jobs=_ids(ids))


def cancel_jobs(ids: Iterable[int], reason: str | None) -> Call[list[JobDone]]:
    return _CANCEL.call(_done, jobs=_ids(ids), reason=checked("reason", reason))


def drop_jobs(ids: Iterable[int]) -> Call[list[JobDone]]:
    return _DROP.call(_done, jobs=_ids(ids))


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


why = Simple("why(job_id bigint) -> rows (state text, reason text, explanation text, details jsonb)", records(Reason))
_TRACE = Declared("""
  trace(subject text, unique_key text, links jsonb, job bigint, task text, max_events int, newest_first boolean)
  -> rows (at timestamptz, job_id bigint, queue text, task_name text, attempt int, event text, worker text,
           details jsonb, error jsonb)""")


def trace(
    *,
    subject: str | None = None,
    unique: str | None = None,
    links: Mapping[str, object] | None = None,
    job: int | None = None,
    task: str | None = None,
    max_events: int = 1000,
    newest_first: bool = False,
) -> Call[list[TraceEvent]]:
    if sum(given is not None for given in (subject, unique, links, job)) != 1:
        hint = "Pass a subject, a unique key, links or a job"
        raise InvalidArgument("trace needs exactly one thing to follow", hint=hint)
    whole("max_events", max_events, 1, 10_000)
    if task is not None:
        check_name("task", task, 200)
    return _TRACE.call(
        records(TraceEvent, job_id="job", task_name="task"),
        subject=checked("subject", subject), unique_key=checked("unique", unique), job=job, task=task,
        links=None if links is None else json.dumps(checked_links(links)), max_events=max_events,
        newest_first=bool(newest_first),
    )  # fmt: skip


_CANCEL_MANY = Declared("""
  cancel_many(queue task unique_key order_key text, args jsonb, states text[], reason text, max_jobs int)
  -> row (cancelled int, cancelling int)""")
_FILTER = "queue task reason text text, args jsonb, since before timestamptz, max_jobs int"
_DEAD_LETTERS = Declared(f"""
  dead_letters({_FILTER}, before_id bigint)
  -> rows (job_id bigint, died_at timestamptz, queue_name task_name why text, failures crashes attempt int,
           enqueued_at timestamptz, job_args jsonb, summary text, last_error jsonb)""")
_DEAD_OLDEST = Declared("""
  _dead_oldest(p_queue p_task p_reason p_text text, p_args jsonb, p_since p_before timestamptz, p_max_jobs int)
  -> rows (job_id bigint, died_at timestamptz, queue task reason text, attempt int, error_type text)""")
_RETRY_DEAD = Declared(f"retry_dead({_FILTER}) -> row (retried int, refused int)")
_DROP_DEAD_MANY = Declared(f"drop_dead_many({_FILTER}) -> int")
drop_dead = Simple("drop_dead(job_id bigint) -> boolean", bool)
_RESULT = Declared("result(job_id bigint) -> row (task text, state text, result jsonb, error jsonb)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadFilter:
    """A filter of dead letters; None matches all. Raises ConfigError for invalid values."""

    queue: str | None = None
    task: str | None = None
    reason: str | None = None
    error: str | None = None
    args: Mapping[str, object] | None = None
    since: datetime | None = None
    before: datetime | None = None

    def params(self, max_jobs: int) -> dict[str, str | None]:
        if self.reason is not None and self.reason not in REASONS:
            raise ConfigError("reason", self.reason, f"must be one of {', '.join(REASONS)}")
        return {
            "queue": checked("queue", self.queue),
            "task": checked("task", self.task),
            "reason": self.reason,
            "text": checked("error", self.error),
            "args": _args(self.args),
            "since": moment("since", self.since),
            "before": moment("before", self.before),
            "max_jobs": str(whole("max_jobs", max_jobs, 1, 2**31 - 1)),
        }


def cancel_many(
    *,
    queue: str | None,
    task: str | None,
    unique: str | None,
    order_key: str | None,
    args: Mapping[str, object] | None,
    states: tuple[str, ...] | None,
    reason: str | None,
    max_jobs: int,
) -> Call[Cancelled]:
    if queue is None and task is None and unique is None and order_key is None and args is None:
        raise InvalidArgument("cancel_many needs a filter", hint="Pass a queue, a task, a key or args")
    if states is not None and (unknown := [state for state in states if state not in STATES]):
        raise ConfigError("states", unknown, f"must be some of {', '.join(CANCELLABLE)}")
    return _CANCEL_MANY.call(
        lambda found: record(Cancelled, loads(found)),
        queue=checked("queue", queue), task=checked("task", task), unique_key=checked("unique", unique),
        order_key=checked("order_key", order_key), args=_args(args), states=states, reason=checked("reason", reason),
        max_jobs=whole("max_jobs", max_jobs, 1, 2**31 - 1),
    )  # fmt: skip


_letters = records(
    DeadLetter, job_id="job", queue_name="queue", task_name="task", why="reason", job_args="args", last_error="error"
)


def dead_letters(which: DeadFilter, max_jobs: int, before_id: int | None = None) -> Call[list[DeadLetter]]:
    return _DEAD_LETTERS.call(_letters, **which.params(max_jobs), before_id=before_id)


def dead_count(which: DeadFilter, max_jobs: int) -> Call[int]:
    """Return the number of matching dead letters, at most `max_jobs`."""
    params = which.params(max_jobs) | {"before_id": None}
    return Call("dead_letters", f"select count(*) from {_DEAD_LETTERS.called()}", params, int)  # noqa: S608


def dead_oldest(which: DeadFilter, max_jobs: int) -> Call[list[dict[str, Any]]]:
    """Return the dead letters that `retry_dead` and `drop_dead_many` would change, oldest first."""
    return _DEAD_OLDEST.call(loads, **which.params(max_jobs))


def retry_dead(which: DeadFilter, max_jobs: int) -> Call[Retried]:
    return _RETRY_DEAD.call(lambda found: record(Retried, loads(found)), **which.params(max_jobs))


def drop_dead_many(which: DeadFilter, max_jobs: int) -> Call[int]:
    return _DROP_DEAD_MANY.call(int, **which.params(max_jobs))


def result(job_id: int) -> Call[dict[str, Any]]:
    """Return how a job ended; no state: it has not. Raises UnknownJob if there is none, or it is not committed."""
    return _RESULT.call(known(partial(UnknownJob, job_id), loads), job_id=job_id)


def _args(args: Mapping[str, object] | None) -> str | None:
    if args is not None and not isinstance(args, Mapping):
        raise ConfigError("args", args, "not a mapping", hint="Write args={'user_id': 42}")
    return None if args is None else encode(dict(args), task="the filter")
