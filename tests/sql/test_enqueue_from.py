"""enqueue_from: the jobs that a query enqueues, and the queries and rows that it refuses."""

from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from support.broken import without
from support.database import Connection
from support.hands import Hands, enqueue_from, keys, put, values

# --- what it enqueues ----------------------------------------------------------------------------------------------


def test_each_row_is_a_job(db: Connection) -> None:
    """S1-21: each row is a job with its own key, args, time and priority; the call's other arguments apply to all."""
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    query = """
      select 'a' as key, '{"n": 1}'::jsonb as args, null::timestamptz as run_at, null::int as priority union all
      select 'b', '{"n": 2}', '2999-01-01 00:00Z', 7 union all
      select 'c', '{"n": 3}', '2000-01-01 00:00Z', 0 union all
      select null, '{"n": 4}', null, 7"""
    more = {"priority": 5, "max_attempts": 9, "headers": '{"trace": "x"}', "options": '{"version": 2}', "at": now}
    assert enqueue_from(db, query, **more) == (4, 4)
    found = db.execute(
        "select unique_key, args -> 'n', state, priority, run_at from tallybook.job order by id"
    ).fetchall()
    later = datetime(2999, 1, 1, tzinfo=UTC)
    assert found == [
        ("a", 1, "available", 5, now),
        ("b", 2, "scheduled", 7, later),
        ("c", 3, "available", 0, now),
        (None, 4, "available", 7, now),
    ]
    same = db.execute(
        "select distinct queue, task, max_attempts, headers, options, enqueued_at, attempt from tallybook.job"
    ).fetchall()
    assert same == [("q", "t", 9, {"trace": "x"}, {"version": 2}, now, 1)]


def test_args_are_enough(db: Connection) -> None:
    """Without a key column there is no unique key: each call enqueues all rows."""
    query = "select jsonb_build_object('n', n) as args from generate_series(1, 3) n"
    assert [enqueue_from(db, query), enqueue_from(db, query)] == [(3, 3), (3, 3)]
    assert keys(db) == [None] * 6


def test_the_second_call_puts_nothing_in(db: Connection) -> None:
    """S1-21: a second call skips keys with a live job, and enqueues those whose job has ended since."""
    hands = Hands(db)
    assert enqueue_from(db, values("a", "b", "c")) == (3, 3)
    assert enqueue_from(db, values("a", "b", "c", "d")) == (4, 1)
    jobs = hands.start(3)
    assert enqueue_from(db, values("a", "b", "c", "d")) == (4, 0)
    hands.complete(jobs[0])
    assert enqueue_from(db, values("a", "b", "c", "d")) == (4, 1)
    assert keys(db) == ["a", "b", "c", "d", "a"]
    assert db.execute("select key, generation from tallybook.unique_key where generation > 1").fetchall() == [("a", 2)]


def test_jobs_run_in_the_order_of_the_query(db: Connection) -> None:
    """Keys are taken in their own order, but the jobs run in the query's order."""
    enqueue_from(db, "select key, '{}'::jsonb as args from (values ('m'), ('z'), ('a')) v(key) order by key desc")
    assert keys(db) == ["z", "m", "a"]
    assert [keys(db, f"id = {job}") for job in Hands(db).run_all()] == [["z"], ["m"], ["a"]]


def test_a_key_that_comes_twice_is_put_in_once(db: Connection) -> None:
    """The first row of a key gets it, however far away the second one is."""
    assert enqueue_from(db, values("b", "a", "b", "a")) == (4, 2)
    without(db, "enqueue_from", "v_n = 100000", "v_n = 500")
    far = "select (n % 600)::text as key, jsonb_build_object('n', n) as args from generate_series(0, 1199) n"
    assert enqueue_from(db, far, queue="far", task="far") == (1200, 600)
    assert db.execute("select max((args ->> 'n')::int) from tallybook.job where queue = 'far'").fetchone() == (599,)


def test_the_order_of_the_query_holds_within_a_part(db: Connection) -> None:
    """Past the size of a part, keyed jobs come in parts by key; jobs without keys keep the query's order."""
    without(db, "enqueue_from", "v_n = 100000", "v_n = 2")
    assert enqueue_from(db, values("d", "a", "c", "b")) == (4, 4)
    assert keys(db) == ["a", "b", "d", "c"]
    assert enqueue_from(db, "select to_jsonb(v) as args from (values (4), (1), (3), (2)) v(n)", task="plain") == (4, 4)
    found = db.execute("select args -> 'n' from tallybook.job where task = 'plain' order by id").fetchall()
    assert found == [(4,), (1,), (3,), (2,)]


@pytest.mark.slow
def test_batches_are_not_to_be_seen(db: Connection) -> None:
    """A query with more rows than a batch, by number or by size, with or without keys, enqueues each row once."""
    without(db, "enqueue_from", "v_n = 100000", "v_n = 5000")
    many = "select nullif(n % 4000, 0)::text as key, '{}'::jsonb as args from generate_series(1, 12001) n"
    assert enqueue_from(db, many) == (12001, 3999 + 3)
    large = """select n as key, jsonb_build_object('t', string_agg(md5(n || '-' || i), '')) as args
      from generate_series(1, 40) n, generate_series(1, 31000) i group by n"""
    assert enqueue_from(db, large, task="large") == (40, 40)
    assert enqueue_from(db, large, task="large") == (40, 0)


def test_nothing_is_a_fine_answer(db: Connection) -> None:
    """A query without rows enqueues nothing."""
    assert enqueue_from(db, "select 'a' as key, '{}'::jsonb as args where false") == (0, 0)
    assert db.execute("select count(*) from tallybook.lane").fetchone() == (0,)


def test_any_select_will_do(db: Connection) -> None:
    """Comments, a final semicolon, CTEs, functions, locks, text like SQL: whatever fits in brackets is accepted."""
    fine = [
        "select 'a' as key, '{}'::jsonb as args;",
        "select 'a' as key, '{}'::jsonb as args ; \n ;",
        "select 'a' as key, '{}'::jsonb as args -- all of them",
        "select 'a' as key, '{}'::jsonb as args /* all; of them */",
        "-- first\nselect 'a' as key, '{}'::jsonb as args",
        "select 'a;' as key, jsonb_build_object(';', ')') as args",
        'select \'a\' as key, $$ {"x": "; ) --"} $$::jsonb as args',
        "with x as (select 'a' as key, '{}'::jsonb as args) select * from x",
        "select * from (values ('a', '{}'::json)) v(key, args)",
        "select '{}'::jsonb \"args\", 4711 as key order by 2 limit 1",
        "select 'a'::varchar(9) as key, '{}'::jsonb as args union all select 'a', '{}'",
        "select gen_random_uuid() as key, '{}'::jsonb as args",
        "select '%s%%' as key, '{}'::jsonb as args, 3::bigint as priority",
        "select 'a' as key, '{}'::jsonb as args, now() - interval '1 day' as run_at",
        "table given",
        "select key, args from given where key = 'a' for update skip locked",
        "select key, args from made('a')",
    ]
    db.execute("create table given as select 'a' as key, '{}'::jsonb as args")
    db.execute(
        "create function made(k text) returns table (key text, args jsonb) language sql as $$ select k, '{}'::jsonb $$"
    )
    for query in fine:
        with db.transaction(force_rollback=True):
            assert enqueue_from(db, query) in [(1, 1), (2, 1)], query


def test_names_are_the_callers(db: Connection) -> None:
    """Tables are found by the caller's search_path, and the query sees what only its transaction sees."""
    with db.transaction():
        db.execute("create schema shop create table asset (id int)")
        db.execute("set local search_path = shop")
        db.execute("insert into asset values (1), (2)")
        assert enqueue_from(db, "select id as key, jsonb_build_object('id', id) as args from asset") == (2, 2)


# --- what it refuses -----------------------------------------------------------------------------------------------


def test_what_is_no_list_of_jobs_is_refused(db: Connection) -> None:
    """TB005 names the fault of the query or the row; nothing is run, changed or enqueued."""
    refused = [
    (None, "is empty"),
    (" ;; \n", "is empty"),
    ("select " + "1, " * 40000 + "1", "120008 bytes"),
    ("selec 1", "syntax error"),
    ("select 'a' as key, '{}'::jsonb as args from nowhere", "nowhere"),
    ("select 'a' as key, '{}'::jsonb as args where x > 1", '"x" does not exist'),
    ("select $1 as key, '{}'::jsonb as args", "$1"),
    ("select 'a' as key, '{}'::jsonb as args; select 1", "multi-query"),
    ("select 'a' as key, '{}'::jsonb as args; delete from victim", "multi-query"),
    ("select '{}'::jsonb as args) q) s; delete from victim; select 1 from (select 1 from (select 1", "syntax error"),
    ("select '{}'::jsonb as args) q), gone as (delete from victim returning 1) select (((1", "syntax error"),
    ("select '{}'::jsonb as args /* ", "unterminated"),
    ("select '{}'::jsonb as args, 'a", "unterminated"),
    ("delete from victim", "DELETE"),
    ("delete from victim returning 'a' as key, '{}'::jsonb as args", "syntax error"),
    ("with gone as (delete from victim returning id) select id as key, '{}'::jsonb as args from gone", "top level"),
    ("insert into victim values (2) returning 'a' as key, '{}'::jsonb as args", "syntax error"),
    ("select id as key, '{}'::jsonb as args into other from victim", "INTO"),
    ("truncate victim", "TRUNCATE"),
    ("drop table victim", "DROP"),
    ("explain analyze delete from victim", "syntax error"),
    ("show server_version", "syntax error"),
    ("commit", "COMMIT"),
    ("do $$ begin delete from victim; end $$", "DO"),
    ("select from victim", "no column args"),
    ("select 'a' as key", "no column args"),
    ("values ('a', '{}'::jsonb)", '"column1"'),
    ("select 'a' as kye, '{}'::jsonb as args", '"kye"'),
    ("select 'a' as \"Key\", '{}'::jsonb as args", '"Key"'),
    ("select 'a' as key, 'b' as key, '{}'::jsonb as args", "more than one column key"),
    ("select 'a' as key, '{}'::jsonb as args, '{}'::jsonb as args", "more than one column args"),
    ("select now() as key, '{}'::jsonb as args", "the column key"),
    ("select 1.5 as key, '{}'::jsonb as args", "the column key"),
    ("select 'a' as key, '{}' as args", "the column args"),
    ("select 'a' as key, '{}'::jsonb as args, now()::timestamp as run_at", "the column run_at"),
    ("select 'a' as key, '{}'::jsonb as args, '2999-01-01' as run_at", "the column run_at"),
    ("select 'a' as key, '{}'::jsonb as args, 1.0 as priority", "the column priority"),
    ("select 'a' as key, null::jsonb as args", "null"),
    ("select 'a' as key, '[1]'::jsonb as args", "array"),
    ("select 'a' as key, 'null'::jsonb as args", "not null"),
    ("select 'a' as key, jsonb_build_object('x', repeat('x', 1300000)) as args", "bytes"),
    ("select '' as key, '{}'::jsonb as args", "one of the query has 0"),
    ("select repeat('x', 513) as key, '{}'::jsonb as args", "one of the query has 513"),
    ("select 'a' as key, '{}'::jsonb as args, 32768 as priority", "priority"),
    ("select 'a' as key, '{}'::jsonb as args, -5000000000 as priority", "priority"),
    ("select n::text as key, case n when 6001 then '[]' else jsonb_build_object('n', n) end as args"
     " from generate_series(1, 6001) n", "array"),
]  # fmt: skip
    db.execute("create table victim (id int); insert into victim values (1)")
    for query, says in refused:
        with pytest.raises(psycopg.Error) as caught:
            enqueue_from(db, query)
        told = caught.value.diag
        assert caught.value.sqlstate == "TB005", (query, told.message_primary)
        assert says in str(told.message_primary), query
        assert told.message_hint or told.message_detail or "more than one" in says, query
        assert db.execute("select count(*) from victim").fetchone() == (1,), query
    assert db.execute("select count(*) from tallybook.job").fetchone() == (0,)
    assert db.execute("select count(*) from tallybook.unique_key").fetchone() == (0,)


def test_looking_at_the_query_runs_nothing_of_it(db: Connection) -> None:
    """A query is checked without being run: it calls its functions once per row, and not at all if it is refused."""
    db.execute("create sequence calls")
    db.execute("select nextval('calls')")
    query = "select nextval('calls') as key, '{}'::jsonb as args"
    with pytest.raises(psycopg.Error, match="kye"):
        enqueue_from(db, query + ", 1 as kye")
    assert enqueue_from(db, query + " from generate_series(1, 3)") == (3, 3)
    assert keys(db) == ["2", "3", "4"]


def test_what_enqueue_refuses_is_refused(db: Connection) -> None:
    """Arguments that no job may have raise TB005."""
    for bad in [
        {"queue": ""}, {"queue": "x" * 65}, {"queue": None}, {"task": ""}, {"task": None}, {"priority": -1},
        {"priority": None}, {"max_attempts": 0}, {"headers": "[]"}, {"options": "[]"}, {"options": '{"version": 0}'},
    ]:  # fmt: skip
        with pytest.raises(psycopg.Error) as caught:
            enqueue_from(db, values("a"), **bad)
        assert caught.value.sqlstate == "TB005", bad


@pytest.mark.parametrize(
    ("query", "state"),
    [
        ("select (1 / (n - 5001))::text as key, '{}'::jsonb as args from generate_series(1, 6000) n", "22012"),
        ("select 'a' as key, ('{' || n)::jsonb as args from generate_series(1, 3) n", "22P02"),
        ("select 'a' as key, jsonb_build_object('s', pg_sleep(9)) as args", "57014"),
    ],
)
def test_what_the_query_raises_is_passed_on(db: Connection, query: str, state: str) -> None:
    """An error of the running query is passed on, even from half way through, and nothing is enqueued."""
    with pytest.raises(psycopg.Error) as caught, db.transaction():
        if state == "57014":
            db.execute("set local statement_timeout = '1 s'")
        enqueue_from(db, query)
    assert caught.value.sqlstate == state
    assert db.execute("select count(*) from tallybook.job").fetchone() == (0,)


def test_the_query_has_the_rights_of_the_caller(db: Connection) -> None:
    """Security: a caller who may not read a table cannot read it through a query either, and the error is 42501."""
    db.execute("create table secret (id int)")
    with db.transaction(force_rollback=True):
        db.execute("create role reader")
        db.execute("grant usage on schema tallybook to reader")
        db.execute("set local role reader")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="secret"), db.transaction():
            enqueue_from(db, "select id as key, '{}'::jsonb as args from secret")


@pytest.mark.parametrize("state", ["available", "running", "scheduled", "waiting", "retrying"])
def test_a_live_job_keeps_its_key(db: Connection, state: str) -> None:
    """S1-21: a row is skipped as long as a job with its key has not ended, whatever that job's state."""
    hands, more = Hands(db), {"unique_key": "a"}
    if state == "scheduled":
        put(db, run_at="2999-01-01", **more)
    elif state == "waiting":
        put(db, order_key="o", task="other")
        put(db, order_key="o", **more)
        assert len(hands.start()) == 1
    else:
        put(db, **more)
        jobs = hands.start() if state != "available" else []
        if state == "retrying":
            hands.fail(jobs[0], "1 h")
    assert db.execute("select state from tallybook.job where unique_key = 'a'").fetchone() == (state,)
    assert enqueue_from(db, values("a", "b")) == (2, 1)
    assert keys(db, "task = 't'") == ["a", "b"]


@pytest.mark.direct("a sleeping worker holds a session")
def test_sleepers_are_woken(db: Connection, connect: Any) -> None:
    """A job wakes sleepers on its queue, one that is due soon wakes the promoter, and no new job wakes nobody."""
    with connect() as sleeper:
        sleeper.execute("listen tallybook")
        assert sleeper.execute("select armed from tallybook.listen_begin(array['q', ' promote'])").fetchone() == (True,)
        enqueue_from(db, values("a"))
        assert [note.payload for note in sleeper.notifies(timeout=60, stop_after=1)] == ["q"]
        enqueue_from(db, values("a"))
        enqueue_from(db, "select 'b' as key, '{}'::jsonb as args, now() + interval '2 s' as run_at")
        assert [note.payload for note in sleeper.notifies(timeout=60, stop_after=1)] == [" promote"]
        assert list(sleeper.notifies(timeout=0)) == []
