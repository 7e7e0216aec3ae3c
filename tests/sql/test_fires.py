"""The fire of a tick in SQL: the guards that let one clock fire it, stale plans, and query plans of the clock."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg.types.json import Jsonb

from support.broken import without
from support.hands import Hands
from support.sessions import rows_read
from support.ticking import NOON, STEP, fires, one, put

COMPARED = " and s.tick is not distinct from p.tick"


def planned(db: Any, name: str, at: datetime, *ticks: datetime, following: datetime | None = None, **more: Any) -> str:
    """Return what a clock that runs now would plan for one schedule."""
    revision, tick = one(db, "select revision::text, tick from tallybook.schedule where name = %s", name)
    due = (following or at + STEP).isoformat()
    said = {"name": name, "revision": revision, "tick": tick and tick.isoformat(), "next": due, "due": due, "late": []}
    return json.dumps([said | {"ticks": [tick.isoformat() for tick in ticks]} | more])


def fire(db: Any, plans: str, at: datetime) -> Any:
    return one(db, "select carried, fired, skipped, missed, failed from tallybook._schedules_fire(%s, %s)", plans, at)


@pytest.fixture
def due(db: Any) -> str:
    """A schedule that may overlap and has a due tick, and the plan that every clock has computed for it."""
    put(db, "s", at=NOON, overlap=True)
    fire(db, planned(db, "s", NOON, following=NOON + STEP), NOON)
    return planned(db, "s", NOON + STEP, NOON + STEP)


def fired_by_many(connect: Any, plans: str) -> int:
    """Return how often eight clocks with the same plan fire a tick, all at once and then each once more."""
    ready = threading.Barrier(8)

    def clock(n: int) -> int:
        conn = connect()
        ready.wait()
        return sum(fire(conn, plans, NOON + STEP)[1] for _ in range(2))

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(clock, range(8)))


@pytest.mark.parametrize("missing", ["nothing", "the primary key", "the comparison"])
def test_a_tick_is_fired_once(db: Any, connect: Any, due: str, missing: str) -> None:
    """S2-04: eight clocks with one plan fire once: the key of fire and the row's tick are each enough alone."""
    if missing == "the primary key":
        db.execute("alter table tallybook.fire drop constraint fire_pkey")
    elif missing == "the comparison":
        without(db, "_schedules_fire", COMPARED, "")
    assert fired_by_many(connect, due) == 1
    assert fires(db) == ["enqueued"]
    assert one(db, "select count(*), (select fired_count from tallybook.schedule) from tallybook.entry") == (1, 1)


def test_control_without_both_it_is_fired_more_than_once(db: Any, connect: Any, due: str) -> None:
    """S2-04: negative control: without the key and the comparison the same tick is fired more than once."""
    db.execute("alter table tallybook.fire drop constraint fire_pkey")
    without(db, "_schedules_fire", COMPARED, "")
    assert fired_by_many(connect, due) > 1
    assert one(db, "select count(*) from tallybook.entry") > 1


@pytest.mark.parametrize("key", [True, False], ids=["key", "control"])
def test_a_clock_that_goes_back_does_not_fire_twice(db: Any, due: str, key: bool) -> None:
    """S2-04: a fired tick that a server with a slow clock plans again is not fired again; without the key it is."""
    if not key:
        db.execute("alter table tallybook.fire drop constraint fire_pkey")
    fire(db, due, NOON + STEP)
    earlier = NOON + STEP - timedelta(seconds=2)
    put(db, "s", at=earlier, every="5 min", overlap=True)
    fire(db, planned(db, "s", earlier, following=NOON + STEP), earlier)
    fire(db, planned(db, "s", NOON + STEP, NOON + STEP), NOON + STEP)
    assert fires(db) == ["enqueued"] * (1 if key else 2)
    assert one(db, "select tick from tallybook.schedule") == NOON + 2 * STEP


@pytest.mark.parametrize("what", ["paused", "dropped", "changed", "resumed", "put anew"])
def test_a_plan_for_what_has_changed_is_not_carried_out(db: Any, due: str, what: str) -> None:
    """S2-11: a plan from before a pause, resume, drop or change of its schedule fires nothing."""
    at = NOON + STEP
    if what == "changed":
        put(db, "s", at=at, priority=1, overlap=True)
    elif what in ("paused", "resumed"):
        db.execute("select tallybook.schedule_pause('s', 'ada', %s)", (at,))
        if what == "resumed":
            db.execute("select tallybook.schedule_resume('s', %s)", (at,))
    else:
        db.execute("select tallybook.schedule_drop('s')")
        if what == "put anew":
            put(db, "s", at=at, overlap=True)
    assert fire(db, due, at) == (0, 0, 0, 0, 0)
    assert fires(db) == []


def test_what_another_session_holds_is_left_to_it(db: Any, connect: Any, due: str) -> None:
    """S2-02: an open transaction that holds one schedule's row stops only that one from firing; nobody waits."""
    put(db, "other", at=NOON, overlap=True)
    plans = json.dumps([*json.loads(due), *json.loads(planned(db, "other", NOON + STEP, NOON + STEP))])
    with connect(autocommit=False) as holding:
        holding.execute("update tallybook.schedule set priority = 1 where name = 's'")
        db.execute("set lock_timeout = '1s'")
        assert fire(db, plans, NOON + STEP) == (1, 1, 0, 0, 0)
    assert fires(db, None, "schedule") == ["other"]


def test_the_fire_in_flight_of_another_session_counts(db: Any, connect: Any) -> None:
    """S2-02: a tick beside an uncommitted run now fires nothing; after the commit it is skipped, for that job."""
    put(db, "s", at=NOON)
    fire(db, planned(db, "s", NOON, following=NOON + STEP), NOON)
    with connect(autocommit=False) as running:
        assert one(running, "select what from tallybook.schedule_run('s', %s)", NOON) == "enqueued"
        assert fire(db, planned(db, "s", NOON + STEP, NOON + STEP), NOON + STEP)[0] == 0
    assert fire(db, planned(db, "s", NOON + STEP, NOON + STEP), NOON + STEP) == (1, 0, 1, 0, 0)


def test_several_ticks_at_once_with_the_guard(db: Any) -> None:
    """S2-02: of two ticks that are found together the first is fired, the second skipped: the first's job is open."""
    put(db, "s", at=NOON)
    assert fire(db, planned(db, "s", NOON, NOON, NOON + timedelta(seconds=1)), NOON) == (1, 1, 1, 0, 0)
    assert fires(db, "s", "what", "reason") == [("enqueued", None), ("skipped", "overlap")]


def test_ticks_that_are_caught_up_run_in_order_also_with_a_fair_key(db: Any) -> None:
    """S2-02: with missed=all, the task's fair key does not apply: the jobs run one after the other, as always."""
    put(db, "s", at=NOON, missed="all", options=Jsonb({"fair_key": "a"}))
    late = [(NOON + n * STEP).isoformat() for n in range(3)]
    assert fire(db, planned(db, "s", NOON + 2 * STEP, late=late), NOON + 2 * STEP) == (1, 3, 0, 0, 0)
    hands = Hands(db)
    ran = []
    while started := hands.start():
        ran.append([job.id for job in started])
        hands.complete(*started)
        db.execute("select tallybook.promote()")
    assert ran == [[1], [2], [3]]


def test_faults_that_are_not_the_schedules_are_raised(db: Any, due: str) -> None:
    """S2-16: a fault that is not the schedule's, such as a lock, is an error of the call; the tick is not given up."""
    db.execute(
        "create function pg_temp.broken() returns trigger language plpgsql as $$ begin raise lock_not_available; end $$"
    )
    db.execute("create trigger broken before insert on tallybook.fire for each row execute function pg_temp.broken()")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        fire(db, due, NOON + STEP)
    db.execute("drop trigger broken on tallybook.fire")
    assert fire(db, due, NOON + STEP)[1] == 1


# Plans


def test_the_clocks_statements_read_indexes_only(db: Any) -> None:
    """S2-16: with 10,000 schedules and no statistics, a look and a fire of 20 read few pages and scan no table."""
    db.execute(
        "insert into tallybook.schedule (name, source, task, every, since, tick, due_at, created_at, changed_at)"
        " select 's' || n, 'database', 't', '1 h', %(at)s, %(at)s + n * interval '1 s', %(at)s + n * interval '1 s',"
        " %(at)s, %(at)s from generate_series(1, 10000) n",
        {"at": NOON},
    )
    scans = "select coalesce(sum(seq_scan), 0) from pg_stat_xact_user_tables where relname in ('schedule', 'fire')"
    pages = "explain (analyze, buffers, format json) "
    at = NOON + timedelta(seconds=20)
    for _ in range(6):  # so that the session keeps its plan
        one(db, "select due_in from tallybook._schedules_look(p_at => %s)", at)
    with db.transaction():
        before = one(db, scans)
        look = f"{pages} select * from tallybook._schedules_look(p_at => %s)"  # noqa: S608
        plans = [one(db, look, at)[0]["Plan"] for _ in range(5)]  # the fewest of five: a new plan reads more
        assert min(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in plans) < 60
        rows = db.execute("select name, revision, tick from tallybook._schedules_due(p_at => %s)", (at,)).fetchall()
        assert len(rows) == 20
        plans = [
            {"name": name, "revision": revision, "tick": tick.isoformat(), "ticks": [tick.isoformat()], "late": [],
             "next": (at + STEP).isoformat(), "due": (at + STEP).isoformat()}
            for name, revision, tick in rows
        ]  # fmt: skip
        assert fire(db, json.dumps(plans), at)[1] == 20
        assert one(db, scans) == before


def test_plans_from_empty_tables_do_when_they_are_full(db: Any, connect: Any) -> None:
    """S3-20: the clock's statements read no more in a session with plans from empty tables than in a new one."""
    full = """
insert into tallybook.schedule (name, source, task, every, since, tick, due_at, created_at, changed_at, query)
select 's' || n, 'database', 't', '1 h', t, t, t, t, t, case when n % 2 = 0 then 'select 1' end
  from (select n, %(at)s::timestamptz + n * interval '1 s' from generate_series(1, 4000) n) x(n, t);
insert into tallybook.fire (schedule, tick, fired_at, what)
select s.name, s.tick - n * interval '1 h', s.tick, 'enqueued' from tallybook.schedule s, generate_series(1, 3) n"""
    put(db, "s", at=NOON)
    fire(db, planned(db, "s", NOON, following=NOON + STEP), NOON)
    db.execute("delete from tallybook.schedule")
    for table in ("schedule", "fire", "service", "entry"):
        db.execute(psycopg.sql.SQL("vacuum (analyze) tallybook.{}").format(psycopg.sql.Identifier(table)))
    plans = [
        {"name": f"s{n}", "revision": "%(revision)s", "tick": (NOON + timedelta(seconds=n)).isoformat(),
         "ticks": [(NOON + timedelta(seconds=n)).isoformat()], "late": [], "next": (NOON + STEP).isoformat(),
         "due": (NOON + STEP).isoformat()}
        for n in range(1, 20, 2)
    ]  # fmt: skip
    there = " where exists (select from tallybook.schedule where name = 's1')"
    queries = {
        "look": "select * from tallybook._schedules_look(p_at => %(at)s)",
        "look on": "select * from tallybook._schedules_look(%(at)s, p_at => %(at)s)",
        "due": "select * from tallybook._schedules_due(p_at => %(at)s)",
        "fire": "select * from tallybook._schedules_fire(replace(%(plans)s, '%%(revision)s',"
        " (select max(revision::text) from (select revision from tallybook.schedule limit 1) r))::jsonb, %(at)s)",
        "run now": f"select * from tallybook.schedule_run('s1', %(at)s) {there}",  # noqa: S608
        "set": "select tallybook.schedule_set('s1', 't', every => '2 h', at => %(at)s)",
        "pause": "select tallybook.schedule_pause('s1')" + there,
    }
    params = {"at": NOON + timedelta(seconds=20), "plans": json.dumps(plans)}

    def read(conn: Any, query: str) -> int:
        return rows_read(conn, lambda: conn.execute(query, params))

    old = connect()
    for query in queries.values():
        read(old, query)
    db.execute(cast("LiteralString", full.replace("%(at)s", f"'{NOON}'")))
    new = connect()
    assert {what: n for what, query in queries.items() if (n := read(old, query)) > 1.5 * read(new, query) + 50} == {}
    assert read(new, queries["fire"]) < 600 and read(new, queries["due"]) < 60 and read(new, queries["look"]) < 30
