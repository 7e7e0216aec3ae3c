"""The verbs over single jobs, as pure values: see declared.py."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.texts import known, loads, quoted, record, text_array, utc
from tallybook._model.durations import seconds_text
from tallybook._model.job import Job, JobCall, arranged
from tallybook._model.options import Options
from tallybook.errors import UnknownJob

if TYPE_CHECKING:
    from tallybook._model.job_info import JobInfo

# The server adds delays, because promotion uses its clock. PostgreSQL does not evaluate a branch that is not taken.
RUN_AT = "coalesce({run_at}, clock_timestamp() + {delay:interval})"
RUN_ATS = """\
case when {delays:text} is null then {run_ats} else array(select coalesce(f.run_at, clock_timestamp() + f.delay)
    from unnest({run_ats}, {delays:interval[]}) with ordinality as f(run_at, delay, n) order by f.n) end"""

_JOB = "queue text, task text, args jsonb, run_at timestamptz, priority int, max_attempts int, headers jsonb"
JOBS = """\
queues text[], tasks text[], args text[], run_ats timestamptz[], priorities int[], unique_keys text[],
max_attempts int[], headers text[], on_conflicts text[], unique_whiles text[], order_keys text[],
expires_ats timestamptz[], options text[]"""
_ENQUEUE = Declared(f"enqueue({_JOB}) -> bigint", run_at=RUN_AT)
_MORE = "order_key text, expires_at timestamptz, options jsonb"
_ENQUEUE_MORE = Declared(f"enqueue({_JOB}, {_MORE}) -> bigint", run_at=RUN_AT)
_ENQUEUE_MANY = Declared(f"enqueue_many({JOBS}) -> row (job_ids bigint[], created boolean[])", run_ats=RUN_ATS)
PLURALS = {"priority": "priorities", **{name: name for name in ("args", "headers", "max_attempts", "options")}}
"""The names of columns that are not the parameter's name with an s."""
STATE = Declared("state(job_id bigint) -> text")
cancel = Simple("cancel(job_id bigint, reason text) -> text", str)
retry = Simple("retry(job_id bigint) -> int", int)
# By the server's clock: that of an operator's machine may be wrong.
PUSH = Declared(
    "rate_limit_push(name text, until timestamptz) -> timestamptz",
    until="coalesce({until}, clock_timestamp() + {ahead:interval})",
)

_GET = "select cast(to_json(j) as text) from tallybook.job as j where j.id = cast(cast(%(job_id)s as text) as bigint)"


def enqueue(job: JobCall) -> Call[Job]:
    """Enqueue one job. A job with a unique key uses enqueue_many, which reports whether it was `created`."""
    if job.unique_key is not None:
        return _one(enqueue_many([job]))
    params = {"task": job.task, "args": job.args, **common(job.options)}
    more = _more(job.options)
    if not any(more.values()):
        return Call("enqueue", _ENQUEUE.sql, params, Job)
    return Call("enqueue", _ENQUEUE_MORE.sql, {**params, **more}, Job)


def common(options: Options) -> dict[str, str | None]:
    """Return the parameters that jobs and subjects have in common."""
    return {
        "queue": options.queue,
        "run_at": utc(options.run_at),
        "delay": None if options.delay is None else seconds_text(options.delay),
        "priority": str(options.priority),
        "max_attempts": None if options.max_attempts is None else str(options.max_attempts),
        "headers": options.headers,
    }


def _more(options: Options) -> dict[str, str | None]:
    return {"order_key": options.order_key, "expires_at": utc(options.expires_at), "options": options.options_text}


def enqueue_many(jobs: Sequence[JobCall]) -> Call[list[Job]]:
    """Enqueue many jobs. Columns without a value are null: less to send, and the server skips their checks."""
    params = dict(_ENQUEUE_MANY.nulls)
    params["tasks"] = text_array([job.task for job in jobs])
    params["args"] = text_array([job.args for job in jobs])
    keys = [job.unique_key for job in jobs]
    if any(keys):
        params["unique_keys"] = text_array(keys)
    shared = jobs[0].options
    if all(job.options is shared for job in jobs):
        # Usually all jobs are of one kind; then every column is one value, repeated.
        for column, text in _columns(shared).items():
            params[column] = "{" + ",".join([quoted(text)] * len(jobs)) + "}"
    else:
        rows = {id(job.options): _columns(job.options) for job in jobs}
        for column in set().union(*rows.values()):
            params[column] = text_array([rows[id(job.options)].get(column) for job in jobs])
    return Call("enqueue_many", _ENQUEUE_MANY.sql, params, _jobs)


def _columns(options: Options) -> dict[str, str]:
    found = {
        **common(options),
        **_more(options),
        "on_conflict": None if options.on_conflict == "skip" else options.on_conflict,
        "unique_while": None if options.unique_while == "running" else options.unique_while,
    }
    return {PLURALS.get(name, f"{name}s"): text for name, text in found.items() if text is not None}


FAILED = "failed"  # the parameter of a task that receives the parents that did not complete

_PARENTS = "afters text[], on_parents text[], failed_as text[]"
_FAN_OUT = Declared(f"fan_out({JOBS}, {_PARENTS}) -> row (job_ids bigint[], created boolean[])", run_ats=RUN_ATS)


def put(job: JobCall, takes_failed: Callable[[str], bool]) -> Call[Job]:
    """Enqueue one job, whether it waits for others or not."""
    return _one(put_many([job], takes_failed)) if job.options.after else enqueue(job)


def _one(many: Call[list[Job]]) -> Call[Job]:
    return Call("enqueue", many.sql, many.params, lambda found: many.row(found)[0])


def put_many(jobs: Sequence[JobCall], takes_failed: Callable[[str], bool]) -> Call[list[Job]]:
    """Enqueue many jobs; without parents as enqueue_many. `takes_failed` gets a task's name."""
    if not any(job.options.after for job in jobs):
        return enqueue_many(jobs)
    jobs, parents, places = arranged(jobs)
    many = enqueue_many(jobs)
    on = [job.options.on_parent or "completed" if job.options.after else None for job in jobs]
    failed = [
        FAILED if said == "any" and takes_failed(job.task) and FAILED not in json.loads(job.args) else None
        for said, job in zip(on, jobs, strict=True)
    ]
    params = {
        **many.params,
        "afters": text_array(["{" + ",".join(map(str, ids)) + "}" if ids else None for ids in parents]),
        "on_parents": text_array(on),
        "failed_as": text_array(failed),
    }

    def as_given(report: str) -> list[Job]:
        put = many.row(report)
        return [put[place] for place in places]

    return Call("enqueue_many", _FAN_OUT.sql, params, as_given)  # for exactly_once, the same verb


def get(job_id: int) -> "Call[JobInfo]":
    """Read one job. Raises UnknownJob if there is none."""
    from tallybook._model.job_info import JobInfo

    read = known(partial(UnknownJob, job_id), lambda found: record(JobInfo, loads(found)))
    return Call("get", _GET, {"job_id": str(job_id)}, read)


def _jobs(found: str) -> list[Job]:
    report = loads(found)
    return list(map(Job, report["job_ids"], report["created"]))
