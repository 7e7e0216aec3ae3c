"""Lists of jobs, bulk actions on jobs by id, and the verbs why and trace, as pure values."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.texts import checked, instant, loads, moment, record, records, some_of, text_array
from tallybook._model.job_info import JobDone, JobLine, JobPage, Reason, TraceEvent
from tallybook._model.options import check_name, checked_links, whole
from tallybook.errors import ConfigError, InvalidArgument

STATES = ("scheduled", "retrying", "waiting", "available", "running", "completed", "cancelled", "dead")
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
