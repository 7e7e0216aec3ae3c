"""The table of endpoints, used to serve requests, to build the OpenAPI document and to check the docs page.

The endpoints of jobs and dead letters are in `jobs`; those of queues, schedules, workers and the audit are here.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from tallybook._app.schedules import get_schedule
from tallybook._db.declared import Call
from tallybook._db.texts import instant, loads
from tallybook._db.verb import Verb, run
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.operator import fields, jobs
from tallybook.extra.operator.operations import Ask, Changed, Operation, listed, plain, record
from tallybook.extra.operator.problems import Problem

Reach = Callable[[Ask, Conn], Awaitable[None]]


def steering(
    field: fields.Field, verb: str, about: str, action: str, reach: Reach, do: Callable[[Ask], Verb[bool]]
) -> Operation:
    """Return the operation that pauses or resumes what a field names. `reach` checks that the key may do that."""
    noun, paused = field.name, verb == "pause"

    async def change(ask: Ask, conn: Conn) -> Changed:
        await reach(ask, conn)
        changed = await do(ask).on(conn)
        await reach(ask, conn)  # again under the lock: a Problem here rolls everything back
        answer = {noun: ask[noun], "paused": paused, "changed": changed}
        return Changed(answer, action if changed else None, {noun: ask[noun]})

    return Operation(
        f"{verb}_{noun}", f"/{noun}s/{{{noun}}}/{verb}", "operate", about, in_path=(field,), codes=("unknown", "queue"),
        answer=record(**{noun: field.example}, paused=paused, changed=True), changes=change,
    )  # fmt: skip


_QUEUE = fields.name("queue", "The queue's name.", required=True, most=64, example="mail")


async def _queues(ask: Ask, conn: Conn) -> dict[str, Any]:
    return {"queues": [plain(one) for one in await ask.app.queues.list().on(conn) if ask.key.reaches(one.name)]}


async def _counts(ask: Ask, conn: Conn) -> dict[str, Any]:
    queue, task = ask.get("queue"), ask.get("task")
    if queue is not None:
        ask.reach(queue)
    found = [
        plain(one)
        for one in await ask.app.counts.list().on(conn)
        if ask.key.reaches(one.queue) and queue in (None, one.queue) and task in (None, one.task)
    ]
    return {"counts": found}


async def _reach_queue(ask: Ask, _: Conn) -> None:
    ask.reach(ask["queue"])


_QUEUE_INFO = record(
    name="mail", retention="default", max_attempts=("integer?", None), notify=False, paused_at=("instant?", None),
    paused_by=("string?", None), created_at=("instant?", "2026-01-31T09:00:00Z"), changed_at=("instant?", None),
    changed_by=("string?", None), error_retention=("number?", 86400.0), metrics_retention=("number?", None),
    own_names=False, random_order=False,
)  # fmt: skip
_COUNT = record(
    queue="mail", task="send_welcome", scheduled=0, retrying=1, waiting=0, available=12, running=2, dead=0,
    completed=4711, failed=3, snoozed=0, cancelled=1, lost=0, moved=0, died=0,
)  # fmt: skip

_SCHEDULE = fields.name("schedule", "The schedule's name.", required=True, example="report-de")

_SCHEDULE_INFO = record(
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


async def _schedules(ask: Ask, conn: Conn) -> dict[str, Any]:
    found = [one for one in await ask.app.schedules.list().on(conn) if ask.key.reaches(one.queue)]
    return {"schedules": [{name: plain(getattr(one, name)) for name in _SCHEDULE_INFO.example} for one in found]}


async def _reach_schedule(ask: Ask, conn: Conn) -> None:
    found, _ = await run(conn, get_schedule(ask["schedule"]))
    ask.reach(found.queue)


async def _run_schedule(ask: Ask, conn: Conn) -> Changed:
    await _reach_schedule(ask, conn)
    fired = await ask.app.schedules.run(ask["schedule"]).on(conn)
    # Check again under the lock: its queue may have changed in between. A Problem here rolls everything back.
    await _reach_schedule(ask, conn)
    done = {"what": fired.what, "job": fired.job_id, "jobs": fired.jobs}
    answer = {"schedule": ask["schedule"], **done, "reason": fired.reason if ask.admin else None}
    return Changed(answer, "schedule_run", {"schedule": ask["schedule"]}, done)


_LIVING = """\
select cast(coalesce(json_agg(w order by w.id), '[]') as text) from (
  select x.id, x.name, x.queues, x.tasks, x.started_at, nullif(x.seen_at, '-infinity') as seen_at
    from tallybook.workers as x
   where x.ended_at is null and (cast(%(queue)s as text) is null or cast(%(queue)s as text) = any (x.queues))
   order by x.id limit 1000) as w"""


async def _workers(ask: Ask, conn: Conn) -> dict[str, Any]:
    found: list[dict[str, Any]] = await run(conn, Call("workers", _LIVING, {"queue": ask.queue()}, loads))
    for row in found:
        if ask.key.queues is not None:
            row["tasks"] = []  # a worker does not record which task is in which queue
        row["queues"] = [queue for queue in row["queues"] if ask.key.reaches(queue)]
        row |= {name: plain(instant(row[name])) for name in ("started_at", "seen_at")}
    return {"workers": found}


async def _audits(ask: Ask, conn: Conn) -> dict[str, Any]:
    given: dict[str, Any] = {name: ask.get(name) for name in ("actor", "action", "before")}
    found = await ask.app.audit.list(**given, max_rows=ask.get("max_rows", 50)).on(conn)
    return {"audits": [plain(row) for row in found]}


_TEXTS = {"type": "array", "items": {"type": "string"}}
_TASKS = {**_TEXTS, "description": "The tasks that it knows; empty for a key that is limited to some queues."}
_WORKER = record(
    id=7, name="web-1", queues=(_TEXTS, ["mail"]), tasks=(_TASKS, ["send_welcome"]), started_at="2026-01-31T08:00:00Z",
    seen_at=("instant?", "2026-01-31T09:04:00Z"),
)  # fmt: skip
_AUDIT = record(
    id=17, at="2026-01-31T09:05:00Z", actor="deploy", via="api", action="retry", target={"job": 4711},
    done={"attempt": 6},
)  # fmt: skip

NODE = fields.text("node", "The node, if the API serves several.", most=64, example="south")
_ALL = (
    *jobs.OPERATIONS,
    Operation(
        "list_queues", "/queues", "read", "List all queues with their settings.",
        answer=listed("queues", _QUEUE_INFO), reads=_queues,
    ),
    Operation(
        "counts", "/counts", "read",
        "Count the jobs in each state and the ended attempts by outcome, per queue and task.",
        in_query=(
            fields.name("queue", "Only in this queue.", most=64, example="mail"),
            fields.name("task", "Only of this task.", example="send_welcome"),
        ),
        codes=("queue",), answer=listed("counts", _COUNT), reads=_counts,
    ),
    steering(
        _QUEUE, "pause", "Pause a queue: no more of its jobs start; running jobs continue.", "pause", _reach_queue,
        lambda ask: ask.app.queues.pause(ask["queue"], ask.key.id),
    ),
    steering(
        _QUEUE, "resume", "Resume a paused queue, so that its jobs can start.", "resume", _reach_queue,
        lambda ask: ask.app.queues.resume(ask["queue"], ask.key.id),
    ),
    Operation(
        "list_schedules", "/schedules", "read", "List all schedules; the field `every` is in seconds.",
        answer=listed("schedules", _SCHEDULE_INFO), reads=_schedules,
    ),
    Operation(
        "run_schedule", "/schedules/{schedule}/run", "operate",
        "Fire a schedule now, as if a tick were due."
        " The outcome is enqueued, failed, or skipped (the schedule's previous job is still open).",
        in_path=(_SCHEDULE,), codes=("unknown", "queue"), answer=_FIRED, changes=_run_schedule,
    ),
    steering(
        _SCHEDULE, "pause", "Pause a schedule until it is resumed.", "schedule_pause", _reach_schedule,
        lambda ask: ask.app.schedules.pause(ask["schedule"], ask.key.id),
    ),
    steering(
        _SCHEDULE, "resume", "Resume a paused schedule from its next tick on.", "schedule_resume", _reach_schedule,
        lambda ask: ask.app.schedules.resume(ask["schedule"]),
    ),
    Operation(
        "list_workers", "/workers", "read", "List the live workers, at most 1,000.",
        in_query=(fields.name("queue", "Only workers of this queue.", most=64, example="mail"),), codes=("queue",),
        answer=listed("workers", _WORKER), reads=_workers,
    ),
    Operation(
        "list_audits", "/audits", "admin",
        "List the audit log, newest first; for the next page, pass the last `id` as `before`.", whole=True,
        in_query=(
            fields.text("actor", "By this user or key.", example="deploy"),
            fields.text("action", "With this verb.", most=64, example="retry"),
            fields.whole("before", "Older than the row with this id.", least=1, example=1000, of_node=True),
            fields.whole("max_rows", "At most this many.", least=1, most=1000, default=50, example=50),
        ),
        codes=("queue",), newest=("at", "max_rows"), answer=listed("audits", _AUDIT), reads=_audits,
    ),
)  # fmt: skip
# An operation about a job has no field `node`: the id of the job determines the node.
OPERATIONS: tuple[Operation, ...] = tuple(
    one if any(field.name == "job" for field in one.in_path) else replace(one, in_query=(*one.in_query, NODE))
    for one in _ALL
)


def _pattern(operation: Operation) -> re.Pattern[str]:
    # A name may contain a slash, which the server has decoded. The rest of the path is fixed: one match is possible.
    kinds = {one.name: ".*" if one.schema["type"] == "string" else "[^/]+" for one in operation.in_path}
    forms = {f"{{{name}}}": f"(?P<{name}>{kind})" for name, kind in kinds.items()}
    parts = [forms.get(part) or re.escape(part) for part in re.split(r"(\{\w+\})", operation.path)]
    return re.compile("".join(parts), re.DOTALL)


# Each path has one method. Longer paths first: /jobs/7/why is not a job.
_TABLE = [(_pattern(one), one) for one in sorted(OPERATIONS, key=lambda one: -one.path.count("/"))]


def found(method: str, path: str) -> tuple[Operation, dict[str, Any]]:
    """Return the operation of a request and the texts in its path. Raises a Problem (404, 405)."""
    for pattern, operation in _TABLE:
        if match := pattern.fullmatch(path):
            if method != operation.method:
                raise Problem("method", f"{path[:200]} does not have this method", headers={"Allow": operation.method})
            return operation, match.groupdict()
    raise Problem("unknown", "there is no such path", hint="See openapi.json")
