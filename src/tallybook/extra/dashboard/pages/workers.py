"""Workers: the live ones and those that ended last, live; one worker with its running jobs."""

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

from starlette.responses import Response

from tallybook._db import top
from tallybook.extra.dashboard.database import Conn, rows
from tallybook.extra.dashboard.view import Pages, Shared, View

pages = Pages()

_MOST = 200
_ENDED = 50
_RUNS = 500
# A stopped worker has seen_at = -infinity, so that other workers take its jobs at once.
_COLUMNS = """\
w.id, w.name, w.queues, cardinality(w.tasks) as tasks, w.lease, w.started_at,
nullif(w.seen_at, '-infinity') as seen_at, w.gone_at, w.ended_at, w.slots, w.version,
extract(epoch from w.lag)::float8 as lag, w.memory,
w.ended_at is null and w.seen_at < clock_timestamp() - w.lease as silent"""
_ALIVE = f"select {_COLUMNS} from tallybook.workers as w where w.ended_at is null order by w.id limit %s"  # noqa: S608
_OVER = f"""\
select {_COLUMNS} from tallybook.workers as w where w.ended_at is not null order by w.id desc limit %s"""  # noqa: S608
_ONE = f"select {_COLUMNS}, w.tasks as names from tallybook.workers as w where w.id = %s"  # noqa: S608
_RUNNING = top.RUNNING.select("job_id, attempt, queue, task, started_at")


async def _of(conn: Conn, node: str, runs: dict[str, top.Runs]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the live workers and those that ended last. `runs` has the running jobs by node, as last read."""
    alive = await rows(conn, _ALIVE, _MOST + 1)
    ended = await rows(conn, _OVER, _ENDED)
    runs[node] = await top.runs_async(conn, runs.get(node))
    running = runs[node].of_workers
    shown = [with_slots(one) | {"node": node, "runs": running.get(one["id"], 0)} for one in alive]
    return shown, [one | {"node": node} for one in ended]


def _listed(found: Iterable[tuple[list[dict[str, Any]], list[dict[str, Any]]]]) -> dict[str, Any]:
    alive, ended = (list(chain(*lists)) for lists in zip(*found, strict=True))
    ended.sort(key=lambda one: one["ended_at"], reverse=True)
    return {"workers": alive[:_MOST], "more": len(alive) > _MOST, "ended": ended[:_ENDED]}


def with_slots(one: dict[str, Any]) -> dict[str, Any]:
    """Add the slots by queue, None for a worker that does not report them, and their total."""
    slots = one["slots"]
    by_queue = list(zip(one["queues"], slots or [None] * len(one["queues"]), strict=False))
    return one | {"by_queue": by_queue, "total": None if slots is None else sum(slots)}


def topics(site: Shared) -> None:
    of = partial(_of, runs={})

    async def fragment(only: str) -> str:
        found, _ = await site.nodes.answered(of, only)
        return site.fragment("workers_live.html", only, **_listed(found.values()))

    async def one(conn: Conn, which: str) -> str | None:
        number, _, node = which.partition("@")
        found = await _worker(conn, number)
        return None if found is None else site.fragment("worker_live.html", node, **found)

    site.live.over("workers", fragment)
    site.live.topic("worker", one, lambda which: site.nodes.named(which.partition("@")[2]))


@pages.page("/workers")
async def workers(view: View) -> Response:
    found = await view.ask(partial(_of, runs={}))
    return view.render("workers.html", **_listed(found.values()))


@pages.page("/worker")
async def worker(view: View) -> Response:
    async with view.read() as conn:
        found = await _worker(conn, view.asked("id"))
    if found is None:
        return view.refused(404, f"There is no worker {view.asked('id')[:20]!r}.")
    return view.render("worker.html", **found)


async def _worker(conn: Conn, number: str) -> dict[str, Any] | None:
    if not (number.isascii() and number.isdecimal() and len(number) < 10):
        return None
    found = await rows(conn, _ONE, int(number))
    if not found:
        return None
    runs = await rows(conn, _RUNNING, _RUNS, int(number)) if found[0]["ended_at"] is None else []
    return {"worker": with_slots(found[0]), "runs": runs, "most": _RUNS}
