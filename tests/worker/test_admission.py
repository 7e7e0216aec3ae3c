"""Jobs that must not start yet: an open transaction changes them, or a job of their key or exclusive task runs."""

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any, TypedDict

import pytest

from support.broken import without
from support.database import Connect
from support.hands import put
from support.workers import Jobs, eventually, given_up, working
from tallybook import App, Context
from tallybook._db.ends import UNCLAIM
from tallybook._task.task import job_of_rows
from tallybook.errors import ConfigError
from tallybook.testing import travel

REPLACE: dict[str, Any] = {"task": "note", "unique_key": "k", "on_conflict": "replace_args"}


@pytest.fixture
def ran(app: App) -> list[tuple[int, int]]:
    """Each run of the task `note`: its job and its arg."""
    runs = []

    @app.task
    async def note(ctx: Context, n: int = 0) -> None:
        runs.append((ctx.job_id, n))

    return runs


async def test_a_held_job_starts_with_the_new_args(
    app: App, dsn: str, db: Any, connect: Connect, ran: list[Any], jobs: Jobs
) -> None:
    """S1-07: its batch starts without it; after the producer's commit it runs once, with the new args."""
    job = put(db, **{**REPLACE, "args": {"n": 1}})
    producer = connect(autocommit=False)
    put(producer, **{**REPLACE, "args": {"n": 2}})
    others = [put(db, task="note", args={"n": 7}) for _ in range(2)]
    async with working(app, dsn, "q") as worker:
        await jobs.ends(*others)
        assert worker.claimer.admission.waiting == 1
        producer.commit()
        await jobs.ends(job)
    assert sorted(ran) == sorted([(job, 2), *((other, 7) for other in others)])


async def test_a_worker_that_stops_gives_held_jobs_back(
    app: App, dsn: str, db: Any, connect: Connect, ran: list[Any], jobs: Jobs
) -> None:
    """P9: its stop does not wait for the producer, and the next worker runs the job with the new args."""
    job = put(db, **{**REPLACE, "args": {"n": 1}})
    producer = connect(autocommit=False)
    put(producer, **{**REPLACE, "args": {"n": 2}})
    async with working(app, dsn, "q") as worker:
        await eventually(lambda: worker.claimer.admission.waiting, "it is held")
    assert jobs(job).state == "available"
    producer.commit()
    async with working(app, dsn, "q"):
        await jobs.ends(job)
    assert ran == [(job, 2)]


async def test_a_worker_that_was_given_up_starts_no_held_job(
    app: App, dsn: str, db: Any, connect: Connect, ran: list[Any], jobs: Jobs
) -> None:
    """P5: its held job is given up; it returns with all its slots, and its watermark advances."""
    job = put(db, **{**REPLACE, "args": {"n": 1}})
    producer = connect(autocommit=False)
    put(producer, **{**REPLACE, "args": {"n": 2}})
    async with working(app, dsn, "q=3") as worker:
        await eventually(lambda: worker.claimer.admission.waiting, "it is held")
        first = worker.heartbeat.worker_id if worker.heartbeat else 0
        await given_up(db, first)
        await eventually(lambda: worker.heartbeat and worker.heartbeat.worker_id != first, "it is back")
        await eventually(lambda: worker.claimer.admission.waiting, "it has claimed the job again")
        assert worker.book.free["q"] == 2
        assert len(worker.book.leases) == 1
        producer.commit()
        await jobs.ends(job)
        await eventually(lambda: worker.book.free["q"] == 3 and not worker.book.leases, "nothing is open")
    assert ran == [(job, 2)]
    assert jobs(job).attempt == 2


async def test_one_of_a_key_runs_at_a_time(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Two workers with many slots run them in order; the waiting ones hold no slot."""
    ran, running, together, go_on = list[int](), list[int](), list[tuple[int, ...]](), asyncio.Event()

    @app.task(name="hold")
    async def hold(ctx: Context) -> None:
        ran.append(ctx.job_id)
        running.append(ctx.job_id)
        together.append(tuple(running))
        await go_on.wait()
        running.remove(ctx.job_id)

    ids = [put(db, task="hold", order_key="k") for _ in range(5)]
    async with working(app, dsn, "q=10") as one, working(app, dsn, "q=10") as two:
        await eventually(lambda: running, "the first runs")
        await jobs.becomes(ids[-1], "waiting")
        await eventually(lambda: one.book.free["q"] + two.book.free["q"] == 19, "the others hold no slot")
        go_on.set()
        await jobs.ends(*ids)
    assert ran == ids
    assert {len(those) for those in together} == {1}


async def test_an_open_transaction_behind_a_key_costs_no_slot(
    app: App, dsn: str, db: Any, connect: Connect, ran: list[Any], jobs: Jobs
) -> None:
    """While an open transaction holds a key's lock, the key's jobs are set aside after a moment, and others run."""
    somebody = connect(autocommit=False)
    somebody.execute("select pg_advisory_xact_lock(1413565448, hashtext('k'))")
    ordered = [put(db, task="note", order_key="k") for _ in range(2)]
    async with working(app, dsn, "q=2"):
        await jobs.becomes(ordered[0], "waiting")
        other = put(db, task="note", order_key="another")
        await jobs.ends(other)
        somebody.commit()
        await jobs.ends(*ordered)
    assert [job for job, _ in ran] == [other, *ordered]


async def test_a_drain_does_not_wait_for_a_producer(
    app: App, dsn: str, db: Any, connect: Connect, ran: list[Any], jobs: Jobs
) -> None:
    """A drain ends without the held job, counts only what it ran, and runs all jobs of an order key."""
    job = put(db, **{**REPLACE, "args": {"n": 1}})
    producer = connect(autocommit=False)
    put(producer, **{**REPLACE, "args": {"n": 2}})
    line = [put(db, task="note", order_key="k") for _ in range(3)]
    async with asyncio.timeout(30):
        report = await app.drain(dsn=dsn, queues="q")
    assert (report.processed, report.completed) == (3, 3)
    assert [job for job, _ in ran] == line
    assert jobs(job).state == "available"


async def test_max_jobs_counts_jobs_that_had_to_wait_for_their_turn(
    app: App, dsn: str, db: Any, ran: list[Any]
) -> None:
    """A drain of two runs two, though jobs with an order key start later than they are claimed."""
    for n in range(4):
        put(db, task="note", order_key=f"k{n}")
    report = await app.drain(dsn=dsn, queues="q", max_jobs=2)
    assert (report.completed, len(ran)) == (2, 2)


async def test_an_expired_job_is_not_started(app: App, dsn: str, db: Any, ran: list[Any], jobs: Jobs) -> None:
    """It is dead with the reason expired, and its key's next job runs."""

    def _past(db: Any) -> Any:
        return db.execute("select clock_timestamp() - interval '1 s'").fetchone()[0]

    late = put(db, task="note", order_key="k", expires_at=_past(db))
    next_one = put(db, task="note", order_key="k")
    async with working(app, dsn, "q", poll=timedelta(milliseconds=50)):
        await jobs.ends(late, next_one)
    assert (jobs(late).state, jobs(late).reason) == ("dead", "expired")
    assert [job for job, _ in ran] == [next_one]


async def test_a_job_whose_claim_was_undone_frees_its_slot_once(
    app: App, dsn: str, db: Any, ran: list[Any], jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is claimed again before the first question about it is answered: it runs once and has one slot."""
    async with working(app, dsn, "q=3") as worker:
        admission, questions, go_on = worker.claimer.admission, [], asyncio.Event()
        ask = admission._ask

        async def first_is_slow(name: str, params: Any) -> Any:
            questions.append(name)
            if len(questions) == 1:
                await go_on.wait()
            return await ask(name, params)

        monkeypatch.setattr(admission, "_ask", first_is_slow)
        job = put(db, task="note", order_key="k")
        await eventually(lambda: questions, "it is in the admission")
        lease = admission._waiting[job].lease.lease
        db.execute(UNCLAIM.worker, (lease, job, 1, timedelta(0)))  # as if a crash of the server had undone the claim
        worker.claimer.wake()
        await jobs.ends(job)
        go_on.set()
        await eventually(lambda: not admission._looks and not worker.book.leases, "the first question is answered")
        assert worker.book.free["q"] == 3
    assert ran == [(job, 0)]


@pytest.mark.parametrize(
    ("guard", "states", "begins"),
    [
        ({"exclusive": True}, {"running": 1, "waiting": 2}, ""),
        ({"exclusive": True, "on_busy": "skip"}, {"running": 1, "cancelled": 2}, "skipped: "),
        ({}, {"running": 3}, None),
    ],
    ids=["wait", "skip", "control"],
)
async def test_one_runs_whatever_puts_it_in(
    app: App, dsn: str, db: Any, jobs: Jobs, guard: Any, states: dict[str, int], begins: str | None
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
        taken = None if begins is None else f'{begins}the permits of the limit "task:report" are taken'
        assert {jobs(job).reason for job in put[1:]} == {taken}
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
        job_of_rows(report.with_())
