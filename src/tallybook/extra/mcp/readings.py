"""Readings for agents that the operator API does not have: lists of jobs, traces, the doctor."""

from __future__ import annotations

import asyncio
from typing import Any

from tallybook._db import doctor
from tallybook._db.jobs import STATES
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.operator import fields
from tallybook.extra.operator.operations import Ask, Operation, plain


async def _list(ask: Ask, conn: Conn) -> dict[str, Any]:
    given = {"max_jobs": 20, **ask.values}
    if "state" in given:
        given["states"] = [given.pop("state")]
    page = await ask.app.jobs.list(**given).on(conn)
    jobs = [{name: value for name, value in plain(job).items() if name != "cursor"} for job in page.jobs]
    return {"next": page.next, "looked_to": plain(page.looked_to), "jobs": jobs}


async def _trace(ask: Ask, conn: Conn) -> dict[str, Any]:
    given = {"max_events": 100, "newest_first": True, **ask.values}
    return {"events": plain(await ask.app.jobs.trace(**given).on(conn))}


async def _doctor(ask: Ask, _: Conn) -> dict[str, Any]:
    return {"findings": plain(await asyncio.to_thread(doctor.doctor, ask.app.conninfo(None)))}


_FILTER = (
    fields.name("queue", "In this queue.", most=64, example="mail"),
    fields.name("task", "Of this task.", example="send_welcome"),
    fields.choice("state", "In this state.", words=STATES, example="dead"),
    fields.links("links", "With these links.", example={"user": 42}),
    fields.text("error", "The last error contains this text, ignoring case.", example="timeout"),
    fields.flag("unserved", "No live worker knows their task or the version of their args.", example=True),
    fields.instant("since", "Enqueued at this time or later.", example="2026-01-31T09:00:00Z"),
    fields.instant("before", "Enqueued before this time.", example="2026-02-01T00:00:00Z"),
    fields.text("after", "The `next` of the previous page.", most=2000, example="..."),
    fields.whole("max_jobs", "At most this many.", least=1, most=200, default=20, example=50),
)
_WHOSE = (
    fields.whole("job", "Of this job.", least=1, example=4711),
    fields.text("subject", "Of the jobs of this subject.", most=512, example="customer:42"),
    fields.text("unique", "Of the jobs that have had this unique key.", most=512, example="welcome:42"),
    fields.links("links", "Of the jobs with these links.", example={"user": 42}),
    fields.name("task", "Of this task only.", example="send_welcome"),
    fields.whole("max_events", "At most this many.", least=1, most=1000, default=100, example=20),
    fields.flag("newest_first", "Newest first, the default; false: oldest first.", example=True),
)


def _reading(name: str, about: str, serves: Any, given: tuple[fields.Field, ...] = ()) -> Operation:
    return Operation(
        name=name, method="GET", path=f"/{name}", scope="read", about=about, in_query=given, answer={}, example={}, reads=serves
    )  # fmt: skip


READINGS = (
    _reading("list_jobs", "List jobs, newest first; for the next page, pass `next` as `after`.", _list, _FILTER),
    _reading(
        "trace",
        "List the events of one job, subject, unique key or set of links; pass exactly one of these.",
        _trace,
        _WHOSE,
    ),
    _reading("doctor", "Check the database for problems, with advice on each; takes a few seconds.", _doctor),
)
