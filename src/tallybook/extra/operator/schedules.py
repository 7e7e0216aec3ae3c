"""Schedules: list, run now, pause, resume."""

from typing import Any

from tallybook._db import schedules
from tallybook._db.verb import run
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.operator import fields
from tallybook.extra.operator.operations import Ask, Changed, Operation, listed, plain, record, steering

_NAME = fields.name("schedule", "The schedule's name.", required=True, example="report-de")

_INFO = record(
    name="report-de", source="code", app=("string?", "shop"), task="report", queue="default", priority=2,
    cron=("string?", "0 6 * * MON-FRI"), every=("number?", None), tz="Europe/Berlin", missed="once", overlap=False,
    paused_at=("instant?", None), paused_by=("string?", None), tick=("instant?", "2026-02-02T05:00:00Z"),
    due_at=("instant?", "2026-02-02T05:00:00Z"), last_tick=("instant?", "2026-01-30T05:00:00Z"),
    last_what=("string?", "enqueued"), last_job_id=("integer?", 4700), fired_count=20, skipped_count=0, missed_count=0,
    failed_count=0,
)  # fmt: skip
_FIRED = record(
    schedule="report-de", what="enqueued", job=("integer?", 4713), jobs=("integer?", 1), reason=("string?", None)
)


async def _list(ask: Ask, conn: Conn) -> dict[str, Any]:
    found = [one for one in await ask.app.schedules.list().on(conn) if ask.key.reaches(one.queue)]
    return {"schedules": [{name: plain(getattr(one, name)) for name in _INFO.example} for one in found]}


async def _reach(ask: Ask, conn: Conn) -> None:
    found, _ = await run(conn, schedules.show(ask["schedule"]))
    ask.reach(found.queue)


async def _run(ask: Ask, conn: Conn) -> Changed:
    await _reach(ask, conn)
    fired = await ask.app.schedules.run(ask["schedule"]).on(conn)
    # Check again under the lock: its queue may have changed in between. A Problem here rolls everything back.
    await _reach(ask, conn)
    done = {"what": fired.what, "job": fired.job_id, "jobs": fired.jobs}
    answer = {"schedule": ask["schedule"], **done, "reason": fired.reason if ask.admin else None}
    return Changed(answer, "schedule_run", {"schedule": ask["schedule"]}, done)


OPERATIONS = (
    Operation(
        "list_schedules", "/schedules", "read", "List all schedules; the field `every` is in seconds.",
        answer=listed("schedules", _INFO), reads=_list,
    ),
    Operation(
        "run_schedule", "/schedules/{schedule}/run", "operate",
        "Fire a schedule now, as if a tick were due."
        " The outcome is enqueued, failed, or skipped (the schedule's previous job is still open).",
        in_path=(_NAME,), codes=("unknown", "queue"), answer=_FIRED, changes=_run,
    ),
    steering(
        _NAME, "pause", "Pause a schedule until it is resumed.", "schedule_pause", _reach,
        lambda ask: schedules.pause(ask["schedule"], ask.key.id),
    ),
    steering(
        _NAME, "resume", "Resume a paused schedule from its next tick on.", "schedule_resume", _reach,
        lambda ask: schedules.resume(ask["schedule"]),
    ),
)  # fmt: skip
