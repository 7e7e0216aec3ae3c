"""One worker process for several nodes, in the test's own loop: shared slots, divided limits, nodes that are down."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy.orm import Session

from support.database import UNREACHABLE
from support.fleet import Fleet as Nodes
from support.fleet import renumber
from support.fleet_app import TABLES
from support.fleet_app import app as shop
from support.proxy import Proxy
from support.samples import parsed, value
from support.workers import QUICK, ask, eventually, living, quick
from tallybook import App, Context
from tallybook._db import nodes as _nodes
from tallybook._db.node_changes import retire
from tallybook._worker.entry import run_worker
from tallybook._worker.life import fleet as _fleet
from tallybook._worker.life.fleet import Fleet
from tallybook._worker.life.stopping import WorkerReport
from tallybook._worker.settings import WorkerSettings, parse_queues
from tallybook.errors import ConfigError

NAMES = ("north", "south", "west")
COMPLETED = "select count(*) from tallybook.job where state = 'completed'"
SCHEDULES = "select name from tallybook.schedules"
WAITS = """\
select pid from pg_stat_activity
 where datname = current_database() and wait_event_type = 'Lock' and query like '%from tallybook.nodes n%'"""
LIMITS = "select name, most from tallybook.limit_rule"


@asynccontextmanager
async def serving(
    app: App, dsn: str, which: str = "all", queues: Any = None, **options: Any
) -> AsyncIterator[tuple[Fleet, list[WorkerReport]]]:
    """Run a fleet's worker for the block, then stop it and append its report to the list."""
    worker, reports = Fleet(app, dsn, which, quick(queues, **options)), []
    async with living(worker, worker.stopping) as life:
        yield worker, reports
    reports.append(life.result())


def at_work(worker: Fleet) -> list[str]:
    """Return the nodes where it is registered."""
    return [name for name, life in worker.lives.items() if life.worker is not None and life.worker._id()]


async def on_record(worker: Fleet, *names: str) -> None:
    await eventually(lambda: set(names) <= set(at_work(worker)), f"it is at work on {names}")


async def all_ended(nodes: Nodes, counts: dict[int, int]) -> None:
    await eventually(lambda: {n: nodes.run(n, COMPLETED)[0][0] for n in counts} == counts, f"completed: {counts}")


async def test_the_jobs_of_all_nodes_run(fleet: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """One process runs each node's jobs in transactions there, opens its lifespans once, and reports by node."""
    caplog.set_level("INFO")
    for number in (1, 2, 3):
        fleet.run(number, TABLES)
        for _ in range(number):
            fleet.enqueue(number, task="note")
    async with serving(shop, fleet.dsn) as (_, reports):
        await all_ended(fleet, {1: 1, 2: 2, 3: 3})
    (report,) = reports
    assert report.completed == 6
    assert {name: found.completed for name, found in report.nodes.items()} == dict(zip(NAMES, (1, 2, 3), strict=True))
    for number, name in enumerate(NAMES, 1):
        rows = fleet.run(number, "select job_id >> 43, opened, node from ran")
        assert {(at, node) for at, _, node in rows} == {(number, name)}
        assert len({opened for _, opened, _ in rows}) == 1


async def test_a_handler_stays_on_the_node_of_its_job(fleet: Nodes) -> None:
    """Jobs that a handler enqueues by the App go to its job's node, as do its child's writes, which knows the home."""
    for number in (1, 2, 3):
        fleet.run(number, TABLES)
    fleet.enqueue(2, task="relay")
    fleet.enqueue(3, task="outside")
    async with serving(shop, fleet.dsn):
        await all_ended(fleet, {1: 0, 2: 2, 3: 1})
    assert fleet.run(2, "select node from ran") == [("south",)]
    assert fleet.run(3, "select node from ran") == [("west,north",)]


async def test_a_handler_reads_the_providers_of_its_node(fleet: Nodes, app: App) -> None:
    """Async and plain handlers get a provider's settings from their job's node."""
    for name, dsn in zip(NAMES, fleet.dsns, strict=True):
        await App("shop", dsn=dsn).providers.set("acme", kind="mail", settings={"of": name})
    found: set[tuple[str, str | None, str]] = set()

    @app.task
    async def awaited(ctx: Context) -> None:
        found.add(("awaited", ctx.node, (await ctx.providers.get("acme")).settings["of"]))

    @app.task
    def plain(ctx: Context) -> None:
        found.add(("plain", ctx.node, ctx.providers.get_sync("acme").settings["of"]))

    for number in (1, 2, 3):
        for task in ("awaited", "plain"):
            fleet.enqueue(number, task=task)
    async with serving(app, fleet.dsn):
        await all_ended(fleet, {1: 2, 2: 2, 3: 2})
    assert found == {(task, name, name) for task in ("awaited", "plain") for name in NAMES}


async def test_a_handler_has_the_nodes_schedules_and_jobs_of_a_program_outside(fleet: Nodes, app: App) -> None:
    """A handler on another node gets the pins, the list, the home's schedules and other nodes' jobs, as elsewhere."""
    fleet.run(1, "select tallybook.node_pin('tenant:7', 'west')")
    other = fleet.enqueue(3, "later")
    found: list[Any] = []

    @app.task
    async def look(ctx: Context) -> None:
        seen = [(await app.nodes.of("tenant:7")).name, *(node.name for node in await app.nodes.list())]
        await app.schedules.set("daily", look.job(), cron="@daily")
        found.append((seen, (await app.get(other)).id, (await app.jobs.cancel([other]))[0].done))

    @app.task
    def plain(ctx: Context) -> None:
        found.append(app.nodes.of("tenant:7").sync().name)

    fleet.enqueue(2, task="look")
    fleet.enqueue(2, task="plain")
    async with serving(app, fleet.dsn):
        await all_ended(fleet, {2: 2})
    assert sorted(found, key=str) == [(["west", *NAMES], other, "cancelled"), "west"]
    assert fleet.each(SCHEDULES) == [[("daily",)], [], []]


async def test_slots_are_shared_and_never_exceeded(fleet: Nodes, app: App) -> None:
    """With more jobs on each node than slots in total, running handlers never exceed the slots, and no node starves."""
    now, most, ran = 0, 0, Counter[str]()

    @app.task
    async def busy(ctx: Context) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        ran[str(ctx.node)] += 1

    counts = {1: 200, 2: 40, 3: 40}
    for number, jobs in counts.items():
        fleet.run(number, "select tallybook.enqueue('default', 'busy', '{}') from generate_series(1, %s)", jobs)
    async with serving(app, fleet.dsn, queues="default=4"):
        await eventually(lambda: min(ran[name] for name in ("south", "west")) >= 20, "others have their turn")
        assert ran["north"] < 160, "the node with endless work took nearly all turns"
        await all_ended(fleet, counts)
    assert most == 4


async def test_a_node_that_is_down_holds_up_nobody(fleet: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that cannot be reached at the start delays neither the other nodes nor the stop."""
    monkeypatch.setenv("TALLYBOOK_NODES", f"away={UNREACHABLE}\nnorth={fleet.dsns[0]}\nsouth={fleet.dsns[1]}")
    for number in (1, 2):
        fleet.run(number, TABLES)
        fleet.enqueue(number, task="note")
    async with serving(shop, UNREACHABLE) as (worker, reports):
        await all_ended(fleet, {1: 1, 2: 1})
        assert sorted(at_work(worker)) == ["north", "south"]
        stopped = time.monotonic()
    assert time.monotonic() - stopped < 10
    assert reports[0].completed == 2 and reports[0].nodes["away"].completed == 0


async def test_a_node_without_the_schema_is_tried_again(
    fleet: Nodes, empty_dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that refuses its worker is logged and tried again, while the others work."""
    from psycopg import connect

    from tallybook._db.migrate import migrate

    caplog.set_level("INFO")
    monkeypatch.setattr(_fleet, "AGAIN", 0.2)
    monkeypatch.setenv("TALLYBOOK_NODES", f"north={fleet.dsn}\nnew={empty_dsn}")
    fleet.run(1, TABLES)
    async with serving(shop, fleet.dsn) as (worker, _):
        await on_record(worker, "north")
        refused = "Run `tallybook migrate --nodes new`; trying this node again"
        await eventually(lambda: refused in caplog.text, "the new node is refused")
        with connect(empty_dsn) as conn:
            migrate(conn, node=7)
        await on_record(worker, "north", "new")


async def test_where_all_nodes_refuse_the_worker_it_ends(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch, app: App, note: Any
) -> None:
    """If every node refuses the worker, and none ever accepted it, the first error is raised."""
    monkeypatch.setenv("TALLYBOOK_NODES", f"one={empty_dsn}")
    with pytest.raises(Exception, match="tallybook migrate"):
        await run_worker(app, dsn=empty_dsn, nodes="all", **QUICK)


async def test_some_nodes_may_be_chosen(fleet: Nodes) -> None:
    """A worker of named nodes serves only these."""
    for number in (1, 2, 3):
        fleet.run(number, TABLES)
        fleet.enqueue(number, task="note")
    async with serving(shop, fleet.dsn, "west, south") as (worker, _):
        await all_ended(fleet, {2: 1, 3: 1})
        assert sorted(at_work(worker)) == ["south", "west"]
    assert fleet.run(1, COMPLETED) == [(0,)]


async def test_schedules_of_the_code_are_on_the_home(
    fleet: Nodes, app: App, note: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Schedules in code are registered on the home only; when it is retired, they move to the next node."""
    caplog.set_level("INFO")
    monkeypatch.setattr(_fleet, "AGAIN", 0.2)
    app.schedule("daily", note.job(1), cron="@daily")
    async with serving(app, fleet.dsn) as (worker, _):
        await on_record(worker, *NAMES)
        await eventually(lambda: fleet.each(SCHEDULES) == [[("daily",)], [], []], "the home has it")
        assert "schedules of the code are on north" in caplog.text
        fleet.run(1, "select tallybook.node_retire('north')")
        await eventually(lambda: fleet.each(SCHEDULES) == [[], [("daily",)], []], "the next one has it, and it alone")
        assert "schedules of the code are on south" in caplog.text


async def test_a_pause_moves_with_the_home(fleet: Nodes, app: App, note: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule in code that is paused on the home is paused on the next one, even if workers read the list first."""
    monkeypatch.setattr(_fleet, "AGAIN", 0.1)
    app.schedule("daily", note.job(1), cron="@daily")
    async with serving(app, fleet.dsn) as (worker, _):
        await on_record(worker, *NAMES)
        await eventually(lambda: fleet.run(1, SCHEDULES) == [("daily",)], "the home has it")
        fleet.run(1, "select tallybook.schedule_pause('daily', 'ann')")
        fleet.run(1, "select tallybook.node_retire('north')")
        await eventually(lambda: fleet.run(2, SCHEDULES) == [("daily",)], "the next one has it from its worker")
        assert (await asyncio.to_thread(retire, fleet.dsn, "north")).schedules == 1
    assert fleet.each(SCHEDULES) == [[], [("daily",)], []]
    assert fleet.run(2, "select paused_by, due_at from tallybook.schedule") == [("ann", None)]


async def test_nodes_that_come_and_go_are_served_or_not(fleet: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node added to the list gets a worker, a removed one loses it, and the process is not restarted."""
    monkeypatch.setattr(_fleet, "AGAIN", 0.2)
    for number in (1, 2, 3):
        fleet.run(number, TABLES)
    fleet.run(1, "select tallybook.node_remove('west')")
    async with serving(shop, fleet.dsn) as (worker, reports):
        await on_record(worker, "north", "south")
        fleet.add("west", fleet.dsns[2], 3)
        await on_record(worker, *NAMES)
        fleet.enqueue(3, task="note")
        await all_ended(fleet, {3: 1})
        fleet.run(1, "select tallybook.node_remove('west')")
        await eventually(lambda: "west" not in worker.lives, "west is not served any more")
    assert reports[0].nodes["west"].completed == 1


async def test_a_named_node_that_is_removed_is_served_no_longer(
    fleet: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker of named nodes leaves one that is removed, with one log line, and takes it back when it is added."""
    caplog.set_level("INFO")
    monkeypatch.setattr(_fleet, "AGAIN", 0.1)
    async with serving(shop, fleet.dsn, "north,south") as (worker, _):
        await on_record(worker, "north", "south")
        fleet.run(1, "select tallybook.node_remove('south')")
        await eventually(lambda: "south" not in worker.lives, "south is not served any more")
        fleet.add("south", fleet.dsns[1], 2)
        await on_record(worker, "north", "south")
    assert caplog.text.count("node south is no longer served") == 1
    assert "cannot be used" not in caplog.text


async def test_a_node_that_is_soon_back_is_served_again(fleet: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is back in the list by the next reading gets a new worker: that of before has stopped."""
    monkeypatch.setattr(_fleet, "AGAIN", 0.3)
    async with serving(shop, fleet.dsn) as (worker, _):
        await on_record(worker, *NAMES)
        before = worker.lives["west"]
        fleet.run(1, "select tallybook.node_remove('west')")
        await eventually(before.stopping.is_set, "west is not served any more")
        fleet.add("west", fleet.dsns[2], 3)
        await eventually(lambda: worker.lives.get("west") not in (None, before), "west has a new worker")
        await on_record(worker, *NAMES)


async def test_a_node_with_the_number_of_another_is_not_served(
    fleet: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a clone of a node is added to the list of a running worker, the worker keeps the former list and warns."""
    monkeypatch.setattr(_fleet, "AGAIN", 0.1)
    with fleet.connect(3) as conn:
        renumber(conn, 2)
    listed = f"north={fleet.dsns[0]}\nsouth={fleet.dsns[1]}"
    monkeypatch.setenv("TALLYBOOK_NODES", listed)
    async with serving(shop, fleet.dsn) as (worker, _):
        await on_record(worker, "north", "south")
        monkeypatch.setenv("TALLYBOOK_NODES", f"{listed}\nclone={fleet.dsns[2]}")
        await eventually(lambda: "'south' and 'clone' both have it" in caplog.text, "the worker warns")
        assert sorted(at_work(worker)) == ["north", "south"] == sorted(worker.lives)


async def test_an_address_of_another_node_is_refused(
    fleet: Nodes, app: App, note: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A node whose address leads to another node's database has no worker, so the schedules there stay."""
    fleet.add("south", fleet.dsns[0], 2)
    app.schedule("daily", note.job(1), cron="@daily")
    async with serving(app, fleet.dsn) as (worker, _):
        await on_record(worker, "north", "west")
        await eventually(lambda: "number of a node: 2: the database" in caplog.text, "south is refused")
        await eventually(lambda: fleet.each(SCHEDULES) == [[("daily",)], [], []], "the home has it")
        assert sorted(at_work(worker)) == ["north", "west"]


@pytest.mark.parametrize("at_work", [True, False])
async def test_a_stop_does_not_wait_for_the_list_of_nodes(
    fleet: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_work: bool
) -> None:
    """A stop ends a worker that reads the list from a silent database, at its start or later, without a warning."""
    monkeypatch.setattr(_fleet, "AGAIN", 0.1)
    monkeypatch.setattr(_nodes, "ANSWER", 600.0)
    lock = "lock table tallybook.node"
    with fleet.connect(1) as conn, conn.transaction():
        if not at_work:
            conn.execute(lock)
        async with serving(shop, fleet.dsn) as (worker, reports):
            if at_work:
                await on_record(worker, *NAMES)
                conn.execute(lock)
            await eventually(lambda: fleet.run(1, WAITS), "it reads the list")
    assert len(reports) == 1
    assert "cannot be used" not in caplog.text


def test_each_look_reads_the_list_of_nodes_once(fleet: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node added during the look is served from the next one on; with two readings its worker had no shares."""
    growing = iter([fleet.nodes[:2], fleet.nodes])
    monkeypatch.setattr("tallybook._db.nodes.written", lambda dsn: next(growing))
    worker = Fleet(shop, fleet.dsn, "all", WorkerSettings(queues=parse_queues(None)))
    every, served = worker._look()
    assert every == served


async def test_limits_of_the_code_are_divided(
    fleet: Nodes, app: App, note: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit is divided among the nodes, the remainder to the first, unless it is per_node; again when one goes."""
    caplog.set_level("INFO")
    monkeypatch.setattr(_fleet, "AGAIN", 0.2)
    app.rate_limit("provider", 10, per="1 min")
    app.concurrency_limit("customer", 5)
    app.concurrency_limit("tenant", 2, per_node=True)
    async with serving(app, fleet.dsn) as (worker, _):
        await on_record(worker, *NAMES)
        shares = [(4, 2), (3, 2), (3, 1)]
        assert [dict(rows) for rows in fleet.each(LIMITS)] == [
            {"provider": p, "customer": c, "tenant": 2} for p, c in shares
        ]
        assert "limit 'provider' of 10 is divided among the nodes: north 4, south 3, west 3" in caplog.text
        fleet.run(1, "select tallybook.node_remove('west')")
        there = [{"provider": 5, "customer": c, "tenant": 2} for c in (3, 2)]
        await eventually(lambda: [dict(fleet.run(n, LIMITS)) for n in (1, 2)] == there, "two have what three had")


async def test_a_limit_below_the_number_of_nodes_is_refused(fleet: Nodes, app: App, note: Any) -> None:
    """A worker and a drain do not start if a limit is too small to be divided."""
    app.concurrency_limit("one", 1)
    with pytest.raises(ConfigError, match=r"concurrency limit 'one'.*cannot be divided among 3 nodes"):
        await run_worker(app, dsn=fleet.dsn, nodes="all", **QUICK)
    with pytest.raises(ConfigError, match="cannot be divided"):
        await app.drain(dsn=fleet.dsn, nodes="all")


async def test_a_node_too_many_for_a_limit_is_not_served(
    fleet: Nodes, app: App, note: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a node is added that a limit has no share for, a running worker keeps its list and shares, and warns."""
    monkeypatch.setattr(_fleet, "AGAIN", 0.1)
    app.concurrency_limit("two", 2)
    fleet.run(1, "select tallybook.node_remove('west')")
    async with serving(app, fleet.dsn) as (worker, _):
        await on_record(worker, "north", "south")
        fleet.add("west", fleet.dsns[2], 3)
        warning = "the list of nodes cannot be used, so the former one stays: concurrency limit 'two': 2"
        await eventually(lambda: warning in caplog.text, "the worker warns")
        assert sorted(worker.lives) == ["north", "south"]
    assert fleet.each(LIMITS) == [[("two", 1)], [("two", 1)], []]


async def test_what_leads_to_one_node_only_is_refused(fleet: Nodes, app: App, note: Any) -> None:
    """A direct DSN, or an atomic task with the program's own sessions, is refused for several nodes."""
    with pytest.raises(ConfigError, match="leads to one node only"):
        await run_worker(app, dsn=fleet.dsn, nodes="all", direct_dsn=fleet.dsn)
    own = App("own", session=lambda: None)

    @own.task(atomic=True)
    def write(tx: Session) -> None: ...

    with pytest.raises(ConfigError, match="begun by the program"):
        await run_worker(own, dsn=fleet.dsn, nodes="all")


async def test_one_port_shows_all_nodes(fleet: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One port has the metrics of all nodes with the label `node`; an absent node has up 0; the process is ready."""
    monkeypatch.setenv("TALLYBOOK_NODES", f"north={fleet.dsns[0]}\nsouth={fleet.dsns[1]}\naway={UNREACHABLE}")
    for number in (1, 2):
        fleet.run(number, TABLES)
        fleet.enqueue(number, task="note")
    async with serving(shop, fleet.dsn, queues="default=4", metrics_port=0) as (worker, _):
        await all_ended(fleet, {1: 1, 2: 1})
        assert worker.telemetry is not None
        status, text = await asyncio.to_thread(ask, worker.telemetry.port, "/metrics")
        ready, _ = await asyncio.to_thread(ask, worker.telemetry.port, "/readyz")
    assert (status, ready) == (200, 200)
    found = parsed(text)
    up = {node: value(found, "tallybook_up", node=node) for node in ("north", "south", "away")}
    assert up == {"north": 1, "south": 1, "away": 0}
    assert value(found, "tallybook_worker_slots", queue="default") == 4
    assert value(found, "tallybook_worker_jobs_claimed_total", node="south") == 1
    assert value(found, "tallybook_worker_ready", node="away") == 0


@pytest.fixture
def drained(app: App, fleet: Nodes) -> Callable[..., Awaitable[Any]]:
    @app.task
    async def t() -> None: ...

    for number in (1, 2, 3):
        fleet.enqueue(number)
    return lambda **options: app.drain(dsn=fleet.dsn, nodes="all", **options)


async def test_a_drain_runs_what_is_due_on_all_nodes(drained: Any, fleet: Nodes) -> None:
    """A drain over nodes runs the due jobs of all and adds up the counts."""
    report = await drained()
    assert (report.processed, report.completed, report.unreachable) == (3, 3, ())
    assert fleet.each(COMPLETED) == [[(1,)]] * 3


async def test_a_drain_has_its_limit_over_all_nodes(drained: Any) -> None:
    """max_jobs is the limit of all nodes together."""
    assert (await drained(max_jobs=2)).processed == 2
    assert (await drained()).processed == 1


@pytest.mark.parametrize("schema", [None, 0, "older"])
async def test_a_drain_leaves_out_a_node_that_does_not_answer(
    drained: Any, fleet: Nodes, empty_dsn: str, monkeypatch: pytest.MonkeyPatch, schema: Any
) -> None:
    """A node that does not answer, or has no schema or an older one, is reported, and the others are drained."""
    away = {None: UNREACHABLE, 0: empty_dsn, "older": fleet.dsns[2]}[schema]
    fleet.run(3, "update tallybook.installation set version = 0")
    monkeypatch.setenv("TALLYBOOK_NODES", f"away={away}\nsouth={fleet.dsns[1]}")
    report = await drained()
    assert (report.processed, report.unreachable) == (1, ("away",))


@pytest.mark.parametrize("away", ["south", "west"])
async def test_a_drain_leaves_out_a_node_that_goes_away_meanwhile(
    fleet: Nodes, app: App, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    """A node lost before its turn, or in it until the limit, is reported; the others' jobs run and are counted."""
    proxied = NAMES.index(away)
    with Proxy(fleet.dsns[proxied]) as proxy:
        dsns = [*fleet.dsns[:proxied], proxy.dsn, *fleet.dsns[proxied + 1 :]]
        monkeypatch.setenv("TALLYBOOK_NODES", "\n".join(map("=".join, zip(NAMES, dsns, strict=True))))

        @app.task
        async def t(ctx: Context) -> None:
            proxy.accepts = proxy.accepted + (away == "west")

        for number in (1, 2, 3):
            fleet.enqueue(number)
        report = await app.drain(dsn=fleet.dsn, nodes="all", max_seconds=None if away == "south" else 3.0)
    assert (report.processed, report.unreachable) == (2, (away,))
