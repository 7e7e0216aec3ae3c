"""The verbs why and trace, as pure values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tallybook._db.declared import Call, Declared
from tallybook._db.stored import loads
from tallybook._db.texts import instant
from tallybook._model.options import check_name, text_problem
from tallybook._model.why import Reason, TraceEvent, checked_links
from tallybook.errors import ConfigError, InvalidArgument

__all__ = ["trace", "why"]

_WHY = Declared("why(job_id bigint) -> rows (state text, reason text, explanation text, details jsonb)")
_TRACE = Declared("""
  trace(subject text, unique_key text, links jsonb, job bigint, task text, max_events int, newest_first boolean)
  -> rows (at timestamptz, job_id bigint, queue text, task_name text, attempt int, event text, worker text, details jsonb,
           error jsonb)""")


def why(job_id: int) -> Call[list[Reason]]:
    """Why a job does not run; one that there is not has a reason, too."""
    return _WHY.call(lambda found: [Reason(**row) for row in loads(found)], job_id=job_id)


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
    """All that happened for one thing, in order."""
    if sum(given is not None for given in (subject, unique, links, job)) != 1:
        raise InvalidArgument("trace needs one thing to follow", hint="Name a subject, a unique key, links or a job")
    if isinstance(max_events, bool) or not isinstance(max_events, int) or not 1 <= max_events <= 10_000:
        raise ConfigError("max_events", max_events, "is a whole number from 1 to 10000")
    if task is not None:
        check_name("task", task, 200)
    return _TRACE.call(
        lambda found: [_event(row) for row in loads(found)],
        subject=_text("subject", subject),
        unique_key=_text("unique", unique),
        links=None if links is None else json.dumps(checked_links(links)),
        job=job,
        task=task,
        max_events=max_events,
        newest_first=bool(newest_first),
    )


def _event(row: dict[str, Any]) -> TraceEvent:
    at = instant(row["at"])
    assert at is not None
    return TraceEvent(
        at=at,
        job=row["job_id"],
        queue=row["queue"],
        task=row["task_name"],
        attempt=row["attempt"],
        event=row["event"],
        worker=row["worker"],
        details=row["details"],
        error=row["error"],
    )


def _text(option: str, value: str | None) -> str | None:
    if value is not None and (not isinstance(value, str) or (problem := text_problem(value))):
        raise ConfigError(option, value, "not a text" if not isinstance(value, str) else problem)
    return value
