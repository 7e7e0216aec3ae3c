"""Workers and the audit."""

from typing import Any

from tallybook._db.declared import Call
from tallybook._db.texts import instant, loads
from tallybook._db.verb import run
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.operator import fields
from tallybook.extra.operator.operations import Ask, Operation, listed, plain, record

_LIVING = """\
select cast(coalesce(json_agg(w order by w.id), '[]') as text) from (
  select x.id, x.name, x.queues, x.tasks, x.started_at, nullif(x.seen_at, '-infinity') as seen_at
    from tallybook.workers as x
   where x.ended_at is null and (cast(%(queue)s as text) is null or cast(%(queue)s as text) = any (x.queues))
   order by x.id limit 1000) as w"""


async def _list(ask: Ask, conn: Conn) -> dict[str, Any]:
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

OPERATIONS = (
    Operation(
        "list_workers", "/workers", "read", "List the live workers, at most 1,000.",
        in_query=(fields.name("queue", "Only workers of this queue.", most=64, example="mail"),), codes=("queue",),
        answer=listed("workers", _WORKER), reads=_list,
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
