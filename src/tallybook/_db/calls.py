"""Every verb that a program may use, as a pure value: `Call(verb, sql, params, row)`.

The SQL is written once and runs on every driver, on the user's own connection, whatever its settings are. Therefore:

- Every parameter is text or null, cast twice (`cast(cast(%(id)s as text) as bigint)`): the driver is told that it
  sends text, and the server reads it. Adapters and codecs that the user has registered for datetime, list or JSON are
  not met, nor are SQLAlchemy's guesses, which make of an aware datetime a timestamp without time zone.
- What comes back is one column of one row: a number, a text, or JSON as text, whose instants are ISO 8601.
- `cast(... as ...)`, because `::` collides with SQLAlchemy's `:name`; and no percent sign but those of parameters.

Arrays are sent as PostgreSQL's array literal, which takes a fifth of the time of the drivers' list adaptation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Generic, TypeVar

from tallybook._db.stored import edge, loads
from tallybook._model.job import Job, JobCall, JobInfo
from tallybook._model.options import Options
from tallybook.errors import TallybookError, UnknownJob, UnknownQueue

__all__ = [
    "Call",
    "cancel",
    "enqueue",
    "enqueue_many",
    "get",
    "pause",
    "rendered",
    "resume",
    "retry",
    "state",
    "text_array",
]

T = TypeVar("T")
Params = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One verb with its values. `row` turns the only column of the only row into what the caller gets."""

    verb: str
    sql: str
    params: Params
    row: Callable[[Any], T]
    unknown: type[TallybookError] = UnknownJob
    """What TB002 means here: no such job, or no such queue."""


_ENQUEUE = """\
select tallybook.enqueue(queue => cast(%(queue)s as text), task => cast(%(task)s as text),
  args => cast(cast(%(args)s as text) as jsonb),
  run_at => coalesce(cast(cast(%(run_at)s as text) as timestamptz),
                     clock_timestamp() + cast(cast(%(delay)s as text) as interval)),
  priority => cast(cast(%(priority)s as text) as int),
  max_attempts => cast(cast(%(max_attempts)s as text) as int), headers => cast(cast(%(headers)s as text) as jsonb))"""

_ENQUEUE_MORE = (
    _ENQUEUE.removesuffix(")")
    + """,
  order_key => cast(%(order_key)s as text), expires_at => cast(cast(%(expires_at)s as text) as timestamptz),
  options => cast(cast(%(options)s as text) as jsonb))"""
)

# Delays are added here because the server's clock is the one that promotes; PostgreSQL skips a branch not taken.
_ENQUEUE_MANY = """\
select cast(to_json(r) as text) from tallybook.enqueue_many(
  queues => cast(cast(%(queues)s as text) as text[]), tasks => cast(cast(%(tasks)s as text) as text[]),
  args => cast(cast(%(args)s as text) as text[]),
  run_ats => case when cast(%(delays)s as text) is null then cast(cast(%(run_ats)s as text) as timestamptz[])
    else array(
      select coalesce(f.run_at, clock_timestamp() + f.delay)
        from unnest(cast(cast(%(run_ats)s as text) as timestamptz[]), cast(cast(%(delays)s as text) as interval[]))
          with ordinality as f(run_at, delay, n) order by f.n) end,
  priorities => cast(cast(%(priorities)s as text) as int[]),
  unique_keys => cast(cast(%(unique_keys)s as text) as text[]),
  max_attempts => cast(cast(%(max_attempts)s as text) as int[]),
  headers => cast(cast(%(headers)s as text) as text[]),
  on_conflicts => cast(cast(%(on_conflicts)s as text) as text[]),
  unique_whiles => cast(cast(%(unique_whiles)s as text) as text[]),
  order_keys => cast(cast(%(order_keys)s as text) as text[]),
  expires_ats => cast(cast(%(expires_ats)s as text) as timestamptz[]),
  options => cast(cast(%(options)s as text) as text[])) as r"""

_GET = """\
select cast(to_json(j) as text) from tallybook.job as j where j.id = cast(cast(%(job_id)s as text) as bigint)"""

_STATE = "select tallybook.state(job_id => cast(cast(%(job_id)s as text) as bigint))"

_CANCEL = """\
select tallybook.cancel(job_id => cast(cast(%(job_id)s as text) as bigint), reason => cast(%(reason)s as text))"""

_RETRY = "select tallybook.retry(job_id => cast(cast(%(job_id)s as text) as bigint))"
_PAUSE = """\
select tallybook.pause(queue => cast(%(queue)s as text), who => coalesce(cast(%(who)s as text), session_user))"""
_RESUME = """\
select tallybook.resume(queue => cast(%(queue)s as text), who => coalesce(cast(%(who)s as text), session_user))"""


def enqueue(job: JobCall) -> Call[Job]:
    """Put one job in. A job with a unique key goes by enqueue_many, which says whether it was `created`."""
    if job.unique_key is not None:
        many = enqueue_many([job])
        return Call("enqueue", many.sql, many.params, _only_job)
    options = job.options
    params = {
        "queue": options.queue,
        "task": job.task,
        "args": job.args,
        "run_at": options.run_at_text,
        "delay": options.delay_text,
        "priority": str(options.priority),
        "max_attempts": None if options.max_attempts is None else str(options.max_attempts),
        "headers": options.headers,
    }
    more = {"order_key": options.order_key, "expires_at": options.expires_text, "options": options.options_text}
    if not any(more.values()):
        return Call("enqueue", _ENQUEUE, params, Job)
    return Call("enqueue", _ENQUEUE_MORE, {**params, **more}, Job)


def enqueue_many(jobs: Sequence[JobCall]) -> Call[list[Job]]:
    """Put many jobs in. Columns that nobody asked for are null: less to send, and the server skips their checks."""
    params: dict[str, str | None] = dict.fromkeys(_MANY)
    params["tasks"] = text_array([job.task for job in jobs])
    params["args"] = text_array([job.args for job in jobs])
    keys = [job.unique_key for job in jobs]
    if any(keys):
        params["unique_keys"] = text_array(keys)
    shared = jobs[0].options
    if all(job.options is shared for job in jobs):
        # Mostly they are all of one kind; then every column is one word, repeated.
        for column, text in _columns(shared):
            if text is not None:
                params[column] = "{" + ",".join([_quoted(text)] * len(jobs)) + "}"
        return Call("enqueue_many", _ENQUEUE_MANY, params, _jobs)
    rows = {id(job.options): _columns(job.options) for job in jobs}
    for at, (column, _) in enumerate(_columns(shared)):
        texts = [rows[id(job.options)][at][1] for job in jobs]
        if any(text is not None for text in texts):
            params[column] = text_array(texts)
    return Call("enqueue_many", _ENQUEUE_MANY, params, _jobs)


_MANY = (
    "queues", "tasks", "args", "run_ats", "delays", "priorities", "unique_keys", "max_attempts", "headers",
    "on_conflicts", "unique_whiles", "order_keys", "expires_ats", "options",
)  # fmt: skip


def _columns(options: Options) -> tuple[tuple[str, str | None], ...]:
    return (
        ("queues", options.queue),
        ("priorities", str(options.priority)),
        ("run_ats", options.run_at_text),
        ("delays", options.delay_text),
        ("max_attempts", None if options.max_attempts is None else str(options.max_attempts)),
        ("headers", options.headers),
        ("on_conflicts", None if options.on_conflict == "skip" else options.on_conflict),
        ("unique_whiles", None if options.unique_while == "running" else options.unique_while),
        ("order_keys", options.order_key),
        ("expires_ats", options.expires_text),
        ("options", options.options_text),
    )


def get(job_id: int) -> Call[JobInfo]:
    """Read one job; UnknownJob if there is none."""
    return Call("get", _GET, {"job_id": str(job_id)}, partial(_job_info, job_id))


def state(job_id: int) -> Call[str]:
    """The state of one job; UnknownJob if there is none."""
    return Call("state", _STATE, {"job_id": str(job_id)}, partial(_known_state, job_id))


def _known_state(job_id: int, found: str | None) -> str:
    if found is None:
        raise UnknownJob(job_id)
    return found


def cancel(job_id: int, reason: str | None = None) -> Call[str]:
    """Cancel one job; the state that this leaves it in."""
    return Call("cancel", _CANCEL, {"job_id": str(job_id), "reason": reason}, str)


def retry(job_id: int) -> Call[int]:
    """Give a dead or cancelled job another attempt; its number."""
    return Call("retry", _RETRY, {"job_id": str(job_id)}, int)


def pause(queue: str, who: str | None = None) -> Call[bool]:
    """Pause a queue; False: it was paused already. `who` is shown with it, by default the database user."""
    return Call("pause", _PAUSE, {"queue": queue, "who": who}, bool, unknown=UnknownQueue)


def resume(queue: str, who: str | None = None) -> Call[bool]:
    """Let a paused queue run again; False: it was not paused."""
    return Call("resume", _RESUME, {"queue": queue, "who": who}, bool, unknown=UnknownQueue)


def _only_job(found: str) -> Job:
    (job,) = _jobs(found)
    return job


def _jobs(found: str) -> list[Job]:
    report = loads(found)
    return list(map(Job, report["job_ids"], report["created"]))


_COLUMNS = frozenset(field.name for field in fields(JobInfo))


def _job_info(job_id: int, found: str | None) -> JobInfo:
    if found is None:
        raise UnknownJob(job_id)
    # A view of a newer release may have columns that this one does not know.
    columns = {name: value for name, value in loads(found).items() if name in _COLUMNS}
    for name in ("enqueued_at", "run_at", "started_at", "ended_at", "expires_at"):
        columns[name] = instant(columns.get(name))
    return JobInfo(**columns)


def instant(text: str | None) -> datetime | None:
    """An instant of the server's JSON, in UTC; one that Python does not know becomes the nearest that it knows."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):  # infinity, or a year that Python does not know
        return edge(text)


def text_array(items: Sequence[str | None]) -> str:
    """PostgreSQL's array literal for these texts."""
    if None in items:
        return "{" + ",".join("NULL" if item is None else _quoted(item) for item in items) + "}"
    # One pass of C over the whole text; items with the separator in them (no JSON has it) go the slow way.
    joined = _SEPARATOR.join(items)  # type: ignore[arg-type]
    if joined.count(_SEPARATOR) != len(items) - 1:
        return "{" + ",".join(map(_quoted, items)) + "}"  # type: ignore[arg-type]
    escaped = joined.replace("\\", "\\\\").replace('"', '\\"').replace(_SEPARATOR, '","')
    return '{"' + escaped + '"}'


_SEPARATOR = "\x1f"


def _quoted(item: str) -> str:
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'


_PLACEHOLDER = re.compile(r"%\((\w+)\)s")


@cache
def rendered(sql: str, style: str) -> tuple[str, tuple[str, ...]]:
    """`sql` with a driver's placeholders, and their names in order: "pyformat" %(a)s, "colon" :a, "dollar" $1."""
    names = tuple(dict.fromkeys(_PLACEHOLDER.findall(sql)))
    if style == "pyformat":
        return sql, names
    if style == "colon":
        return _PLACEHOLDER.sub(r":\1", sql), names
    return _PLACEHOLDER.sub(lambda match: f"${names.index(match[1]) + 1}", sql), names
