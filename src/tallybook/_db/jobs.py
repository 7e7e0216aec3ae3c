"""Lists of jobs, and what is done to many of them by their ids, as pure values like those of calls.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tallybook._db.calls import Call, instant, text_array
from tallybook._db.stored import loads
from tallybook._model.lists import JobDone, JobLine, JobPage
from tallybook._model.options import text_problem
from tallybook._model.why import checked_links
from tallybook.errors import ConfigError

__all__ = ["STATES", "JobFilter", "cancel_jobs", "drop_jobs", "jobs", "retry_jobs"]

STATES = ("scheduled", "retrying", "waiting", "available", "running", "completed", "cancelled", "dead")
MOST = 1000
"""Jobs of one page, and of one call that changes them."""
LOOKED = 50_000

PARAMETERS = """\
  queue => cast(%(queue)s as text), task => cast(%(task)s as text), states => cast(cast(%(states)s as text) as text[]),
  links => cast(cast(%(links)s as text) as jsonb), error => cast(%(error)s as text),
  unserved => cast(cast(%(unserved)s as text) as boolean), since => cast(cast(%(since)s as text) as timestamptz),
  before => cast(cast(%(before)s as text) as timestamptz), after => cast(%(after)s as text),
  max_jobs => cast(cast(%(max_jobs)s as text) as int), max_looked => cast(cast(%(max_looked)s as text) as int)"""
_JOBS = f"select cast(coalesce(json_agg(r), '[]') as text) from tallybook.jobs(\n{PARAMETERS}) as r"  # noqa: S608

_IDS = "jobs => cast(cast(%(jobs)s as text) as bigint[])"
_RETRY = f"select cast(coalesce(json_agg(r), '[]') as text) from tallybook.retry_jobs({_IDS}) as r"  # noqa: S608
_DROP = f"select cast(coalesce(json_agg(r), '[]') as text) from tallybook.drop_jobs({_IDS}) as r"  # noqa: S608
_CANCEL = f"""\
select cast(coalesce(json_agg(r), '[]') as text) from tallybook.cancel_jobs({_IDS}, reason => cast(%(reason)s as text)) as r"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs; None matches all. ConfigError for what cannot be meant."""

    queue: str | None = None
    task: str | None = None
    states: Sequence[str] | None = None
    links: Mapping[str, object] | None = None
    error: str | None = None
    unserved: bool = False
    since: datetime | None = None
    before: datetime | None = None

    def params(self, after: str | None, max_jobs: int, max_looked: int) -> dict[str, str | None]:
        """As the statement takes them."""
        states = None if self.states is None else [self.states] if isinstance(self.states, str) else list(self.states)
        if states is not None and (not states or any(state not in STATES for state in states)):
            raise ConfigError("states", states, f"are some of {', '.join(STATES)}")
        return {
            "queue": _text("queue", self.queue),
            "task": _text("task", self.task),
            "states": None if states is None else text_array(states),
            "links": None if self.links is None else json.dumps(checked_links(self.links)),
            "error": _text("error", self.error),
            "unserved": "true" if self.unserved else "false",
            "since": _instant("since", self.since),
            "before": _instant("before", self.before),
            "after": _text("after", after),
            "max_jobs": _number("max_jobs", max_jobs, 1, MOST),
            "max_looked": _number("max_looked", max_looked, 1000, 1_000_000),
        }


def jobs(which: JobFilter, *, after: str | None, max_jobs: int, max_looked: int = LOOKED) -> Call[JobPage]:
    """One page of the jobs that match."""
    return Call("jobs", _JOBS, which.params(after, max_jobs, max_looked), _page)


def retry_jobs(ids: Iterable[int]) -> Call[list[JobDone]]:
    """Give each of these jobs another attempt."""
    return Call("retry_jobs", _RETRY, {"jobs": _ids(ids)}, _done)


def cancel_jobs(ids: Iterable[int], reason: str | None) -> Call[list[JobDone]]:
    """Say of each of these jobs that it shall not run."""
    return Call("cancel_jobs", _CANCEL, {"jobs": _ids(ids), "reason": _text("reason", reason)}, _done)


def drop_jobs(ids: Iterable[int]) -> Call[list[JobDone]]:
    """Throw these dead letters away."""
    return Call("drop_jobs", _DROP, {"jobs": _ids(ids)}, _done)


_INSTANTS = ("enqueued_at", "run_at", "started_at", "ended_at")


def _page(found: str) -> JobPage:
    rows: list[dict[str, Any]] = loads(found)
    more = rows.pop() if rows and rows[-1]["id"] is None else None
    lines = []
    for row in rows:
        row["queue"], row["task"] = row.pop("queue_name"), row.pop("task_name")
        del row["looked_to"]
        lines.append(JobLine(**row | {name: instant(row[name]) for name in _INSTANTS}))
    if more is None:
        return JobPage(lines, None, None)
    return JobPage(lines, more["cursor"], instant(more["looked_to"]))


def _done(found: str) -> list[JobDone]:
    return [JobDone(row["job_id"], row["done"], row["detail"]) for row in loads(found)]


def _ids(ids: Iterable[int]) -> str:
    listed = list(ids)
    for one in listed:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 < one < 2**63:
            raise ConfigError("jobs", one, "is no id of a job")
    if len(listed) > MOST:
        raise ConfigError("jobs", len(listed), f"are at most {MOST} ids", hint="Say more of them in several calls")
    return "{" + ",".join(map(str, listed)) + "}"


def _text(option: str, value: str | None) -> str | None:
    if value is not None and (not isinstance(value, str) or (problem := text_problem(value))):
        raise ConfigError(option, value, "not a text" if not isinstance(value, str) else problem)
    return value


def _instant(option: str, value: datetime | None) -> str | None:
    if value is not None and (not isinstance(value, datetime) or value.utcoffset() is None):
        raise ConfigError(option, value, "not an aware datetime", hint="Write datetime.now(UTC) - ...")
    return None if value is None else value.astimezone(UTC).isoformat()


def _number(option: str, value: int, least: int, most: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(option, value, f"is a whole number from {least} to {most}")
    return str(value)
