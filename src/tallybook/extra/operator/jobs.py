"""Jobs: get one, explain why it does not run, enqueue, retry, cancel. Dead letters: list, retry, drop by filter."""

from collections import Counter
from functools import partial
from typing import Any, cast

from tallybook._app.jobs import REASONS, DeadWhich, dead_count, dead_oldest
from tallybook._db import calls
from tallybook._db.texts import instant
from tallybook._db.verb import run
from tallybook._model.job import JobCall
from tallybook._model.options import ON_CONFLICT, Options
from tallybook._model.payload import encode
from tallybook.errors import InvalidArgument
from tallybook.extra.dashboard.database import READ_TIMEOUT, Conn
from tallybook.extra.operator import fields
from tallybook.extra.operator.operations import Ask, Changed, Operation, Shape, listed, plain, record
from tallybook.extra.operator.problems import Problem

JOB = fields.whole("job", "The id of a job.", required=True, least=1, example=4711)

_DETAILS = (
    "args", "headers", "result", "reason", "last_error", "errors", "unique_key", "order_key", "summary",
    "progress_message", "options", "subject", "links",
)  # fmt: skip

_JOB = record(
    "Args, result, errors and the like; only for keys with the scope admin.",
    id=4711, queue="mail", task="send_welcome", state="dead", priority=2, attempt=5, attempts=5, failures=5, crashes=0,
    max_attempts=("integer?", None), enqueued_at="2026-01-31T09:00:00Z", run_at=("instant?", None),
    started_at=("instant?", "2026-01-31T09:04:10Z"), ended_at=("instant?", "2026-01-31T09:04:11Z"),
    expires_at=("instant?", None), worker_id=("integer?", 7), worker=("string?", "web-1"), unserved=False,
    progress=("number?", None), updated_at=("instant?", "2026-01-31T09:04:11Z"),
    last_attempt_at=("instant?", "2026-01-31T09:04:10Z"), died_of=("string?", "failed"),
)  # fmt: skip


async def _get(ask: Ask, conn: Conn) -> dict[str, Any]:
    found = await ask.app.get(ask["job"]).on(conn)
    ask.reach(found.queue)
    answer = {name: plain(getattr(found, name)) for name in _JOB.example if name != "died_of"}
    # A reason for a cancel is free text, so only these fixed words are shown to every key.
    answer["died_of"] = found.reason if found.state == "dead" and found.reason in REASONS else None
    if ask.admin:
        answer["details"] = {name: plain(getattr(found, name)) for name in _DETAILS}
    return answer


async def _why(ask: Ask, conn: Conn) -> dict[str, Any]:
    ask.reach((await ask.app.get(ask["job"]).on(conn)).queue)
    reasons = []
    for found in await ask.app.jobs.why(ask["job"]).on(conn):
        answer = {"state": found.state, "reason": found.reason, "explanation": found.explanation}
        if ask.admin:
            answer["details"] = plain(found.details)
        elif found.reason in _BARE or {"error", "message"} & set(found.details):
            answer["explanation"] = _BARE.get(found.reason, f"It is {found.reason}.")
        reasons.append(answer)
    return {"reasons": reasons}


# The full explanations of these contain an error's message or free text.
_BARE = {
    "dead": "It is dead: you can retry it.",
    "cancelled": "It was cancelled.",
    "cancel_pending": "It was cancelled, and will not start.",
    "cancelling": "It was cancelled while it ran: its worker is asked to stop it.",
    "retrying": "It has failed and runs again after its backoff.",
    "dropped": "It died, and its dead letter was dropped.",
}


_REASON = record(
    "Only for keys with the scope admin.", state=("string?", "dead"), reason="dead", explanation=_BARE["dead"]
)

_ENQUEUE = (
    fields.name("queue", "Its queue.", required=True, most=64, example="mail"),
    fields.name("task", "The task's name.", required=True, example="send_welcome"),
    fields.mapping("args", "Its args by parameter name.", example={"user_id": 42}),
    fields.instant("run_at", "Earliest start; not together with delay.", example="2030-01-31T09:00:00Z"),
    fields.duration("delay", "Time from now until the earliest start.", example="5 min"),
    fields.whole("priority", "Lower runs first; the default is 2.", most=32767, example=2),
    fields.whole("max_attempts", "Failures until the job is dead.", least=1, most=32767, example=5),
    fields.text("unique", "At most one live job of the task has this key.", most=512, example="welcome:42"),
    fields.choice(
        "on_conflict", "What to do with the job that has the unique key; push_run_at without a time makes it due now.",
        words=ON_CONFLICT, example="skip",
    ),
    fields.choice(
        "unique_while", "How long a job holds its key: running until it ends, queued until it starts.",
        words=("running", "queued"), example="running",
    ),
    fields.text("order_key", "Jobs with the same order key run one after another.", most=512, example="user:42"),
    fields.instant("expires_at", "No attempt starts after this time.", example="2030-02-28T09:00:00Z"),
    fields.mapping("headers", "Technical metadata, up to 8 KB.", example={"trace": "4711"}),
    fields.links("links", "Your rows that the job belongs to: kinds and keys, up to 10.", example={"user": 42}),
)  # fmt: skip


async def _enqueue(ask: Ask, conn: Conn) -> Changed:
    ask.reach(ask["queue"])
    apart = ("task", "args", "headers", "links")
    given = {field.name: ask.get(field.name) for field in _ENQUEUE if field.name not in apart}
    if given["on_conflict"] == "push_run_at" and given["run_at"] is None and given["delay"] is None:
        given["delay"] = "0 s"
    task, headers = ask["task"], dict(ask.get("headers", {}))
    if "links" in headers:
        raise Problem("invalid", "links is a field of its own, not a header")
    if "links" in ask.values:
        headers["links"] = ask["links"]
    given["headers"] = encode(headers, task=task, max_bytes=8_000, what="headers") if headers else None
    call = JobCall(task, encode(ask.get("args", {}), task=task), ask.get("unique"), Options().replaced(given))
    job = await run(conn, calls.enqueue(call))
    on_conflict = ask.get("on_conflict", "skip")
    if not job.created and on_conflict != "skip" and ask.key.queues is not None:
        # A unique key belongs to a task, so the changed job that holds it may be in any queue.
        ask.reach((await ask.app.get(job.id).on(conn)).queue)
    answer = {"job": job.id, "created": job.created}
    if not job.created and on_conflict == "skip":
        return Changed(answer)
    target = {"queue": ask["queue"], "task": task, "on_conflict": on_conflict}
    return Changed(answer, "enqueue", target, answer, 201 if job.created else 200)


async def _retry(ask: Ask, conn: Conn) -> Changed:
    if ask.key.queues is not None:
        ask.reach((await ask.app.get(ask["job"]).on(conn)).queue)
    try:
        attempt = await ask.app.retry(ask["job"]).on(conn)
    except InvalidArgument as error:
        raise Problem("conflict", str(error).removesuffix(".")) from error
    return Changed({"job": ask["job"], "attempt": attempt}, "retry", {"job": ask["job"]}, {"attempt": attempt})


async def _cancel(ask: Ask, conn: Conn) -> Changed:
    before = await ask.app.get(ask["job"]).on(conn)
    ask.reach(before.queue)
    state = await ask.app.cancel(ask["job"], ask.get("reason")).on(conn)
    answer = {"job": ask["job"], "state": state}
    if state not in ("cancelled", "cancelling") or before.state == "cancelled":
        return Changed(answer)
    return Changed(answer, "cancel", {"job": ask["job"]}, {"state": state})


_FILTER: tuple[fields.Field, ...] = (
    fields.name("queue", "In this queue.", most=64, example="mail"),
    fields.name("task", "Of this task.", example="send_welcome"),
    fields.choice("reason", "Dead for this reason.", words=REASONS, example="failed"),
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


def _which(ask: Ask) -> DeadWhich:
    which: Any = {field.name: ask.get(field.name) for field in (*_FILTER, _ARGS)} | {"queue": ask.queue()}
    return cast(DeadWhich, which)


async def _dead_letters(ask: Ask, conn: Conn) -> dict[str, Any]:
    verb = ask.app.dead.list(**_which(ask), max_jobs=ask.get("max_jobs", 50), before_id=ask.get("before_id"))
    letters = []
    for letter in await verb.on(conn):
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
        return Changed({"dry_run": True, "matched": await run(conn, dead_count(which, most))})
    found = await run(conn, dead_oldest(which, most))
    letters = [{"job": row.pop("job_id"), "died_at": plain(instant(row.pop("died_at"))), **row} for row in found]
    ids, do = sorted(letter["job"] for letter in letters), ask.app.jobs.retry if verb == "retry" else ask.app.jobs.drop
    said = Counter[str]()
    for at in range(0, len(ids), 1000):
        said.update(one.done for one in await do(ids[at : at + 1000]).on(conn))
    changed = said["retried"] + said["dropped"]
    done = {"retried": changed, "refused": len(ids) - changed} if verb == "retry" else {"dropped": changed}
    # Error and args may contain private data of the job, so the target records only that they were given.
    hidden = ("error", "args")
    target = {name: name in hidden or plain(value) for name, value in ask.values.items() if name in (*_NAMES, *hidden)}
    target |= {"queue": which["queue"]} if which["queue"] else {}
    return Changed({"dry_run": False, **done}, f"{verb}_dead" if changed else None, target, done, letters=letters)


_LETTER = record(
    "Args, summary and the last error; only for keys with the scope admin.",
    job=4711, died_at="2026-01-31T09:04:11Z", queue="mail", task="send_welcome", reason="failed", failures=5, crashes=0,
    attempt=5, enqueued_at="2026-01-31T09:00:00Z", error_type=("string?", "TimeoutError"),
)  # fmt: skip


def _counted(is_dry: bool, **done: int) -> Shape:
    """Return the shape of the answer, with an example of a dry run or of a change."""
    either = record(dry_run=({"const": False}, False), **done), record(dry_run=({"const": True}, True), matched=12)
    return Shape({"type": "object", "oneOf": [one.schema for one in either]}, either[is_dry].example)


OPERATIONS = (
    Operation(
        "get_job", "/jobs/{job}", "read", "Return one job in its current state.",
        in_path=(JOB,), codes=("unknown", "queue"), answer=_JOB, reads=_get,
    ),
    Operation(
        "why", "/jobs/{job}/why", "read", "Explain why a job is not running, or how it ended.",
        in_path=(JOB,), codes=("unknown", "queue"), answer=listed("reasons", _REASON), reads=_why,
    ),
    Operation(
        "enqueue", "/jobs", "enqueue", "Enqueue one job. If a live job already has the unique key, `created` is false.",
        in_body=_ENQUEUE, codes=("queue", "conflict"), created=True, answer=record(job=4712, created=True),
        changes=_enqueue,
    ),
    Operation(
        "retry_job", "/jobs/{job}/retry", "operate",
        "Retry a dead or cancelled job."
        " A job that was cancelled while scheduled or waiting returns to that state, unless its start time has"
        " come or the jobs that it waited for have ended in the meantime.",
        in_path=(JOB,), codes=("unknown", "queue", "conflict"), answer=record(job=4711, attempt=6), changes=_retry,
    ),
    Operation(
        "cancel_job", "/jobs/{job}/cancel", "operate",
        "Cancel a job or a dead letter. The response has the job's state: cancelled, cancelling (the job is still"
        " running), or, if the job can no longer be cancelled, its final state.",
        in_path=(JOB,), codes=("unknown", "queue"),
        in_body=(fields.text("reason", "Why.", most=500, example="the order was withdrawn"),),
        answer=record(job=4711, state="cancelled"), changes=_cancel,
    ),
    Operation(
        "list_dead_letters", "/dead-letters", "read",
        "List dead letters, newest first; for the next page, pass the last `died_at` and `job` as `before` and"
        " `before_id`.",
        in_query=(
            *_FILTER,
            fields.whole("before_id", "With `before`: its letters with smaller ids, too.", least=1, example=4711),
            fields.whole("max_jobs", "At most this many.", least=1, most=1000, default=50, example=50),
        ),
        codes=("queue",), newest=("died_at", "max_jobs"), answer=listed("dead_letters", _LETTER), reads=_dead_letters,
    ),
    Operation(
        "retry_dead_letters", "/dead-letters/retry", "operate",
        "Retry all matching dead letters; `refused` counts dead letters whose unique key belongs to a live job.",
        in_body=(*_FILTER, _ARGS, _ALL, _MOST, _DRY), codes=("queue",), answer=_counted(False, retried=12, refused=0),
        changes=partial(_do, verb="retry"),
    ),
    Operation(
        "drop_dead_letters", "/dead-letters/drop", "operate", "Delete all matching dead letters for good.",
        in_body=(*_FILTER, _ARGS, _ALL, _MOST, _DRY), codes=("queue",), answer=_counted(True, dropped=12),
        changes=partial(_do, verb="drop"),
    ),
)  # fmt: skip
