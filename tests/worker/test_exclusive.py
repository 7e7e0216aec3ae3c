"""`exclusive=` of a task: one job runs at a time on real workers, however enqueued; the second waits or is skipped."""

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any, TypedDict

import pytest

from support.broken import without
from support.workers import Jobs, eventually, working
from tallybook import App, Context
from tallybook.errors import ConfigError
from tallybook.testing import travel

TAKEN = 'skipped: the permits of the limit "task:report" are taken'
WAITS = 'the permits of the limit "task:report" are taken'


@pytest.mark.parametrize(
    ("guard", "states", "reason"),
    [
        ({"exclusive": True}, {"running": 1, "waiting": 2}, WAITS),
        ({"exclusive": True, "on_busy": "skip"}, {"running": 1, "cancelled": 2}, TAKEN),
        ({}, {"running": 3}, None),
    ],
    ids=["wait", "skip", "control"],
)
async def test_one_runs_whatever_puts_it_in(
    app: App, dsn: str, db: Any, jobs: Jobs, guard: Any, states: dict[str, int], reason: str | None
) -> None:
    """S2-02 S2-13 S2-14: of jobs from a tick, a user and code, two workers run one; control: without the guard all."""
    gate, running = asyncio.Event(), Counter[str]()

    @app.task(schedule="0 4 1 1 *", overlap=True, **guard)
    async def report() -> None:
        running["now"] += 1
        running["most"] = max(running["most"], running["now"])
        await gate.wait()
        running["now"] -= 1

    async with working(app, dsn, {"default": 5}), working(app, dsn, {"default": 5}):
        await eventually(lambda: [one.tick for one in app.schedules.list().sync(db) if one.tick], "its tick is planned")
        first = report.enqueue_sync(db).id
        await eventually(lambda: running["now"] == 1, "the first runs")
        put = [first, app.schedules.run("report").sync(db).job_id]
        travel(dsn, timedelta(days=366))
        fired = "select job_id from tallybook.fire where schedule = 'report' and job_id <> %s"
        put.append((await eventually(lambda: db.execute(fired, [put[1]]).fetchone(), "the tick"))[0])
        await eventually(lambda: Counter(jobs(job).state for job in put) == states, f"{states}")
        assert {jobs(job).reason for job in put[1:]} == {reason}
        await eventually(lambda: running["now"] == states["running"], "those that may run do")
        gate.set()
        ends = Counter(info.state for info in await jobs.ends(*put))
    assert ends == ({"completed": 1, "cancelled": 2} if "on_busy" in guard else {"completed": 3})
    assert running["most"] == states["running"]


async def test_a_key_is_exclusive_by_itself(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-14: with a key one job per key runs, even if `with_` names other limits; a skipped job counts no failure."""
    gate, began = asyncio.Event(), list[str]()
    app.concurrency_limit("disk", 10)

    @app.task(exclusive="{tenant}", on_busy="skip")
    async def export(tenant: str) -> None:
        began.append(tenant)
        await gate.wait()

    async with working(app, dsn, {"default": 5}) as worker:
        first, other = export.enqueue_sync(db, "a"), export.enqueue_sync(db, "b")
        await eventually(lambda: sorted(began) == ["a", "b"], "one of each key runs")
        second = export.with_(limits=("disk",)).enqueue_sync(db, "a")
        info = await jobs.becomes(second, "cancelled")
        gate.set()
        assert {info.state for info in await jobs.ends(first, other)} == {"completed"}
        assert [info.state for info in await jobs.ends(export.enqueue_sync(db, "a"))] == ["completed"]
        assert worker.finisher.counts["cancelled"] == 1
    assert (info.failures, info.reason) == (0, 'skipped: the permits of the limit "exclusive export:a" are taken')


async def test_a_handler_that_asks_itself_is_skipped(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-14: ctx.limit of a limit that skips ends the attempt as cancelled if the permit is taken."""
    db.execute("select tallybook.concurrency_limit_set('door', 1, skips => true)")
    gate, began = asyncio.Event(), list[str]()

    @app.task
    async def enter(ctx: Context, name: str) -> None:
        await ctx.limit("door")
        began.append(name)
        await gate.wait()

    async with working(app, dsn, {"default": 5}) as worker:
        first = enter.enqueue_sync(db, "first")
        await eventually(lambda: began, "the first is in")
        info = await jobs.becomes(enter.enqueue_sync(db, "second"), "cancelled")
        gate.set()
        assert [one.state for one in await jobs.ends(first)] == ["completed"]
    assert (began, info.failures, worker.finisher.counts["refused"]) == (["first"], 0, 0)


@pytest.mark.parametrize("broken", [False, True], ids=["", "control"])
def test_a_job_does_not_skip_itself(db: Any, broken: bool) -> None:
    """S2-14: if a worker asks again after a lost answer, the job waits for its own permit; control: it is cancelled."""
    if broken:
        without(db, "_limit_skips", "h.xid = p_job.xid", "false")
    db.execute("select tallybook.concurrency_limit_set('task:t', 1, skips => true), tallybook.enqueue('q', 't')")
    db.execute("select tallybook.worker_start('w', '{q}')")
    lease = db.execute("select gen_random_uuid()").fetchone()[0]
    db.execute("select tallybook.claim((select max(id) from tallybook.worker), '{q}', '{1}', %s)", [lease])
    ask = """\
select a.verdict, a.said
  from tallybook.claimed_jobs(%s) c, tallybook.admit(array[%s], array[c.job_id], array[c.attempt], '{limit}') a"""
    assert db.execute(ask, [lease, lease]).fetchone() == ("start", None)
    db.execute(ask, [lease, lease])
    assert db.execute("select state from tallybook.job").fetchone() == ("cancelled" if broken else "waiting",)


def test_a_person_changes_the_number_and_not_what_becomes_of_the_second(db: Any) -> None:
    """S2-14: a changed limit keeps whether it skips; setting the same again is no change."""
    limit = "select tallybook.concurrency_limit_set('task:t', %s, skips => %s)"
    said = [
        db.execute(limit, given).fetchone()[0] for given in ((1, True), (1, None), (2, None), (2, True), (2, False))
    ]
    assert said == ["created", "unchanged", "changed", "unchanged", "changed"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_busy": "skip"}, "the task is not exclusive. Pass exclusive=True as well"),
        ({"exclusive": True, "on_busy": "stop"}, "must be wait or skip"),
        ({"exclusive": ""}, "must have 1 to 150 bytes"),
        ({"exclusive": 1}, "not a text"),
        ({"exclusive": "{n}", "name": "a:b"}, "the task's name 'a:b' has a colon"),
        ({"exclusive": "{m}"}, "task 'report' has no argument 'm'. It has n"),
    ],
)
def test_a_wrong_guard_is_refused(app: App, options: Any, words: str) -> None:
    """S2-14: an invalid option is an error when the task is declared."""
    with pytest.raises(ConfigError, match=words):

        @app.task(**options)
        async def report(n: int = 0) -> None: ...


def test_an_exclusive_task_may_take_a_class_that_comes_later_in_its_module(app: App) -> None:
    """Declaring a task resolves no annotation, with exclusive=True as without."""
    source = """
from __future__ import annotations

@app.task(exclusive=True)
async def report(order: Order) -> None: ...

class Order(TypedDict):
    number: int
"""
    module: dict[str, Any] = {"app": app, "TypedDict": TypedDict}
    exec(source, module)  # noqa: S102
    assert module["report"].args.names == {"order"}


def test_a_query_gives_no_key(app: App) -> None:
    """S2-14: a query's rows would be enqueued without their key, so a schedule of such a task is refused."""

    @app.task(exclusive="{n}")
    async def report(n: int) -> None: ...

    with pytest.raises(ConfigError, match="it cannot be filled from the args of the query's rows"):
        report.with_().job_of_rows()
