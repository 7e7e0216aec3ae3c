"""Queues and their workers: their lists; one queue with its settings, jobs and actions; one worker with its jobs."""

import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

from starlette.responses import RedirectResponse, Response

from tallybook._app.jobs import STATES
from tallybook._app.limits import CONCURRENCY, RATES
from tallybook._app.queues import QUEUES, truncate_batch
from tallybook._db import top
from tallybook._db.declared import Declared
from tallybook._db.verb import run
from tallybook._model.merged import summed
from tallybook.errors import InvalidArgument, UnknownQueue
from tallybook.extra.dashboard.database import Conn, rows
from tallybook.extra.dashboard.pages.overview import spans_of
from tallybook.extra.dashboard.texts import id_of
from tallybook.extra.dashboard.view import Act, Pages, Shared, View

pages = Pages()
_ORDERS = ("name", "available", "running", "scheduled", "dead", "oldest")
_PAGE = 100
_LONGEST = 20.0  # seconds in which a request may begin batches
# Without `oldest`, which is read from every line and therefore only for the queues of the page.
_ALL = """\
select s.queue, s.available, s.running, s.scheduled, s.retrying, s.waiting, s.dead, s.completed, s.unserved, s.paused_at
  from tallybook.queue_stats as s"""
_OLDEST = Declared("_oldest_of(p_queues text[]) -> rows (queue text, oldest timestamptz)")
_OLDEST_OF_ONE = Declared("_oldest(p_queue text) -> timestamptz")
_COUNTED = Declared("_counted_of(p_queue text) -> rows (what text, n bigint)")
_SUMS = ", ".join(
    f"cast(coalesce(sum(n.n) filter (where n.what = '{what}'), 0) as bigint) as {what}" for what in (*STATES, "failed")
)
# The row of the view queue_stats, without the counters of the other queues.
_STATS = f"""\
select q.name as queue, {_SUMS}, {_OLDEST_OF_ONE.called(p_queue="q.name")} as oldest, q.paused_at
  from tallybook.queues as q left join lateral {_COUNTED.called(p_queue="q.name")} as n on true
 where q.name = %s group by q.name, q.paused_at"""  # noqa: S608
_STATUS_OF = Declared("""
  _status_of(p_queue text)
  -> rows (task state text, jobs bigint, oldest newest timestamptz, average_attempts numeric)""")
_STATUS = f"{_STATUS_OF.worker} order by task, state limit 200"
_WORKERS = """\
select w.id, w.name, nullif(w.seen_at, '-infinity') as seen_at,
       w.seen_at < clock_timestamp() - w.lease as silent from tallybook.workers as w
 where w.ended_at is null and %s = any (w.queues) order by w.name limit 50"""


@pages.page("/queues")
async def queues(view: View) -> Response:
    part, order = view.asked("q").lower(), view.asked("order", "available")
    order = order if order in _ORDERS else "available"

    async def read(conn: Conn, node: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
        found = [one | {"node": node} for one in await rows(conn, _ALL) if part in one["queue"].lower()]
        return found, top.flow(await view.app.counts.throughput().on(conn)).of_queues

    by_name, rates = dict[str, dict[str, Any]](), Counter[str]()
    for of_node, more in (await view.ask(read)).values():
        for one in of_node:
            by_name[one["queue"]] = summed(by_name[one["queue"]], one) if one["queue"] in by_name else one
        rates.update(more)
    found = sorted(by_name.values(), key=lambda one: one["queue"])
    oldest = await _oldest(view, found) if order == "oldest" else {}
    if order == "oldest":
        found.sort(key=lambda one: (one["queue"] not in oldest, oldest.get(one["queue"], 0)))
    elif order != "name":
        found.sort(key=lambda one: -one[order])
    start = id_of(view.asked("from")) or 0
    page = found[start : start + _PAGE]
    if order != "oldest":
        oldest = await _oldest(view, page)
    return view.render(
        "queues.html", queues=page, all=len(found), start=start, size=_PAGE, part=view.asked("q"), order=order,
        rates=rates, oldest=oldest,
    )  # fmt: skip


async def _oldest(view: View, queues: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each queue with available jobs the time since which the next one could run."""
    names, first = [one["queue"] for one in queues if one["available"]], dict[str, Any]()
    found = await view.ask(lambda conn, _: rows(conn, _OLDEST.worker, names)) if names else {}
    for one in chain(*found.values()):
        first[one["queue"]] = min(one["oldest"], first.get(one["queue"], one["oldest"]))
    return first


@pages.page("/queue")
async def queue(view: View) -> Response:
    name = view.asked("name")
    by_node: list[dict[str, Any]] = []

    async def read(conn: Conn, node: str) -> list[dict[str, Any]]:
        return [one | {"node": node} for one in await rows(conn, _STATS, name)]

    if view.site.nodes.many and not view.asked("node"):
        by_node = list(chain(*(await view.ask(read)).values()))
    if by_node and (await view.at()).name not in [one["node"] for one in by_node]:
        return RedirectResponse(view.url("/queue", name=name, node=by_node[0]["node"]))
    async with view.read() as conn:
        found = await run(conn, QUEUES(name))
        if not found:
            raise UnknownQueue(name)
        stats = await rows(conn, _STATS, name)
        status = await rows(conn, _STATUS, name)
        workers = await rows(conn, _WORKERS, name)
        following = await view.app.queues.top(name, max_jobs=20).on(conn)
        timings = [one for one in await view.app.counts.timings().on(conn) if one.queue == name]
        rate = top.flow(await view.app.counts.throughput().on(conn)).of_queues.get(name, 0.0)
        limits = await run(conn, CONCURRENCY(f"queue:{name}"))
        paces = await run(conn, RATES(f"queue:{name}"))
    return view.render(
        "queue.html", queue=found[0], stats=stats[0] if stats else None, by_task=status, workers=workers,
        top=following, timings=timings, rate=rate, limits=limits, paces=paces, by_node=by_node, **spans_of(view),
    )  # fmt: skip


pages.form(
    "/queue/pause", "queue.pause", lambda app, name, who: app.queues.pause(name, by=who), "paused",
    ("Queue {} is paused.", "Queue {} was already paused."),
)  # fmt: skip
pages.form(
    "/queue/resume", "queue.resume", lambda app, name, who: app.queues.resume(name, by=who), "resumed",
    ("Queue {} runs again.", "Queue {} was not paused."),
)  # fmt: skip
pages.form(
    "/queue/drop", "queue.drop", lambda app, name, who: app.queues.drop(name, by=who), "dropped",
    ("Queue {} is dropped.", "There is no queue {}."), then="/queues",
)  # fmt: skip
pages.form(
    "/queue/set", "queue.set", lambda app, name, who, **said: app.queues.set(name, **said, by=who), "queue",
    ("The settings of queue {} are saved.",), retention=lambda act, field: act.form(field) or None,
    max_attempts=lambda act, field: act.whole(field) if act.form(field) else 0,
    notify=lambda act, field: act.form(field) == "on",
)  # fmt: skip


@pages.action("/queue/truncate", steps=True)
async def truncate(act: Act) -> str:
    """Cancel the jobs that have not started, and on request ask running ones to stop; no claim waits long."""
    name = act.form("name")
    if act.form("confirm") != name:
        raise InvalidArgument("To empty a queue, type its name. Nothing was changed.")
    running, began = act.form("running") == "on", time.monotonic()
    cancelled, cancelling, mark, remain = 0, 0, None, True
    while remain and time.monotonic() - began < _LONGEST:
        async with act.step() as conn:
            batch = await run(conn, truncate_batch(name, mark, running=running, by=act.user))
            found = {"cancelled": batch.done.cancelled, "cancelling": batch.done.cancelling}
            await act.audit("queue.truncate", {"queue": name, "running": running}, found, changed=any(found.values()))
        mark, remain = batch.mark, batch.remain
        cancelled, cancelling = cancelled + batch.done.cancelled, cancelling + batch.done.cancelling
    more = f", {cancelling:,} asked to stop" if running else ""
    rest = " More jobs are left: empty it again." if remain else ""
    return f"Queue {name}: {cancelled:,} jobs cancelled{more}.{rest}"


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
    shown = [one | {"node": node, "runs": running.get(one["id"], 0)} for one in alive]
    return shown, [one | {"node": node} for one in ended]


def _listed(found: Iterable[tuple[list[dict[str, Any]], list[dict[str, Any]]]]) -> dict[str, Any]:
    alive, ended = (list(chain(*lists)) for lists in zip(*found, strict=True))
    ended.sort(key=lambda one: one["ended_at"], reverse=True)
    return {"workers": alive[:_MOST], "more": len(alive) > _MOST, "ended": ended[:_ENDED]}


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
    found = await rows(conn, _ONE, id_of(number))
    if not found:
        return None
    runs = await rows(conn, _RUNNING, _RUNS, found[0]["id"]) if found[0]["ended_at"] is None else []
    return {"worker": found[0], "runs": runs, "most": _RUNS}
