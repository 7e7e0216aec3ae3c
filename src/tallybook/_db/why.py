"""The verbs why and trace, as pure values."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.texts import checked, records
from tallybook._model.links import checked_links
from tallybook._model.options import check_name, whole
from tallybook._model.why import Reason, TraceEvent
from tallybook.errors import InvalidArgument

why = Simple("why(job_id bigint) -> rows (state text, reason text, explanation text, details jsonb)", records(Reason))
_TRACE = Declared("""
  trace(subject text, unique_key text, links jsonb, job bigint, task text, max_events int, newest_first boolean)
  -> rows (at timestamptz, job_id bigint, queue text, task_name text, attempt int, event text, worker text, details jsonb,
           error jsonb)""")


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
        raise InvalidArgument(
            "trace needs exactly one thing to follow", hint="Pass a subject, a unique key, links or a job"
        )
    whole("max_events", max_events, 1, 10_000)
    if task is not None:
        check_name("task", task, 200)
    return _TRACE.call(
        records(TraceEvent, "at", job_id="job", task_name="task"),
        subject=checked("subject", subject),
        unique_key=checked("unique", unique),
        links=None if links is None else json.dumps(checked_links(links)),
        job=job,
        task=task,
        max_events=max_events,
        newest_first=bool(newest_first),
    )
