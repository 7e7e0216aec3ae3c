"""Dead letters: list, retry and drop by filter."""

from collections import Counter
from functools import partial
from typing import Any

from tallybook._db import filters, jobs
from tallybook._db.texts import instant
from tallybook._db.verb import run
from tallybook.extra.dashboard.database import READ_TIMEOUT, Conn
from tallybook.extra.operator import fields
from tallybook.extra.operator.operations import Ask, Changed, Operation, Shape, listed, plain, record
from tallybook.extra.operator.problems import Problem

_FILTER: tuple[fields.Field, ...] = (
    fields.name("queue", "In this queue.", most=64, example="mail"),
    fields.name("task", "Of this task.", example="send_welcome"),
    fields.choice("reason", "Dead for this reason.", words=filters.REASONS, example="failed"),
    fields.text(
        "error", "The last error's type or message contains this, ignoring case.", example="timeout", admin=True
    ),
    fields.instant("since", "Died at this time or later.", example="2026-01-31T09:00:00Z"),
    fields.instant("before", "Died before this time.", example="2026-02-01T00:00:00Z"),
)
_ARGS = fields.mapping("args", "Only if the args contain these.", example={"user_id": 42}, admin=True)
_ALL = fields.flag("all", "All dead letters that the key can access, instead of a filter.", example=True)
_MOST = fields.whole("max_jobs", "At most this many, oldest first.", least=1, most=10_000, default=10_000, example=1000)
_DRY = fields.flag("dry_run", "Only count the matches.", example=False)
_NAMES = ("queue", "task", "reason", "since", "before", "all")


def _which(ask: Ask) -> filters.DeadFilter:
    given = {name: ask.get(name) for name in (*(field.name for field in _FILTER), "args")}
    return filters.DeadFilter(**{**given, "queue": ask.queue()})


async def _list(ask: Ask, conn: Conn) -> dict[str, Any]:
    call = filters.dead_letters(_which(ask), ask.get("max_jobs", 50), ask.get("before_id"))
    letters = []
    for letter in await run(conn, call):
        row = {name: plain(getattr(letter, name)) for name in _LETTER.example if name != "error_type"}
        row["error_type"] = (letter.error or {}).get("type")
        if ask.admin:
            row["details"] = {"args": letter.args, "summary": letter.summary, "error": letter.error}
        letters.append(row)
    return {"dead_letters": letters}


async def _do(ask: Ask, conn: Conn, *, verb: str) -> Changed:
    filtered = any(field.name in ask.values for field in (*_FILTER, _ARGS))
    if filtered == ask.get("all", False):
        raise Problem("invalid", "pass filters, or all, but not both", hint="To change all of them, pass all: true")
    which, most = _which(ask), ask.get("max_jobs", 10_000)
    if ask.get("dry_run"):
        await conn.execute("select set_config('statement_timeout', %s, true)", (READ_TIMEOUT,))
        return Changed({"dry_run": True, "matched": await run(conn, filters.dead_count(which, most))})
    found = await run(conn, filters.dead_oldest(which, most))
    letters = [{"job": row.pop("job_id"), "died_at": plain(instant(row.pop("died_at"))), **row} for row in found]
    ids, call = sorted(letter["job"] for letter in letters), jobs.retry_jobs if verb == "retry" else jobs.drop_jobs
    said = Counter[str]()
    for at in range(0, len(ids), 1000):
        said.update(one.done for one in await run(conn, call(ids[at : at + 1000])))
    changed = said["retried"] + said["dropped"]
    done = {"retried": changed, "refused": len(ids) - changed} if verb == "retry" else {"dropped": changed}
    # Error and args may contain private data of the job, so the target records only that they were given.
    hidden = ("error", "args")
    target = {name: name in hidden or plain(value) for name, value in ask.values.items() if name in (*_NAMES, *hidden)}
    target |= {"queue": which.queue} if which.queue else {}
    return Changed({"dry_run": False, **done}, f"{verb}_dead" if changed else None, target, done, letters=letters)


_LETTER = record(
    "Args, summary and the last error; only for keys with the scope admin.",
    job=4711, died_at="2026-01-31T09:04:11Z", queue="mail", task="send_welcome", reason="failed", failures=5, crashes=0,
    attempt=5, enqueued_at="2026-01-31T09:00:00Z", error_type=("string?", "TimeoutError"),
)  # fmt: skip


def _counted(**done: int) -> tuple[Shape, Shape]:
    """Return the shape of the answer, with an example of a change, and with one of a dry run."""
    either = record(dry_run=({"const": False}, False), **done), record(dry_run=({"const": True}, True), matched=12)
    schema = {"type": "object", "oneOf": [one.schema for one in either]}
    return Shape(schema, either[0].example), Shape(schema, either[1].example)


OPERATIONS = (
    Operation(
        "list_dead_letters", "/dead-letters", "read",
        "List dead letters, newest first; for the next page, pass the last `died_at` and `job` as `before` and"
        " `before_id`.",
        in_query=(
            *_FILTER,
            fields.whole("before_id", "With `before`: its letters with smaller ids, too.", least=1, example=4711),
            fields.whole("max_jobs", "At most this many.", least=1, most=1000, default=50, example=50),
        ),
        codes=("queue",), newest=("died_at", "max_jobs"), answer=listed("dead_letters", _LETTER), reads=_list,
    ),
    Operation(
        "retry_dead_letters", "/dead-letters/retry", "operate",
        "Retry all matching dead letters; `refused` counts dead letters whose unique key belongs to a live job.",
        in_body=(*_FILTER, _ARGS, _ALL, _MOST, _DRY), codes=("queue",), answer=_counted(retried=12, refused=0)[0],
        changes=partial(_do, verb="retry"),
    ),
    Operation(
        "drop_dead_letters", "/dead-letters/drop", "operate", "Delete all matching dead letters for good.",
        in_body=(*_FILTER, _ARGS, _ALL, _MOST, _DRY), codes=("queue",), answer=_counted(dropped=12)[1],
        changes=partial(_do, verb="drop"),
    ),
)  # fmt: skip
