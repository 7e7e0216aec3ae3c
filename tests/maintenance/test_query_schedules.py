"""Query-driven schedules: the results of their ticks, even if a query is slow, wrong or fired twice."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from support import ticking
from support.broken import without
from support.cli import run
from support.database import Connection, call, one
from support.hands import keys
from support.ticking import MINUTE, clocks
from support.workers import eventually, working
from tallybook import App, Context
from tallybook._maintenance import queries
from tallybook._maintenance.clock import Clock
from tallybook.errors import ConfigError, InvalidArgument

NOON = datetime(2999, 3, 1, 12, 0, 5, tzinfo=UTC)  # nothing is due yet for workers with their own clock
STALE = "select n as key, jsonb_build_object('n', n) as args from generate_series(1, 3) n"


def put(db: Connection, name: str, query: str, *, at: datetime = NOON, **more: Any) -> None:
    call(db, "schedule_set", **{"name": name, "task": "refresh", "cron": "* * * * *", "query": query, "at": at, **more})


async def tick(made: Clock, minutes: int = 1) -> int:
    """Run what is due this many minutes after noon."""
    return await made.run_queries(at=NOON + minutes * MINUTE)


def fires(db: Connection, name: str) -> list[tuple[Any, ...]]:
    """Return the outcomes of its ticks: minute, what, jobs."""
    return ticking.fires(db, name, "extract(minute from tick at time zone 'UTC')::int", "what", "jobs")


# --- S1-22, S1-23: the assets that users view -------------------------------------------------------------------------


async def test_stale_prices_are_refreshed_on_demand(db: Connection, dsn: str) -> None:
    """S1-21 S1-22 S1-23: qualifying assets are enqueued each minute, once while open; those unviewed for 48 h not."""
    qualifies = """
select 'price:' || a.id as key, jsonb_build_object('asset_id', a.id) as args
  from asset a
 where a.price_mode = 'api' and a.deleted_at is null and a.active
   and exists (select from holding h where h.asset_id = a.id and h.active)
   and (not exists (select from price p where p.asset_id = a.id)
        or a.viewed_at > now() - interval '48 h'
           and not exists (select from price p where p.asset_id = a.id and p.at > now() - interval '24 h'))
 order by a.viewed_at desc nulls last"""
    # Ids 1 to 3 qualify; each of the others lacks one thing.
    assets = """
insert into asset (id, price_mode, deleted_at, active, viewed_at) values
  (1, 'api', null, true, null),                            -- no price yet: viewed or not
  (2, 'api', null, true, now() - interval '1 h'),          -- an old price, and somebody looks
  (3, 'api', null, true, now() - interval '47 h 59 min'),
  (11, 'manual', null, true, now()), (12, 'api', now(), true, now()), (13, 'api', null, false, now()),
  (14, 'api', null, true, now()),                          -- nobody holds it
  (15, 'api', null, true, now()),                          -- the holding is closed
  (16, 'api', null, true, now()),                          -- a price of today
  (17, 'api', null, true, now() - interval '48 h 1 min'),  -- an old price, and nobody looks any more
  (18, 'api', null, true, null);
insert into holding select id, id <> 15 from asset where id <> 14;
insert into price select id, now() - interval '25 h' from asset where id > 1;
insert into price values (16, now() - interval '23 h 59 min');
"""
    tables = """
create table asset (id int primary key, price_mode text not null default 'api', deleted_at timestamptz,
  active boolean not null default true, viewed_at timestamptz);
create table holding (asset_id int not null references asset, active boolean not null default true);
create table price (asset_id int not null references asset, at timestamptz not null, primary key (asset_id, at));
"""
    db.execute(tables)
    db.execute(assets)
    app = App("sanchayam", dsn=dsn)
    refreshed: list[int] = []

    @app.task
    async def refresh(asset_id: int) -> None:
        refreshed.append(asset_id)
        db.execute("insert into price values (%s, now())", [asset_id])

    put(db, "stale-prices", qualifies)
    async with clocks(dsn, None) as (made,):
        assert [await tick(made, 1), await tick(made, 2)] == [3, 0]  # idempotent: all of them are still open
        assert keys(db) == ["price:2", "price:3", "price:1"]  # in the query's order
        assert (await app.drain()).completed == 3
        assert refreshed == [2, 3, 1]
        assert await tick(made, 3) == 0  # they have a price now
        db.execute("update price set at = at - interval '2 days'")
        assert await tick(made, 4) == 3 - 1 + 1  # the price of 16 is old now; nobody views 1
        assert keys(db, "state = 'available'") == ["price:16", "price:2", "price:3"]
        assert (await app.drain()).completed == 3
        db.execute(
            "update price set at = at - interval '2 days'; update asset set viewed_at = viewed_at - interval '2 days'"
        )
        assert await tick(made, 5) == 0  # volume follows demand
        db.execute("update asset set viewed_at = now() where id = 18")
        assert await tick(made, 6) == 1
    assert fires(db, "stale-prices") == [(n + 1, "enqueued", jobs) for n, jobs in enumerate([3, 0, 0, 3, 0, 1])]
    assert db.execute("select fired_count from tallybook.schedule").fetchone() == (6,)


# --- how it is fired --------------------------------------------------------------------------------------------------


async def test_jobs_know_their_schedule(db: Connection, dsn: str) -> None:
    """S2-16: jobs have the schedule's queue, priority, max_attempts and headers, and know it and their tick."""
    put(db, "stale", STALE, queue="q", priority=4, max_attempts=7, headers='{"team": "prices"}')
    async with clocks(dsn, None) as (made,):
        assert await tick(made) == 3
    rows = db.execute(
        "select distinct queue, task, priority, max_attempts, headers, options ->> 'schedule',"
        " (options ->> 'tick')::timestamptz from tallybook.job"
    ).fetchall()
    assert rows == [("q", "refresh", 4, 7, {"team": "prices"}, "stale", NOON.replace(second=0) + MINUTE)]


async def test_a_tick_is_fired_once_by_many(db: Connection, dsn: str) -> None:
    """S2-04: of several workers that start one tick at the same instant one fires it, even without keys."""
    put(db, "keyless", "select jsonb_build_object('n', n) as args from generate_series(1, 3) n")
    async with clocks(dsn, None, None, None) as (one, two, three):
        for minute in range(1, 6):
            assert sum(await asyncio.gather(*(tick(made, minute) for made in (one, two, three)))) == 3
            for made in (one, two, three):
                made.queries._not_before.clear()
    assert fires(db, "keyless") == [(minute, "enqueued", 3) for minute in range(1, 6)]
    assert db.execute("select count(*) from tallybook.job").fetchone() == (15,)


def fired_twice(db: Connection, name: str) -> list[Any]:
    """Let two workers say the same plan to fire a tick; return the answers."""
    plan = (
        "select json_build_object('name', name, 'revision', revision::text, 'tick', tick, 'late', '[]'::json,"
        " 'ticks', json_build_array(%s::timestamptz), 'next', %s::timestamptz, 'due', %s::timestamptz)::text"
        " from tallybook.schedule where name = %s"
    )
    said = one(db, plan, NOON, NOON + MINUTE, NOON + MINUTE, name)
    fire = "select carried, jobs from tallybook._schedule_fire_query(%s)"
    return [db.execute(fire, [said]).fetchone() for _ in range(2)]


async def test_a_plan_is_carried_out_once(db: Connection) -> None:
    """S2-04: a frozen worker, or one that lost its answer, fires nothing if it sends the same plan again."""
    put(db, "keyless", "select '{}'::jsonb as args")
    assert fired_twice(db, "keyless") == [(True, 1), (False, 0)]


@pytest.mark.parametrize(
    ("guards", "told"),
    [
        (["s.tick is not distinct from p.tick and s.paused_at is null"], (True, 0)),  # the tick is already a row
        (["s.tick is not distinct from p.tick and s.paused_at is null", "return found;"], (True, 1)),
    ],
)  # fmt: skip
async def test_control_a_plan_that_is_said_twice(db: Connection, guards: list[str], told: tuple[bool, int]) -> None:
    """Negative control: without the check of the tick the fire's row decides; without both it fires twice."""
    for guard in guards:
        if guard.startswith("s."):
            without(db, "_schedule_query_begin", guard, "true")
        else:
            without(db, "_schedule_query_tick", guard, "return true;")
    put(db, "keyless", "select '{}'::jsonb as args")
    assert fired_twice(db, "keyless") == [(True, 1), told]


async def test_missed_ticks_fire_once(db: Connection, dsn: str) -> None:
    """After a downtime only the latest missed tick fires, since the query finds all due rows anyway."""
    put(db, "stale", STALE)
    async with clocks(dsn, None) as (made,):
        assert await made.run_queries(at=NOON + timedelta(hours=2, seconds=-6)) == 3
    assert [(what, jobs) for _, what, jobs in fires(db, "stale")] == [("missed", None), ("enqueued", 3)]


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_a_wrong_query_stops_nobody(db: Connection, dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """S2-16: a failing query is recorded with its message, tick by tick, counted and logged; the others fire."""
    db.execute("create table asset (id int)")
    put(db, "a wrong one", "select id as key, '{}'::jsonb as args from asset")
    put(db, "a right one", STALE)
    put(db, "divides", "select 1 / (n - 2) as key, '{}'::jsonb as args from generate_series(1, 3) n")
    db.execute("drop table asset")
    async with clocks(dsn, None) as (made,):
        assert [await tick(made, 1), await tick(made, 2)] == [3, 0]
        assert fires(db, "a wrong one") == [(1, "failed", None), (2, "failed", None)]
        assert fires(db, "a right one") == [(1, "enqueued", 3), (2, "enqueued", 0)]
        assert "schedule 'a wrong one': its query failed" in caplog.text
        db.execute("create table asset (id int); insert into asset values (9)")
        assert await tick(made, 3) == 1
    reasons = [
        row[0] for row in db.execute("select reason from tallybook.fire where tick = %s order by schedule",
                                     [NOON.replace(second=0) + MINUTE])
    ]  # fmt: skip
    assert reasons == [None, 'the query is refused: relation "asset" does not exist', "division by zero"]
    counts = db.execute("select name, fired_count, failed_count from tallybook.schedule order by name").fetchall()
    assert counts == [("a right one", 3, 0), ("a wrong one", 1, 2), ("divides", 0, 3)]


async def test_nothing_of_a_failed_tick_stays(db: Connection, dsn: str) -> None:
    """A query that fails after thousands of rows enqueues none of them."""
    put(db, "half", "select n as key, jsonb_build_object('n', 1 / (n - 5500)) as args from generate_series(1, 6000) n")
    async with clocks(dsn, None) as (made,):
        assert await tick(made) == 0
    assert fires(db, "half") == [(1, "failed", None)]
    assert db.execute("select count(*) from tallybook.unique_key").fetchone() == (0,)


async def test_a_query_has_a_time_limit(db: Connection, dsn: str) -> None:
    """A query that takes too long is cancelled and recorded as failed; its schedule continues with the next tick."""
    put(db, "endless", "select 'a' as key, jsonb_build_object('s', pg_sleep(60)::text) as args")
    async with clocks(dsn, None) as (made,):
        made.queries._longest = 0.2
        assert await tick(made) == 0
    assert fires(db, "endless") == [(1, "failed", None)]
    row = db.execute("select reason, (select due_at from tallybook.schedule) from tallybook.fire").fetchone()
    assert row == ("canceling statement due to statement timeout", NOON.replace(second=0) + 2 * MINUTE)


@pytest.mark.direct("terminates a session")
async def test_a_lost_connection_is_no_fate(db: Connection, dsn: str, connect: Callable[..., Connection]) -> None:
    """A session terminated in the middle leaves its tick unfired; a later look fires it."""
    held = hold(db, connect)
    async with clocks(dsn, None) as (made,):
        (running,) = await made.start_queries(at=NOON + MINUTE)
        await eventually(lambda: waiting(db), "the query waits for the table")
        db.execute(
            "select pg_terminate_backend(pid) from pg_locks where not granted and relation = 'slow'::regclass"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        assert await running == 0
        held.rollback()
        assert fires(db, "slow") == []
        assert await tick(made) == 0  # not at once
        made.queries._not_before.clear()
        assert await tick(made) == 1
    assert fires(db, "slow") == [(1, "enqueued", 1)]


# --- slow queries --------------------------------------------------------------------------------------------------


def hold(db: Connection, connect: Callable[..., Connection]) -> Connection:
    """Put the schedule `slow`, whose query waits until the returned transaction ends."""
    db.execute("create table slow as select 'slow' as key, '{\"n\": 9}'::jsonb as args")
    put(db, "slow", "select * from slow")
    held = connect(autocommit=False)
    held.execute("lock table slow")
    return held


def waiting(db: Connection) -> bool:
    return one(
        db,
        "select exists (select from pg_locks where not granted and relation = 'slow'::regclass"
        " and database = (select oid from pg_database where datname = current_database()))",
    )


LOCKS = pytest.mark.direct("watches which session waits")


@pytest.mark.slow
@LOCKS
async def test_a_slow_query_delays_nobody(db: Connection, dsn: str, connect: Callable[..., Connection]) -> None:
    """S1-21: while a query hangs, a worker fires its other schedules, query-driven and plain, and runs their jobs."""
    held = hold(db, connect)
    db.execute("update tallybook.schedule set due_at = now(), tick = null, since = now() - interval '2 min'")
    app = App("shop", dsn=dsn)
    told: list[tuple[str | None, int]] = []

    @app.task
    async def refresh(ctx: Context, n: int) -> None:
        told.append((ctx.schedule, n))

    app.schedule("plain", refresh.job(0), every="1 s")
    app.schedule("quick", refresh, query="select 1 as key, '{\"n\": 1}'::jsonb as args", every="1 s")
    async with working(app, dsn):
        await eventually(lambda: waiting(db), "the query waits for the table")
        before = len(told)
        await eventually(lambda: {("plain", 0), ("quick", 1)} <= set(told[before:]), "the others fire on")
        assert waiting(db)
        assert fires(db, "slow") == []
        held.rollback()
        await eventually(lambda: "enqueued" in [what for _, what, _ in fires(db, "slow")], "the slow one is fired")


@LOCKS
async def test_control_one_at_a_time(
    db: Connection, dsn: str, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with one query at a time the other schedule, though due, is not even started."""
    monkeypatch.setattr(queries, "AT_ONCE", 1)
    held = hold(db, connect)
    put(db, "quick", STALE)
    async with clocks(dsn, None) as (made,):
        (first,) = await made.start_queries(at=NOON + MINUTE)
        await eventually(lambda: waiting(db), "the query waits for the table")
        assert await made.start_queries(at=NOON + MINUTE) == []
        held.rollback()
        assert await first == 1
        assert await tick(made) == 3


@LOCKS
async def test_a_slow_query_is_left_to_who_runs_it(
    db: Connection, dsn: str, connect: Callable[..., Connection]
) -> None:
    """S2-04: another worker neither waits for a running query nor runs it, too, and fires what else is due."""
    held = hold(db, connect)
    async with clocks(dsn, None, None) as (one, two):
        (running,) = await one.start_queries(at=NOON + MINUTE)
        await eventually(lambda: waiting(db), "the query waits for the table")
        put(db, "quick", STALE)
        assert await tick(two) == 3
        held.rollback()
        assert await running == 1
    assert fires(db, "slow") == [(1, "enqueued", 1)]


@LOCKS
async def test_a_slow_query_does_not_stop_people(db: Connection, dsn: str, connect: Callable[..., Connection]) -> None:
    """While its query runs, a schedule can be paused, and stays paused; run now is skipped as an overlap."""
    held = hold(db, connect)
    db.execute("set lock_timeout = '2 s'")
    async with clocks(dsn, None) as (made,):
        (running,) = await made.start_queries(at=NOON + MINUTE)
        await eventually(lambda: waiting(db), "the query waits for the table")
        assert db.execute("select what, reason from tallybook.schedule_run('slow')").fetchone() == (
            "skipped",
            "overlap",
        )
        assert db.execute("select tallybook.schedule_pause('slow')").fetchone() == (True,)
        held.rollback()
        assert await running == 1
        state = db.execute(
            "select paused_at is not null, due_at, fired_count, skipped_count from tallybook.schedule"
        ).fetchone()
        assert state == (True, None, 1, 1)


@LOCKS
async def test_a_stop_takes_a_query_back(db: Connection, dsn: str, connect: Callable[..., Connection]) -> None:
    """A worker that stops during a query cancels it: the tick stays due, and nothing waits in the server."""
    held = hold(db, connect)
    async with clocks(dsn, None) as (made,):
        await made.start_queries(at=NOON + MINUTE)
        await eventually(lambda: waiting(db), "the query waits for the table")
    await eventually(lambda: not waiting(db), "nothing waits")
    held.rollback()
    assert fires(db, "slow") == []
    async with clocks(dsn, None) as (made,):
        assert await tick(made) == 1


@LOCKS
async def test_drain_keeps_its_limit(db: Connection, dsn: str, connect: Callable[..., Connection]) -> None:
    """A drain that meets a slow query ends at its limit: the query is cancelled, and its tick stays due."""
    held = hold(db, connect)
    db.execute("update tallybook.schedule set due_at = now() - interval '1 s', since = now() - interval '1 min'")
    app = App("shop", dsn=dsn)
    async with asyncio.timeout(20):
        await app.drain(max_seconds=0.5)
    await eventually(lambda: not waiting(db), "nothing waits")
    assert fires(db, "slow") == []
    held.rollback()
    await app.drain()
    assert "enqueued" in [what for _, what, _ in fires(db, "slow")]


# --- declared in code, or kept in the database ------------------------------------------------------------------------


async def test_declared_in_code(db: Connection, dsn: str) -> None:
    """S2-11: app.schedule with a task and a query is registered at a worker's start, with its options and version."""
    app = App("shop", dsn=dsn)

    @app.task(queue="prices", version=2)
    async def refresh(n: int) -> None: ...

    refresh.upgrade(1)(lambda args: args)
    app.schedule("stale", refresh.with_(priority=7), query=f"\n{STALE}\n", cron="* * * * *")
    async with working(app, dsn, {"prices": 2}):
        await eventually(lambda: db.execute("select from tallybook.schedule").fetchone() is not None, "it is on record")
    (found,) = await app.schedules.list()
    assert (found.source, found.query, found.queue, found.priority, found.args) == ("code", STALE, "prices", 7, {})
    fired = await app.schedules.run("stale")
    assert (fired.what, fired.jobs, fired.job_id) == ("enqueued", 3, None)
    assert db.execute("select distinct options -> 'version' from tallybook.job").fetchall() == [(2,)]
    assert (await app.schedules.run("stale")).jobs == 0
    assert len(await app.schedules.next("stale", 3)) == 3


async def test_put_from_python(db: Connection, dsn: str) -> None:
    """schedules.set takes a task and a query, on any connection; a changed query is changed in place."""
    app = App("shop", dsn=dsn)

    @app.task
    async def refresh(n: int) -> None: ...

    assert await app.schedules.set("stale", refresh, query=STALE, every="10 min") == "created"
    assert app.schedules.set("stale", refresh, query=STALE, every="10 min").sync(db) == "unchanged"
    assert app.schedules.set("stale", refresh, query=STALE + " limit 2", every="10 min").sync(db) == "changed"
    assert app.schedules.run("stale").sync(db).jobs == 2
    with pytest.raises(InvalidArgument, match="kye"):
        app.schedules.set("stale", refresh, query="select 1 as kye, '{}'::jsonb as args", every="10 min").sync(db)


async def test_what_is_no_query_schedule_is_refused() -> None:
    """A job instead of a task, no query, a blank one, a derived key, a delay: errors that name the mistake."""
    app = App("shop")

    @app.task(unique=("n",))
    async def refresh(n: int) -> None: ...

    with pytest.raises(InvalidArgument, match="not a task"):
        app.schedule("x", refresh.job(1), query=STALE, cron="* * * * *")
    with pytest.raises(InvalidArgument, match="not a job"):
        app.schedule("x", refresh, cron="* * * * *")
    with pytest.raises(ConfigError, match="unique"):
        app.schedule("x", refresh, query=STALE, cron="* * * * *")
    with pytest.raises(ConfigError, match="query"):
        app.schedule("x", refresh.with_(unique=False), query="  ", cron="* * * * *")
    with pytest.raises(ConfigError, match="delay"):
        app.schedule("x", refresh.with_(unique=False, delay="5 min"), query=STALE, cron="* * * * *")
    app.schedule("x", refresh.with_(unique=False), query=STALE, cron="* * * * *")


def test_the_server_refuses_it_when_it_is_put(db: Connection) -> None:
    """A query that is no SELECT, or that has args, is refused at once; one that only the worker may read is not."""
    for query, args in (("delete from tallybook.fire returning '{}'::jsonb as args", "{}"), (STALE, '{"n": 1}')):
        with pytest.raises(psycopg.Error) as caught:
            put(db, "x", query, args=args)
        assert caught.value.sqlstate == "TB005"
    assert db.execute("select count(*) from tallybook.schedule").fetchone() == (0,)
    db.execute("create table secret as select '{}'::jsonb as args")
    with db.transaction(force_rollback=True):
        db.execute(
            "create role clerk; grant usage on schema tallybook to clerk; grant all on tallybook.schedule to clerk"
        )
        db.execute("set local role clerk")
        put(db, "x", "select args from secret")


def test_on_the_command_line(db: Connection, dsn: str) -> None:
    """`tallybook schedule set --query`, show, run, next, list: the same schedule."""

    said = partial(run, "schedule", dsn=dsn)

    assert "is created; next at" in said("set", "stale", "refresh", "--query", STALE, "--cron", "* * * * *")
    assert STALE in said("show", "stale")
    assert said("run", "stale") == "3 jobs\n"
    assert said("run", "stale") == "0 jobs\n"
    assert len(json.loads(said("next", "stale", "-n", "4", "--json"))) == 4
    assert "stale" in said("list")
    words = ("set", "x", "refresh", "--query", STALE, "--args", '{"n": 1}', "--every", "1 min")
    assert "remove --args" in said(*words, code=2)
    assert "multi-query" in said("set", "x", "refresh", "--query", "select 1; select 2", "--every", "1 min", code=1)
