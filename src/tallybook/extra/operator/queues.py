"""Queues: list, pause, resume, and count their jobs."""

from typing import Any

from tallybook._db import calls
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.operator import fields
from tallybook.extra.operator.operations import Ask, Operation, listed, plain, record, steering

_QUEUE = fields.name("queue", "The queue's name.", required=True, most=64, example="mail")


async def _list(ask: Ask, conn: Conn) -> dict[str, Any]:
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


async def _reach(ask: Ask, _: Conn) -> None:
    ask.reach(ask["queue"])


_INFO = record(
    name="mail", retention="default", max_attempts=("integer?", None), notify=False, paused_at=("instant?", None),
    paused_by=("string?", None), created_at=("instant?", "2026-01-31T09:00:00Z"), changed_at=("instant?", None),
    changed_by=("string?", None), error_retention=("number?", 86400.0), metrics_retention=("number?", None),
    own_names=False, random_order=False,
)  # fmt: skip
_COUNT = record(
    queue="mail", task="send_welcome", scheduled=0, retrying=1, waiting=0, available=12, running=2, dead=0,
    completed=4711, failed=3, snoozed=0, cancelled=1, lost=0, moved=0, died=0,
)  # fmt: skip

OPERATIONS = (
    Operation(
        "list_queues", "/queues", "read", "List all queues with their settings.",
        answer=listed("queues", _INFO), reads=_list,
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
        _QUEUE, "pause", "Pause a queue: no more of its jobs start; running jobs continue.", "pause", _reach,
        lambda ask: calls.pause(ask["queue"], ask.key.id),
    ),
    steering(
        _QUEUE, "resume", "Resume a paused queue, so that its jobs can start.", "resume", _reach,
        lambda ask: calls.resume(ask["queue"], ask.key.id),
    ),
)  # fmt: skip
