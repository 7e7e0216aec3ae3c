"""Dead letters: list, retry and drop by filter."""

from __future__ import annotations

from functools import partial
from typing import Any

from tallybook._db import aio, filters
from tallybook._db.filters import DeadFilter
from tallybook.extra.dashboard.database import READ_TIMEOUT, Conn
from tallybook.extra.operator import fields
from tallybook.extra.operator.fields import Field
from tallybook.extra.operator.operations import Ask, Changed, Operation, listed, plain, record

_FILTER: tuple[Field, ...] = (
    fields.name("queue", "In this queue.", most=64, example="mail"),
    fields.name("task", "Of this task.", example="send_welcome"),
    fields.choice("reason", "Dead for this reason.", words=filters.REASONS, example="failed"),
    fields.text(
        "error", "The last error's type or message contains this, ignoring case.", example="timeout", admin=True
    ),
    fields.instant("since", "Died at this time or later.", example="2026-01-31T09:00:00Z"),
    fields.instant("before", "Died before this time.", example="2026-02-01T00:00:00Z"),
)
_ARGS = fields.mapping("args", "Args that contain these.", example={"user_id": 42}, admin=True)
_MOST = fields.whole("max_jobs", "At most this many, oldest first.", least=1, most=10_000, default=10_000, example=1000)
_DRY = fields.flag("dry_run", "Only count the matches.", example=False)
_NAMES = ("queue", "task", "reason", "since", "before")


def _which(ask: Ask) -> DeadFilter:
    given = {name: ask.get(name) for name in (*(field.name for field in _FILTER), "args")}
    return DeadFilter(**{**given, "queue": ask.queue()})


async def _list(ask: Ask, conn: Conn) -> dict[str, Any]:
    call = filters.dead_letters(_which(ask), ask.get("max_jobs", 50), ask.get("before_id"))
    letters = []
    for letter in await aio.run(conn, call):
        row = {name: plain(getattr(letter, name)) for name in _LETTER["required"] if name != "error_type"}
        row["error_type"] = (letter.error or {}).get("type")
        if ask.admin:
            row["details"] = {"args": letter.args, "summary": letter.summary, "error": letter.error}
        letters.append(row)
    return {"dead_letters": letters}


def _target(ask: Ask) -> dict[str, Any]:
    # Error and args may contain private data of the job, so the target records only that they were given.
    hidden = ("error", "args")
    said = {name: name in hidden or plain(value) for name, value in ask.values.items() if name in (*_NAMES, *hidden)}
    return {**said, "queue": ask.queue()} if ask.queue() else said


async def _do(ask: Ask, conn: Conn, *, verb: str) -> Changed:
    which, most = _which(ask), ask.get("max_jobs", 10_000)
    if ask.get("dry_run"):
        await conn.execute("select set_config('statement_timeout', %s, true)", (READ_TIMEOUT,))
        return Changed({"dry_run": True, "matched": await aio.run(conn, filters.dead_count(which, most))})
    if verb == "retry":
        found = await aio.run(conn, filters.retry_dead(which, most))
        done = {"retried": found.retried, "refused": found.refused}
    else:
        done = {"dropped": await aio.run(conn, filters.drop_dead_many(which, most))}
    changed = done.get("retried") or done.get("dropped")
    return Changed({"dry_run": False, **done}, f"{verb}_dead" if changed else None, _target(ask), done)


_LETTER = record(
    "Args, summary and the last error; only for keys with the scope admin.",
    job="integer", died_at="instant", queue="string", task="string", reason="string", failures="integer", crashes="integer",
    attempt="integer", enqueued_at="instant", error_type="string?",
)  # fmt: skip


def _counted(**done: str) -> dict[str, Any]:
    either = [record(dry_run={"const": False}, **done), record(dry_run={"const": True}, matched="integer")]
    return {"type": "object", "oneOf": either}


OPERATIONS = (
    Operation(
        name="list_dead_letters", method="GET", path="/dead-letters", scope="read",
        about="List dead letters, newest first; for the next page, pass the last `died_at` and `job` as `before` and `before_id`.",
        in_query=(
            *_FILTER,
            fields.whole("before_id", "With `before`: its letters with smaller ids, too.", least=1, example=4711),
            fields.whole("max_jobs", "At most this many.", least=1, most=1000, default=50, example=50),
        ),
        codes=("queue",), newest=("died_at", "max_jobs"), answer=listed("dead_letters", _LETTER),
        example={"dead_letters": [{
            "job": 4711, "died_at": "2026-01-31T09:04:11Z", "queue": "mail", "task": "send_welcome", "reason": "failed",
            "failures": 5, "crashes": 0, "attempt": 5, "enqueued_at": "2026-01-31T09:00:00Z", "error_type": "TimeoutError",
        }]},
        reads=_list,
    ),
    Operation(
        name="retry_dead_letters", method="POST", path="/dead-letters/retry", scope="operate",
        about="Retry all matching dead letters; `refused` counts dead letters whose unique key belongs to a live job.",
        in_body=(*_FILTER, _ARGS, _MOST, _DRY), codes=("queue",),
        answer=_counted(retried="integer", refused="integer"), example={"dry_run": False, "retried": 12, "refused": 0},
        changes=partial(_do, verb="retry"),
    ),
    Operation(
        name="drop_dead_letters", method="POST", path="/dead-letters/drop", scope="operate",
        about="Delete all matching dead letters for good.",
        in_body=(*_FILTER, _ARGS, _MOST, _DRY), codes=("queue",),
        answer=_counted(dropped="integer"), example={"dry_run": True, "matched": 12}, changes=partial(_do, verb="drop"),
    ),
)  # fmt: skip
