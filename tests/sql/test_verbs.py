"""Each verb as a user calls it: plain SQL on a psycopg connection."""

import json
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from support.database import Connection, one
from support.hands import put_many
from support.sessions import behind, claimed_jobs, is_blocked
from support.waiting import wait_until

DAY = timedelta(days=1)


# Enqueue: in a statement, in a transaction, beside the business data.


def test_enqueue_is_a_plain_select(db: Connection) -> None:
    """S5-01: select tallybook.enqueue(...) with named arguments is all that a producer needs."""
    job = one(
        db,
        "select tallybook.enqueue('mail', 'send_welcome', '{\"user_id\": 42}', run_at => now() + interval '5 min',"
        " priority => 1)",
    )
    shown = db.execute("select queue, task, args, priority, state from tallybook.job where id = %s", [job]).fetchone()
    assert shown == ("mail", "send_welcome", {"user_id": 42}, 1, "scheduled")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_enqueue_lives_and_dies_with_its_transaction(
    db: Connection, connect: Callable[..., Connection], end: str
) -> None:
    """S5-01: a job exists once its transaction commits, with the business row, and never if that rolls back."""
    db.execute("create table users (id int primary key)")
    producer = connect()
    producer.execute("begin")
    producer.execute("insert into users values (42)")
    job = one(producer, "select tallybook.enqueue('mail', 'send')")
    assert one(db, "select count(*) from tallybook.job") == 0
    producer.execute(end)
    there = int(end == "commit")
    assert (
        one(db, "select (select count(*) from users), (select count(*) from tallybook.job where id = %s)", job) == there
    )
    assert one(db, "select count(*) from tallybook.entry") == there


def test_enqueue_inside_a_cte_of_a_business_statement(db: Connection) -> None:
    """S5-01: one statement inserts the users and a job for each."""
    db.execute("create table users (id int generated always as identity primary key, email text)")
    rows = db.execute(
        "with made as (insert into users (email) values ('a@x'), ('b@x') returning id, email)"
        " select id, tallybook.enqueue('mail', 'send_welcome', jsonb_build_object('user_id', id)) from made order by id"
    ).fetchall()
    shown = db.execute("select args, id from tallybook.job order by id").fetchall()
    assert shown == [({"user_id": user}, job) for user, job in rows]


def test_side_table_with_foreign_keys(db: Connection) -> None:
    """S1-03: a side table refers to a business row and to its job, and is filled by the statement that enqueues."""
    jobs = assets(db)
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        db.execute("insert into asset_job select 99, tallybook.enqueue('prices', 'refresh')")
    assert see(db, "id") == [(job,) for job in jobs]
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        db.execute("delete from assets")


def test_side_table_is_joined_by_people_and_workers(db: Connection) -> None:
    """S1-09: business columns can be joined to tallybook.job, and to the jobs that a worker has claimed."""
    jobs = assets(db)
    on_view = (
        "select a.symbol, j.state from asset_job s join assets a on a.id = s.asset_id"
        " join tallybook.job j on j.id = s.job_id"
    )
    assert db.execute(on_view + " order by 1").fetchall() == [("AAPL", "available"), ("MSFT", "available")]
    lease = claim(db, start(db, "prices"), "prices")
    statement = (
        "select l.job_id, l.attempt, a.symbol, a.data_type from tallybook.claimed_jobs(%s) l"
        " join asset_job s on s.job_id = l.job_id join assets a on a.id = s.asset_id order by 1"
    )
    assert db.execute(statement, [lease]).fetchall() == [(jobs[0], 1, "AAPL", "stock"), (jobs[1], 1, "MSFT", "stock")]
    assert db.execute(on_view + " order by 1").fetchall() == [("AAPL", "running"), ("MSFT", "running")]


def assets(db: Connection) -> list[int]:
    """Two assets, each with a job, and the side table between them."""
    db.execute("create table assets (id int primary key, symbol text, data_type text)")
    db.execute("insert into assets values (1, 'AAPL', 'stock'), (2, 'MSFT', 'stock')")
    db.execute("create table asset_job (asset_id int references assets, job_id bigint primary key)")
    rows = db.execute(
        "with put as (select id, tallybook.enqueue('prices', 'refresh', jsonb_build_object('asset', id)) as job"
        " from assets),"
        " side as (insert into asset_job select id, job from put returning job_id) select job_id from side order by 1"
    ).fetchall()
    return [job for (job,) in rows]


def test_a_job_has_the_plain_columns_of_a_job_table(db: Connection) -> None:
    """S1-02: id, state, priority 2, attempts, and the times of enqueue, start and end are columns of tallybook.job."""
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    columns = (
        "id, state, priority, attempts, failures, enqueued_at is null, started_at is null, ended_at is null, last_error"
    )
    assert see(db, columns) == [(job, "available", 2, 0, 0, False, True, True, None)]
    lease = claim(db, start(db))
    assert see(db, columns) == [(job, "running", 2, 1, 0, False, False, True, None)]
    assert one(db, "select tallybook.complete(%s, %s, 1)", lease, job) is True
    assert see(db, columns) == [(job, "completed", 2, 1, 0, False, False, False, None)]
    assert see(db, "enqueued_at <= started_at and started_at <= ended_at") == [(True,)]


def test_a_failed_job_shows_its_error_and_how_often_it_failed(db: Connection) -> None:
    """S1-02: after each failure the row has the count and the last error, until the job is dead with both."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send', unique_key => 'AAPL')"), start(db)
    error = "select tallybook.fail(%s, %s, %s, jsonb_build_object('message', %s::text), max_attempts => 2)"
    one(db, error, claim(db, worker), job, 1, "no luck")
    columns = "id, state, unique_key, attempts, failures, last_error, ended_at is null"
    assert see(db, columns) == [(job, "retrying", "AAPL", 1, 1, "no luck", True)]
    one(db, "select promoted from tallybook.promote(at => %s)", one(db, "select now()") + DAY)
    one(db, error, claim(db, worker), job, 2, "none again")
    assert see(db, columns) == [(job, "dead", "AAPL", 2, 2, "none again", False)]


def test_ids_are_bigint_and_exact_in_json(db: Connection) -> None:
    """S5-02: ids are bigint, grow, and stay below 2^53, so that JavaScript reads them exactly."""
    ids = [one(db, "select tallybook.enqueue('mail', 'send')") for _ in range(3)]
    assert ids == sorted(set(ids))
    assert one(db, "select pg_typeof(tallybook.enqueue('mail', 'send'))::text") == "bigint"
    assert (
        one(db, "select max_value from pg_sequences where schemaname = 'tallybook' and sequencename = 'job_id'") < 2**53
    )


def test_args_are_jsonb_and_can_be_asked_for(db: Connection) -> None:
    """S5-02: a job is a row with task, args as jsonb and time; a unique key makes (task, args) idempotent."""
    put = "select tallybook.enqueue('mail', 'send', a, unique_key => md5(a::text)) from (select %s::jsonb as a) x"
    first = one(db, put, '{"user_id": 1}')
    assert one(db, put, '{"user_id":1}') == first
    second = one(db, put, '{"user_id": 2}')
    assert see(db, "id", "args @> '{\"user_id\": 2}'") == [(second,)]
    at = one(db, "select now() + interval '1 day'")
    later = one(db, "select tallybook.enqueue('mail', 'send', '{\"user_id\": 3}', run_at => %s)", at)
    assert see(db, "task, args, run_at, state", f"id = {later}") == [("send", {"user_id": 3}, at, "scheduled")]


def test_everything_is_in_sql(db: Connection) -> None:
    """S5-11: enqueue, claim, fail, complete, cancel and every job's state are plain SQL in the one database."""
    ids = [one(db, "select tallybook.enqueue('mail', 'send')") for _ in range(5)]
    lease = claim(db, start(db), limit=3)
    one(db, "select tallybook.complete(%s, %s, 1)", lease, ids[0])
    one(db, "select tallybook.fail(%s, %s, 1, '{\"message\": \"no\"}', retry_in => '1 h')", lease, ids[1])
    one(db, "select tallybook.cancel(%s)", ids[3])
    assert see(db, "id, state") == list(
        zip(ids, ["completed", "retrying", "running", "cancelled", "available"], strict=True)
    )


def test_the_task_is_text_or_an_enum(db: Connection) -> None:
    """S5-13: a task is any name of 1 to 200 bytes, also the label of an enum."""
    db.execute("create type task_type as enum ('send', 'résumé prüfen')")
    one(db, "select tallybook.enqueue('mail', 'résumé prüfen'::task_type::text)")
    one(db, "select tallybook.enqueue('mail', %s)", "x" * 200)
    assert see(db, "task") == [("résumé prüfen",), ("x" * 200,)]


# Unique keys.


def test_second_enqueue_of_a_key_is_a_silent_no_op(db: Connection) -> None:
    """S1-05: a second enqueue with a live job's key is no error and returns the first id, whatever else differs."""
    first = keyed(db)
    assert one(db, "select tallybook.enqueue('other', 'send', '{\"n\": 2}', priority => 0, unique_key => 'k')") == first
    assert see(db, "id, queue, priority, args") == [(first, "mail", 2, {})]


def test_a_key_belongs_to_its_task(db: Connection) -> None:
    """S1-04: at most one live job of a task has a key; another task, another key, or no key is another job."""
    ids = {keyed(db), keyed(db, task="pack"), keyed(db, key="l"), one(db, "select tallybook.enqueue('mail', 'send')")}
    assert len(ids) == 4


@pytest.mark.parametrize("state", ["scheduled", "available", "running", "retrying"])
def test_a_live_job_holds_its_key(db: Connection, state: str) -> None:
    """S1-04: scheduled, available, running and retrying jobs hold their key."""
    first = keyed(db, run_at="now() + interval '1 h'" if state == "scheduled" else "null")
    if state in ("running", "retrying"):
        lease = claim(db, start(db))
        if state == "retrying":
            one(db, "select tallybook.fail(%s, %s, 1, '{}', retry_in => '1 h')", lease, first)
    assert see(db, "state") == [(state,)]
    assert keyed(db) == first


@pytest.mark.parametrize(
    "state", ["completed", "dead", "cancelled while waiting", "cancelled while running", "cancelled before due"]
)
def test_a_key_is_free_once_its_job_has_ended(db: Connection, state: str) -> None:
    """S1-06: once its job has completed, died or been cancelled, the same key can be used again and again."""
    seen = set()
    for _ in range(3):
        job = keyed(db, run_at="now() + interval '1 h'" if state == "cancelled before due" else "null")
        assert job not in seen
        seen.add(job)
        if state in ("cancelled while waiting", "cancelled before due"):
            assert one(db, "select tallybook.cancel(%s)", job) == "cancelled"
            continue
        lease = claim(db, start(db))
        if state == "completed":
            one(db, "select tallybook.complete(%s, %s, 1)", lease, job)
        elif state == "dead":
            assert one(db, "select tallybook.fail(%s, %s, 1, '{}', final => true)", lease, job) == "dead"
        else:
            assert one(db, "select tallybook.cancel(%s)", job) == "cancelling"
            assert keyed(db) == job
            one(db, "select tallybook.cancel_running(%s, %s, 1)", lease, job)


def test_one_of_many_that_use_a_key_at_once_wins(db: Connection, connect: Callable[..., Connection]) -> None:
    """S1-05: ten sessions that enqueue one new key at the same moment create one job, and all get its id."""
    conns = [connect() for _ in range(10)]
    together = threading.Barrier(len(conns))

    def enqueue(conn: Connection) -> int:
        together.wait()
        return keyed(conn)

    with ThreadPoolExecutor(len(conns)) as pool:
        got = list(pool.map(enqueue, conns))
    assert (len(got), len(set(got))) == (10, 1)
    assert see(db, "id") == [(got[0],)]


def keyed(conn: Connection, *, task: str = "send", key: str = "k", run_at: str = "null") -> int:
    return int(one(conn, f"select tallybook.enqueue('mail', %s, unique_key => %s, run_at => {run_at})", task, key))


# Bulk.


def test_bulk_enqueue_skips_what_is_there(db: Connection) -> None:
    """S3-11: one statement enqueues 500 jobs; those whose key has a live job are skipped and reported."""
    there = one(db, "select tallybook.enqueue('files', 'scan', unique_key => 'file 7')")
    n = 500
    ((ids, created),) = db.execute(
        "select * from tallybook.enqueue_many(array_fill('files'::text, array[%(n)s]),"
        " array_fill('scan'::text, array[%(n)s]),"
        " array(select format('{\"n\": %%s}', i) from generate_series(1, %(n)s) i),"
        " unique_keys => array(select 'file ' || i from generate_series(1, %(n)s) i))",
        {"n": n},
    )
    assert [new for new in created if not new] == [False]
    assert (ids[6], created[6]) == (there, False)
    assert one(db, "select count(*) from tallybook.job") == n
    assert see(db, "args", f"id = {ids[499]}") == [({"n": 500},)]


def test_bulk_enqueue_of_nothing(db: Connection) -> None:
    """S3-11: an empty batch is no error and creates no job."""
    assert db.execute("select * from tallybook.enqueue_many('{}', '{}', '{}')").fetchone() == ([], [])


def test_bulk_enqueue_with_a_bad_job_puts_none_in(db: Connection) -> None:
    """S3-11: one invalid job refuses the whole batch, and the error names its position."""
    with pytest.raises(psycopg.Error, match="job 2 of the batch") as caught:
        db.execute('select tallybook.enqueue_many(\'{q,q,q}\', \'{a,"",b}\', \'{"{}","{}","{}"}\')')
    assert caught.value.sqlstate == "TB005"
    assert one(db, "select count(*) from tallybook.job") == 0


# Claim.


@pytest.mark.parametrize("limit", [1, 100])
def test_claims_go_by_priority_then_order(db: Connection, limit: int) -> None:
    """S1-08 S2-09: jobs are claimed by priority number, then in the order of enqueue; a batch keeps its own order."""
    second = [one(db, "select tallybook.enqueue('mail', 'send')") for _ in range(2)]
    many = (
        "select job_ids from tallybook.enqueue_many('{mail,mail}', '{a,b}', '{\"{}\",\"{}\"}', priorities => '{2,2}')"
    )
    second += one(db, many)
    first = [one(db, "select tallybook.enqueue('mail', 'send', priority => 1)") for _ in range(2)]
    worker, order = start(db), []
    while jobs := claimed_jobs(db, claim(db, worker, limit=limit)):
        order += jobs
    assert order == first + second


def test_two_claimers_take_each_job_once(db: Connection, connect: Callable[..., Connection]) -> None:
    """S3-08: however many workers claim at the same moment, each job is claimed once."""
    put_many(db, 300, "mail")
    taken: list[int] = []

    def work(conn: Connection) -> None:
        worker = start(conn)
        while jobs := claimed_jobs(conn, claim(conn, worker, limit=7)):
            taken.extend(jobs)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [connect() for _ in range(4)]))
    assert len(taken) == len(set(taken)) == 300


def test_a_claim_gives_whole_and_current_rows(db: Connection) -> None:
    """S3-09: a claim returns the whole job with the attempt's own numbers, after a failure, and with replaced args."""
    job = one(
        db,
        "select tallybook.enqueue('mail', 'send', '{\"n\": 1}', headers => '{\"trace\": \"x\"}',"
        " max_attempts => 3, unique_key => 'k')",
    )
    worker = start(db)
    lease = claim(db, worker)
    one(db, "select tallybook.fail(%s, %s, 1, '{}', retry_in => '0')", lease, job)
    replace = "select tallybook.enqueue('mail', 'send', '{\"n\": 2}', unique_key => 'k', on_conflict => 'replace_args')"
    assert one(db, replace) == job
    lease = claim(db, worker)
    columns = (
        "job_id, attempt, task, args, headers, queue, priority, failures, crashes, max_attempts, unique_key, blocked_by"
    )
    shown = db.execute(f"select {columns} from tallybook.claimed_jobs(%s)", [lease]).fetchall()  # noqa: S608
    assert shown == [(job, 2, "send", {"n": 2}, {"trace": "x"}, "mail", 2, 1, 0, 3, "k", None)]


def test_a_claim_takes_no_more_than_asked_for(db: Connection) -> None:
    """S3-09: a claim takes at most max_jobs, none from a queue with 0; without work it has no jobs and no id."""
    for _ in range(3):
        one(db, "select tallybook.enqueue('mail', 'send')")
    worker = start(db)
    call = "select jobs, claim_id is null from tallybook.claim(%s, '{mail,files}', %s, gen_random_uuid())"
    assert db.execute(call, [worker, [2, 5]]).fetchone() == (2, False)
    assert db.execute(call, [worker, [0, 5]]).fetchone() == (0, True)
    assert db.execute(call, [worker, [5, 5]]).fetchone() == (1, False)
    assert db.execute(call, [worker, [5, 5]]).fetchone() == (0, True)


def test_only_what_is_due_is_claimed(db: Connection) -> None:
    """S3-19: a scheduled or retrying job is not claimed before its time, but once promote finds it due."""
    now = one(db, "select now()")
    later = one(db, "select tallybook.enqueue('mail', 'send', run_at => %s)", now + DAY)
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    worker = start(db)
    one(db, "select tallybook.fail(%s, %s, 1, '{}', retry_in => '2 days', at => %s)", claim(db, worker), job, now)
    for at, due in ((now, []), (now + 1.5 * DAY, [later]), (now + 3 * DAY, [job])):
        ((promoted, next_run_at),) = db.execute("select promoted, next_run_at from tallybook.promote(at => %s)", [at])
        assert promoted == len(due)
        assert claimed_jobs(db, claim(db, worker)) == due
        assert (next_run_at is None) == (due == [job])


def test_promoted_jobs_go_by_time_then_fewer_failures(db: Connection) -> None:
    """Jobs that have become due are claimed by their time, and at one instant by fewer failures."""
    now, worker = one(db, "select now()"), start(db)
    failed = one(db, "select tallybook.enqueue('mail', 'send')")
    one(db, "select tallybook.fail(%s, %s, 1, '{}', retry_in => '1 h', at => %s)", claim(db, worker), failed, now)
    ids = [
        one(db, "select tallybook.enqueue('mail', 'send', run_at => %s)", now + timedelta(hours=h)) for h in (3, 2, 1)
    ]
    one(db, "select promoted from tallybook.promote(at => %s)", now + DAY)
    assert claimed_jobs(db, claim(db, worker)) == [ids[2], failed, ids[1], ids[0]]


def test_exactly_one_claims_a_job_by_its_id(db: Connection, connect: Callable[..., Connection]) -> None:
    """S4-08: if eight sessions claim one job by its id, exactly one gets true, and the line skips that job."""
    job, other = (one(db, "select tallybook.enqueue('mail', 'send')") for _ in range(2))
    conns = [connect() for _ in range(8)]
    together = threading.Barrier(len(conns))

    def work(conn: Connection) -> bool:
        worker = start(conn)
        together.wait()
        return bool(one(conn, "select tallybook.claim_job(%s, %s, gen_random_uuid())", worker, job))

    with ThreadPoolExecutor(len(conns)) as pool:
        won = list(pool.map(work, conns))
    assert sorted(won) == [False] * 7 + [True]
    assert claimed_jobs(db, claim(db, start(db))) == [other]
    assert see(db, "state, attempts, started_at is not null", f"id = {job}") == [("running", 1, True)]


def test_claim_by_id_takes_what_may_run(db: Connection) -> None:
    """S4-08: claim_job takes an available or due job, but none that is early, taken, cancelled or paused."""
    worker, now = start(db), one(db, "select now()")

    def by_id(job: int, at: datetime = now) -> bool:
        return bool(one(db, "select tallybook.claim_job(%s, %s, gen_random_uuid(), %s)", worker, job, at))

    job = one(db, "select tallybook.enqueue('mail', 'send', run_at => %s)", now + DAY)
    assert (by_id(job), by_id(job, now + 2 * DAY), by_id(job, now + 2 * DAY)) == (False, True, False)
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    one(db, "select tallybook.cancel(%s)", job)
    assert by_id(job) is False
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    one(db, "select tallybook.pause('mail')")
    assert by_id(job) is False
    one(db, "select tallybook.resume('mail')")
    assert by_id(job) is True


def test_a_job_retried_after_a_claim_by_id_runs_once(db: Connection) -> None:
    """S4-08: after its attempt was claimed by id and is dead, a retry runs the next attempt, never the old one."""
    job, worker, lease = one(db, "select tallybook.enqueue('mail', 'send')"), start(db), uuid.uuid4()
    assert one(db, "select tallybook.claim_job(%s, %s, %s)", worker, job, lease) is True
    assert one(db, "select tallybook.fail(%s, %s, 1, '{}', final => true)", lease, job) == "dead"
    assert one(db, "select tallybook.retry(%s)", job) == 2
    attempts = db.execute("select job_id, attempt from tallybook.claimed_jobs(%s)", [claim(db, worker)]).fetchall()
    assert attempts == [(job, 2)]


def test_waiting_jobs_of_one_task(db: Connection) -> None:
    """S4-09: the view filters by task and state, with a limit."""
    for task in ("send", "pack", "send", "send"):
        one(db, "select tallybook.enqueue('mail', %s)", task)
    assert (
        see(db, "task, state", "task = 'send' and state = 'available' order by id limit 2")
        == [("send", "available")] * 2
    )


# Ends.


def test_out_of_attempts_is_dead(db: Connection) -> None:
    """S4-12: the failure that uses up max_attempts makes a dead letter, which keeps the whole job."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send', '{\"n\": 1}', max_attempts => 3)"), start(db)
    results = [fail_once(db, worker, job, n) for n in (1, 2, 3)]
    assert results == ["available", "available", "dead"]
    assert see(db, "state, attempts, failures, args, reason") == [("dead", 3, 3, {"n": 1}, "failed")]
    assert claimed_jobs(db, claim(db, worker)) == []


def test_the_limit_is_the_jobs_then_the_tasks_then_five(db: Connection) -> None:
    """S4-12: max_attempts of the job wins over that of its task, which the worker passes; without both it is 5."""
    worker = start(db)
    for own, tasks, failures in ((2, 9, 2), (None, 3, 3), (None, None, 5)):
        job = one(db, "select tallybook.enqueue('mail', 'send', max_attempts => %s)", own)
        results: list[str] = []
        while "dead" not in results:
            results.append(fail_once(db, worker, job, len(results) + 1, tasks))
        assert len(results) == failures


def test_errors_are_kept(db: Connection) -> None:
    """S4-13: each failure is added to the job's errors with its time and attempt, and is its last error."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send')"), start(db)
    for n in (1, 2):
        fail_once(db, worker, job, n)
    ((last, errors),) = db.execute("select last_error, errors from tallybook.job where id = %s", [job])
    assert last == "no luck 2"
    assert [(error["attempt"], error["message"]) for error in errors] == [(1, "no luck 1"), (2, "no luck 2")]
    assert all(datetime.fromisoformat(error["at"]) for error in errors)


def test_when_and_where_an_attempt_was_made_is_kept(db: Connection) -> None:
    """S4-13: an error has its attempt's start, end and worker, even if a worker in SQL passes none of them."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send', max_attempts => 2)"), start(db)
    fail_once(db, worker, job, 1)
    claim(db, worker)
    db.execute("update tallybook.worker set seen_at = '-infinity'")
    assert one(db, "select lost from tallybook.rescue()") == 1
    found = db.execute(
        "select w.name, a.started_at, a.error ->> 'worker', (a.error ->> 'started_at')::timestamptz,"
        " a.error - 'at' <> a.error, a.state from tallybook.attempt a join tallybook.worker w on w.id = a.worker_id"
        " where a.job_id = %s and a.error is not null order by a.attempt",
        [job],
    ).fetchall()
    assert [row[5] for row in found] == ["failed", "lost"]
    for name, started_at, said_name, said_start, ended, _ in found:
        assert (said_name, said_start, ended) == (name, started_at, True)
    errors = one(db, "select array(select e from jsonb_array_elements(errors) e) from tallybook.job")
    assert [error["started_at"] <= error["at"] for error in errors] == [True, True]


def test_error_history_is_bounded(db: Connection) -> None:
    """S4-13: of a job that fails again and again the first 10 errors and the newest 40 are kept."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send', max_attempts => 100)"), start(db)
    for n in range(1, 61):
        fail_once(db, worker, job, n)
    kept = one(db, "select array(select (e ->> 'attempt')::int from jsonb_array_elements(errors) e) from tallybook.job")
    assert kept == [*range(1, 11), *range(21, 61)]


def test_dead_retry_dead_keeps_all_errors(db: Connection) -> None:
    """S4-13: a retry by a person resets the count of failures and keeps the history."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send', max_attempts => 1)"), start(db)
    assert fail_once(db, worker, job, 1) == "dead"
    assert one(db, "select tallybook.retry(%s)", job) == 2
    assert see(db, "state, attempts, failures") == [("available", 1, 0)]
    assert fail_once(db, worker, job, 2) == "dead"
    assert see(db, "attempts, failures, jsonb_array_length(errors), last_error") == [(2, 1, 2, "no luck 2")]


def test_work_of_a_dead_worker_comes_back(db: Connection) -> None:
    """S4-20: jobs of a silent worker are available again after two looks of rescue; its late end is refused."""
    job, worker, now = one(db, "select tallybook.enqueue('mail', 'send')"), start(db), one(db, "select now()")
    lease = claim(db, worker)
    look = "select lost from tallybook.rescue('5 min', at => %s)"
    assert [one(db, look, now + timedelta(minutes=m)) for m in (3, 4, 6)] == [0, 0, 1]
    assert see(db, "state, attempts, crashes, failures") == [("available", 1, 1, 0)]
    assert one(db, "select tallybook.complete(%s, %s, 1)", lease, job) is False
    assert see(db, "state") == [("available",)]
    assert db.execute("select job_id, attempt from tallybook.claimed_jobs(%s)", [claim(db, start(db))]).fetchall() == [
        (job, 2)
    ]


def test_a_worker_that_beats_keeps_its_work(db: Connection) -> None:
    """S4-20: a job that runs for days is not taken from a worker that sends heartbeats."""
    one(db, "select tallybook.enqueue('mail', 'send')")
    worker, now = start(db), one(db, "select now()")
    claim(db, worker)
    for day in (1, 2, 3):
        db.execute("select tallybook.renew(%s, 0, at => %s)", [worker, now + day * DAY])
        assert one(db, "select lost from tallybook.rescue(at => %s)", now + day * DAY) == 0
    assert see(db, "state") == [("running",)]


def test_a_job_that_kills_its_workers_is_dead(db: Connection) -> None:
    """S4-20: a job whose worker died three times becomes a dead letter with the reason crashed."""
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    for _ in range(3):
        worker = start(db)
        claim(db, worker)
        assert one(db, "select tallybook.worker_stop(%s)", worker) == 1
    assert see(db, "id, state, reason, crashes, failures") == [(job, "dead", "crashed", 3, 0)]
    assert one(db, "select tallybook.retry(%s)", job) == 4


# Cancel and retry.


def test_cancel_says_what_it_means(db: Connection) -> None:
    """S4-14: cancel ends waiting and dead jobs as cancelled, asks running ones to stop, and leaves completed ones."""
    running, done, dead, waiting, scheduled = (
        one(db, "select tallybook.enqueue('mail', 'send', run_at => %s)", at)
        for at in [None, None, None, None, one(db, "select now() + interval '1 h'")]
    )
    lease = claim(db, start(db), limit=3)
    one(db, "select tallybook.complete(%s, %s, 1)", lease, done)
    one(db, "select tallybook.fail(%s, %s, 1, '{}', final => true)", lease, dead)
    said = [one(db, "select tallybook.cancel(%s, 'no need')", job) for job in (running, done, dead, waiting, scheduled)]
    assert said == ["cancelling", "completed", "cancelled", "cancelled", "cancelled"]
    assert see(db, "state") == [("running",), ("completed",), ("cancelled",), ("cancelled",), ("cancelled",)]
    assert see(db, "reason", f"id in ({dead}, {waiting}, {scheduled})") == [("no need",)] * 3


@pytest.mark.parametrize("end", ["fail", "snooze", "move", "worker dies"])
def test_a_cancel_outlives_the_attempt_it_met(db: Connection, end: str) -> None:
    """S4-14: a running job that was cancelled does not start again, even if its attempt ends in another way."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send')"), start(db)
    lease = claim(db, worker)
    assert one(db, "select tallybook.cancel(%s)", job) == "cancelling"
    if end == "fail":
        one(db, "select tallybook.fail(%s, %s, 1, '{}', retry_in => '0')", lease, job)
    elif end == "worker dies":
        one(db, "select tallybook.worker_stop(%s)", worker)
    else:
        one(
            db,
            f"select tallybook.{end}(%s, %s, 1{', %s' if end == 'snooze' else ''})",
            lease,
            job,
            *(["0"] if end == "snooze" else []),
        )
    assert see(db, "state") == [("cancelled",)]
    assert claimed_jobs(db, claim(db, start(db, tasks=["send"]))) == []
    assert see(db, "state") == [("cancelled",)]


@pytest.mark.direct("watches which session waits for which")
def test_a_cancel_that_meets_a_claim_by_id_is_not_lost(db: Connection, connect: Callable[..., Connection]) -> None:
    """S4-14: a cancel that waited for a claim by id returns cancelling, and the worker's heartbeat reports it."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send')"), start(db)
    claimer, person = connect(), connect()
    claimer.execute("begin")
    assert one(claimer, "select tallybook.claim_job(%s, %s, gen_random_uuid())", worker, job) is True
    with behind(person) as pool:
        waiting = pool.submit(one, person, "select tallybook.cancel(%s)", job)
        wait_until(lambda: waiting.done() or is_blocked(db, person), "the cancel has met the claim")
        claimer.execute("commit")
        assert waiting.result(60) == "cancelling"
    assert db.execute("select job_id from tallybook.renew(%s, 0, %s)", [worker, [job]]).fetchall() == [(job,)]


def test_a_cancelled_job_can_be_retried(db: Connection) -> None:
    """S4-14: a retry after a cancel creates another attempt, whether a worker met the cancel or not; it runs once."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send')"), start(db)
    one(db, "select tallybook.cancel(%s)", job)
    assert one(db, "select tallybook.retry(%s)", job) == 2
    assert see(db, "state, attempts") == [("available", 0)]
    one(db, "select tallybook.cancel(%s)", job)
    assert claimed_jobs(db, claim(db, worker)) == []
    assert one(db, "select tallybook.retry(%s)", job) == 3
    assert claimed_jobs(db, claim(db, worker)) == [job]
    assert see(db, "state, attempts") == [("running", 1)]


def test_a_scheduled_job_that_was_cancelled_can_be_retried(db: Connection) -> None:
    """S4-14: a retry of a job that was cancelled before its time undoes the cancel; the job runs when it is due."""
    job = one(db, "select tallybook.enqueue('mail', 'send', run_at => now() + interval '1 h')")
    one(db, "select tallybook.cancel(%s)", job)
    assert one(db, "select tallybook.retry(%s)", job) == 1
    assert see(db, "state") == [("scheduled",)]
    one(db, "select promoted from tallybook.promote(at => now() + interval '2 h')")
    assert claimed_jobs(db, claim(db, start(db))) == [job]


def test_a_job_whose_cancel_outlived_its_attempt_can_be_retried(db: Connection) -> None:
    """S4-14: a job shown as cancelled can be retried, even if the cancel met an attempt that has failed since."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send')"), start(db)
    lease = claim(db, worker)
    one(db, "select tallybook.cancel(%s)", job)
    one(db, "select tallybook.fail(%s, %s, 1, '{}', retry_in => '0')", lease, job)
    assert see(db, "state") == [("cancelled",)]
    assert one(db, "select tallybook.retry(%s)", job) == 3
    attempts = db.execute(
        "select job_id, attempt, coalesce(blocked_by = 'cancelled', false) from tallybook.claimed_jobs(%s)",
        [claim(db, worker)],
    ).fetchall()
    assert attempts == [(job, 3, False)]


def test_an_open_retry_holds_up_no_claim(db: Connection, connect: Callable[..., Connection]) -> None:
    """Trap 4: an open transaction that retried a cancelled job delays no claim of its lane."""
    job, other = (one(db, "select tallybook.enqueue('mail', 'send')") for _ in range(2))
    worker, person = start(db), connect()
    one(db, "select tallybook.cancel(%s)", job)
    person.execute("begin")
    one(person, "select tallybook.retry(%s)", job)
    db.execute("set lock_timeout = '2 s'")  # a wait would last until the retry's transaction ends
    assert claimed_jobs(db, claim(db, worker)) == [other]
    person.execute("rollback")


# Pause.


def test_a_paused_queue_is_not_claimed(db: Connection) -> None:
    """S5-11: pause and resume return whether they changed something; jobs of a paused queue are not claimed."""
    job, worker = one(db, "select tallybook.enqueue('mail', 'send')"), start(db)
    assert [one(db, "select tallybook.pause('mail')") for _ in range(2)] == [True, False]
    assert claimed_jobs(db, claim(db, worker)) == []
    assert [one(db, "select tallybook.resume('mail')") for _ in range(2)] == [True, False]
    assert claimed_jobs(db, claim(db, worker)) == [job]


# Bad input.


def test_enqueue_refuses_what_does_not_fit(db: Connection) -> None:
    """S5-13: each invalid argument of enqueue raises TB005 with a message that names it; nothing is written."""
    enqueues = [
        ("'mail', ''", "task name"),
        ("'mail', null", "task name"),
        ("'mail', 'a\nb'", "control or invisible characters"),
        ("'mail', ' send'", "space"),
        ("'mail', repeat('x', 201)", "200"),
        ("'', 'send'", "queue"),
        ("repeat('x', 65), 'send'", "64"),
        ("null, 'send'", "queue"),
        ("'mail', 'send', null", "args"),
        ("'mail', 'send', '[]'", "args"),
        ("'mail', 'send', '3'", "args"),
        (
            "'mail', 'send', jsonb_build_object('x',"
            " (select string_agg(md5(i::text), '') from generate_series(1, 40000) i))",
            "bytes",
        ),
        ("'mail', 'send', headers => '[]'", "headers"),
        ("'mail', 'send', priority => -1", "priority"),
        ("'mail', 'send', priority => 40000", "priority"),
        ("'mail', 'send', priority => null", "priority"),
        ("'mail', 'send', max_attempts => 0", "max_attempts"),
        ("'mail', 'send', max_attempts => 40000", "max_attempts"),
        ("'mail', 'send', unique_key => ''", "unique key"),
        ("'mail', 'send', unique_key => repeat('x', 513)", "unique key"),
    ]
    for arguments, says in enqueues:
        refused(db, "TB005", says, f"select tallybook.enqueue({arguments})")
    assert one(db, "select count(*) from tallybook.job") == 0


def test_enqueue_many_refuses_what_enqueue_refuses(db: Connection) -> None:
    """S5-13: a batch refuses what enqueue refuses, with TB005; nothing is written."""
    batches = [
        ("'{q}', '{a,b}', '{\"{}\"}'", "lengths"),
        ("'{q}', '{\" a\"}', '{\"{}\"}'", "job 1"),
        ("'{q}', '{\"a \"}', '{\"{}\"}'", "job 1"),
        ("'{q}', '{NULL}', '{\"{}\"}'", "job 1"),
        ("'{q}', '{a}', '{NULL}'", "job 1"),
        ("'{q}', '{a}', '{3}'", "job 1"),
        ("'{q}', '{a}', '{\"{}\"}', max_attempts => '{0}'", "job 1"),
        ("'{q}', '{a}', '{\"{}\"}', headers => '{3}'", "job 1"),
        ("'{q}', '{a}', '{\"{}\"}', priorities => '{-1}'", "priority"),
        ("'{q}', '{a}', '{\"{}\"}', priorities => '{40000}'", "priority"),
        ("'{\"\"}', '{a}', '{\"{}\"}'", "queue"),
        ("'{NULL}', '{a}', '{\"{}\"}'", "queue"),
        ("'{q}', '{a}', '{\"{}\"}', unique_keys => '{\"\"}'", "unique key"),
    ]
    for arguments, says in batches:
        refused(db, "TB005", says, f"select tallybook.enqueue_many({arguments})")
    assert one(db, "select count(*) from tallybook.job") == 0


def test_args_that_are_no_json_are_refused(db: Connection) -> None:
    """S5-13: text that is not JSON raises PostgreSQL's own error, in a batch too; nothing is written."""
    refused(db, "22P02", "json", "select tallybook.enqueue('q', 'a', '{')")
    refused(db, "22P02", "json", "select tallybook.enqueue_many('{q}', '{a}', array['{1}'])")
    assert one(db, "select count(*) from tallybook.job") == 0


def test_large_args_that_a_table_has_compressed_are_refused(db: Connection) -> None:
    """S5-11: the size of args is that of their text, also where a column stores them in a few kilobytes."""
    db.execute("create temp table t as select jsonb_build_object('a', repeat('x', 1200000)) as args")
    assert one(db, "select pg_column_size(args) from t") < 20_000
    refused(db, "TB005", "args have 1200009 bytes", "select tallybook.enqueue('q', 'a', args) from t")


def test_a_verb_on_what_is_not_there(db: Connection) -> None:
    """S5-11: TB002 for an unknown job or queue, TB005 for an invalid argument, TB006 for an unknown worker, by name."""
    unknown = [
        ("TB002", "no job 7", "select tallybook.cancel(7)"),
        ("TB002", "no job 7", "select tallybook.retry(7)"),
        ("TB002", "no job 7", "select tallybook.claim_job({worker}, 7, gen_random_uuid())"),
        ("TB002", 'no queue "nobody"', "select tallybook.pause('nobody')"),
        ("TB002", 'no queue "nobody"', "select tallybook.resume('nobody')"),
        ("TB005", "not dead or cancelled", "select tallybook.retry({job})"),
        ("TB005", "error is one JSON object", "select tallybook.fail(gen_random_uuid(), {job}, 1, '\"text\"')"),
        ("TB005", "lease", "select tallybook.claim({worker}, '{{mail}}', '{{1}}', null)"),
        ("TB005", "queue", "select tallybook.worker_start('w', array[''])"),
        ("TB006", "worker 99", "select tallybook.claim(99, '{{mail}}', '{{1}}', gen_random_uuid())"),
        ("TB006", "worker 99", "select tallybook.claim_job(99, {job}, gen_random_uuid())"),
        ("TB006", "worker 99", "select tallybook.renew(99, 0)"),
    ]
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    worker = start(db)
    for sqlstate, says, call in unknown:
        refused(db, sqlstate, says, call.format(worker=worker, job=job))
    assert see(db, "state") == [("available",)]


def test_times_far_away_are_kept(db: Connection) -> None:
    """F39: a run_at in the year 9999 or later is scheduled, and an infinite expires_at never comes."""
    for option in ("run_at => '9999-12-31'", "run_at => '12000-01-01'", "expires_at => 'infinity'"):
        db.execute(f"select tallybook.enqueue('mail', 'send', {option})")
    db.execute("select tallybook.promote()")
    shown = db.execute("select state, extract(year from run_at)::int from tallybook.job order by id").fetchall()
    assert shown[:2] == [("scheduled", 9999), ("scheduled", 12000)] and shown[2][0] == "available"


def test_a_heartbeat_without_a_claim_id_gives_up_no_job(db: Connection) -> None:
    """renew with null for open_from, as min() of no claims is, means 0: the worker's open jobs are still given back."""
    worker = one(db, "select tallybook.worker_start('w', '{mail}')")
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    db.execute("select tallybook.claim(%s, '{mail}', '{1}', gen_random_uuid())", [worker])
    db.execute("select tallybook.renew(%s, null)", [worker])
    db.execute("select tallybook.worker_stop(%s)", [worker])
    assert db.execute("select id, state from tallybook.job").fetchall() == [(job, "available")]


def test_a_claimed_job_is_not_given_back_for_ever(db: Connection) -> None:
    """An infinite delay is refused by unclaim, as by snooze; before PostgreSQL 17 there is no such interval."""
    worker = one(db, "select tallybook.worker_start('w', '{mail}')")
    job, lease = one(db, "select tallybook.enqueue('mail', 'send')"), one(db, "select gen_random_uuid()")
    db.execute("select tallybook.claim(%s, '{mail}', '{1}', %s)", [worker, lease])
    for verb in ("unclaim", "snooze"):
        with pytest.raises(psycopg.Error, match=r"delay is infinity|invalid input syntax"):
            db.execute(f"select tallybook.{verb}(%s, %s, 1, 'infinity')", [lease, job])
    assert one(db, "select state from tallybook.job") == "running"


def test_an_end_by_a_stranger_is_refused(db: Connection) -> None:
    """S4-08: a caller without the lease of the attempt ends nothing, and is refused."""
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    claim(db, start(db))
    for verb in ("fail(%s, %s, 1, '{}')", "snooze(%s, %s, 1, '0')", "move(%s, %s, 1)", "cancel_running(%s, %s, 1)"):
        assert one(db, f"select tallybook.{verb}", uuid.uuid4(), job) == "refused"
    assert one(db, "select tallybook.complete_many(%s, %s, '{1}')", [uuid.uuid4()], [job]) == [job]
    assert see(db, "state") == [("running",)]


# Helpers.


def see(db: Connection, columns: str, where: str = "true") -> list[tuple[Any, ...]]:
    """Return columns of the job view, in the order of the ids."""
    order = "" if "order by" in where else " order by id"
    return db.execute(f"select {columns} from tallybook.job where {where}{order}").fetchall()  # noqa: S608


def start(conn: Connection, *queues: str, tasks: list[str] | None = None) -> int:
    return int(one(conn, "select tallybook.worker_start('w', %s, %s::text[])", list(queues or ("mail",)), tasks or []))


def claim(conn: Connection, worker: int, queue: str = "mail", *, limit: int = 100) -> uuid.UUID:
    """Claim and return the lease, even if nothing was taken."""
    lease = uuid.uuid4()
    one(conn, "select jobs from tallybook.claim(%s, array[%s], array[%s], %s)", worker, queue, limit, lease)
    return lease


def fail_once(db: Connection, worker: int, job: int, attempt: int, limit: int | None = None) -> str:
    """Claim the job, and fail it so that it may run again at once."""
    lease = claim(db, worker)
    error = json.dumps({"message": f"no luck {attempt}"})
    call = "select tallybook.fail(%s, %s, %s, %s, retry_in => '0', max_attempts => %s)"
    return str(one(db, call, lease, job, attempt, error, limit))


def refused(db: Connection, sqlstate: str, says: str, call: str) -> None:
    with pytest.raises(psycopg.Error) as caught:
        db.execute(call)
    assert (caught.value.sqlstate, says in str(caught.value)) == (sqlstate, True), f"{call}: {caught.value}"


# Crash and unclaim.


def test_a_crash_ends_one_attempt_as_lost(db: Connection) -> None:
    """F24 P8: `crash` counts a crash, no failure; the job waits 1 s, then 2 s; at the third it is dead as crashed."""
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    worker = start(db)
    now = one(db, "select clock_timestamp()")
    said = []
    for attempt in (1, 2, 3):
        lease = claim(db, worker)
        arguments = [lease, job, attempt, '{"type": "ProcessDied"}', now]
        said.append(one(db, "select tallybook.crash(%s, %s, %s, %s, at => %s)", *arguments))
        run_at = db.execute("select run_at from tallybook.scheduled where job_id = %s", [job]).fetchone()
        if run_at:
            assert run_at[0] == now + timedelta(seconds=2 ** (attempt - 1))
            now = run_at[0]
            db.execute("select tallybook.promote(at => %s)", [now])
    assert said == ["scheduled", "scheduled", "dead"]
    assert see(db, "state, reason, attempts, failures, crashes") == [("dead", "crashed", 3, 0, 3)]
    ends = db.execute("select state, error ->> 'type' from tallybook.attempt where job_id = %s order by attempt", [job])
    assert ends.fetchall() == [("lost", "ProcessDied")] * 3


def test_a_crash_is_refused_to_whoever_lost_the_attempt(db: Connection) -> None:
    """P5: after a rescue, or repeated, `crash` is refused and changes nothing."""
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    worker = start(db)
    lease = claim(db, worker)
    assert one(db, "select tallybook.worker_stop(%s)", worker) == 1
    assert one(db, "select tallybook.crash(%s, %s, 1, '{}')", lease, job) == "refused"
    assert one(db, "select tallybook.unclaim(%s, %s, 1)", lease, job) == "refused"
    lease = claim(db, start(db))
    assert one(db, "select tallybook.crash(%s, %s, 2, '{}')", lease, job) == "scheduled"
    assert one(db, "select tallybook.crash(%s, %s, 2, '{}')", lease, job) == "refused"
    assert see(db, "state, crashes") == [("scheduled", 2)]


def test_what_was_put_back_was_not_started(db: Connection) -> None:
    """`unclaim` returns an attempt that has not started, at once or for later, and none of the counts increases."""
    job = one(db, "select tallybook.enqueue('mail', 'send')")
    worker = start(db)
    lease = claim(db, worker)
    assert one(db, "select tallybook.unclaim(%s, %s, 1)", lease, job) == "available"
    lease = claim(db, worker)
    assert one(db, "select tallybook.unclaim(%s, %s, 2, '1 hour')", lease, job) == "scheduled"
    assert see(db, "state, attempt, attempts, failures, crashes") == [("scheduled", 3, 0, 0, 0)]


def test_a_job_is_buried_only_for_what_it_did_alone(db: Connection) -> None:
    """F24: jobs that were lost together are not dead at eight crashes; one that is then lost alone is, at nine."""
    jobs = [one(db, "select tallybook.enqueue('mail', 'send')") for _ in range(2)]
    for crashes in range(1, 9):
        worker = start(db)
        claim(db, worker)
        assert one(db, "select tallybook.worker_stop(%s)", worker) == 2
        assert see(db, "state, crashes") == [("available", crashes)] * 2
    worker = start(db)
    lease = claim(db, worker)
    assert one(db, "select tallybook.complete(%s, %s, 9)", lease, jobs[0])
    assert one(db, "select tallybook.worker_stop(%s)", worker) == 1
    assert see(db, "id, state, reason, crashes") == [(jobs[0], "completed", None, 8), (jobs[1], "dead", "crashed", 9)]


def test_jobs_that_are_lost_together_end_as_well(db: Connection) -> None:
    """P8: workers that know nothing of suspects do not run a deadly job forever: at nine crashes it is dead."""
    for _ in range(2):
        one(db, "select tallybook.enqueue('mail', 'send')")
    for _ in range(9):
        worker = start(db)
        claim(db, worker)
        assert one(db, "select tallybook.worker_stop(%s)", worker) == 2
    assert see(db, "state, reason, crashes") == [("dead", "crashed", 9)] * 2
