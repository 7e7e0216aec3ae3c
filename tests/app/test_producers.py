"""Every kind of connection that a user may have: one call on it, inside the user's own transaction."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from support.callers import Caller, asyncpg_options
from tallybook import App, Constant
from tallybook.errors import ConnectionNotSupported, InvalidArgument, PayloadError, UnknownJob, UnknownQueue

app = App("shop")
WORDS = 'a "quoted" \\ word, {1,2} NULL %s :name $1 \u2028 🦆'


@app.task(queue="mail")
async def send_welcome(user_id: int, *, lang: str = "en") -> str:
    return f"{user_id} {lang}"


@app.task(unique=("order_id",), max_attempts=3)
def charge(order_id: int, note: str = "") -> None:
    pass


def ids(db: Any) -> list[int]:
    return [row[0] for row in db.execute("select id from tallybook.job order by id")]


def test_enqueue_is_part_of_the_transaction(caller: Caller, look: Any) -> None:
    """S4-01 S4-21: submission and job are committed together or not at all, on every connection."""
    look.execute("drop table if exists submission; create table submission (id int)")
    caller.execute("insert into submission values (1)")
    caller.enqueue(send_welcome, 1)
    assert ids(look) == []
    caller.rollback()
    caller.execute("insert into submission values (2)")
    job = caller.enqueue(send_welcome, 2, lang=WORDS)
    caller.commit()
    assert ids(look) == [job.id]
    assert job.created
    assert look.execute("select s.id, j.args from submission s, tallybook.job j").fetchall() == [
        (2, {"user_id": 2, "lang": WORDS})
    ]


def test_savepoints(caller: Caller, look: Any) -> None:
    """A savepoint that is rolled back removes its jobs, and the others stay."""
    kept = caller.enqueue(send_welcome, 1)
    with pytest.raises(KeyError), caller.savepoint():
        caller.enqueue(send_welcome, 2)
        raise KeyError
    with caller.savepoint():
        also = caller.enqueue(send_welcome, 3)
    caller.commit()
    assert ids(look) == [kept.id, also.id]


def test_verbs(caller: Caller, look: Any) -> None:
    """Options, bulk, get, cancel, and the server's refusals are the same on every connection."""
    at = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    calls = [send_welcome.with_(run_at=at, priority=0, headers={"t": WORDS}).job(1), charge.job(7), charge.job(7)]
    jobs = caller.enqueue_many(app, (call for call in calls))
    assert [job.created for job in jobs] == [True, True, False]
    assert jobs[1].id == jobs[2].id
    info = caller.ask(app.get(jobs[0]))
    assert (info.state, info.run_at, info.priority, info.queue) == ("scheduled", at, 0, "mail")
    assert (info.headers, info.args, info.max_attempts) == ({"t": WORDS}, {"user_id": 1}, None)
    assert caller.ask(app.cancel(jobs[0], WORDS)) == "cancelled"
    with pytest.raises(UnknownJob, match="there is no job 999") as caught, caller.savepoint():
        caller.ask(app.cancel(999))
    assert caught.value.sqlstate == "TB002"
    assert isinstance(caught.value.__cause__, Exception)
    with pytest.raises(InvalidArgument, match=f"job {jobs[1].id} is not dead") as refused, caller.savepoint():
        caller.ask(app.retry(jobs[1]))
    assert refused.value.detail
    caller.commit()
    assert len(ids(look)) == 2


def test_delay_counts_by_the_servers_clock(db: Any) -> None:
    """A delay counts by the server's clock, one by one and in bulk, also beside jobs without one."""
    timed = send_welcome.with_(delay="1 hour 30 min")
    jobs = [timed.enqueue_sync(db, 1), *app.enqueue_many_sync(db, [timed.job(2), send_welcome.job(3)])]
    rows = [
        db.execute(
            "select state, run_at - enqueued_at < interval '90 min', run_at - enqueued_at > interval '89 min'"
            " from tallybook.job where id = %s",
            [job.id],
        ).fetchone()
        for job in jobs
    ]
    assert rows == [("scheduled", True, True), ("scheduled", True, True), ("available", True, False)]


def test_settings_of_the_connection_stay(connect: Any) -> None:
    """The caller's autocommit, row factory and transaction state are as before."""
    conn = connect(row_factory=psycopg.rows.dict_row)
    send_welcome.enqueue_sync(conn, 1)
    assert conn.autocommit
    assert conn.row_factory is psycopg.rows.dict_row
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert conn.execute("select 1 as one").fetchone() == {"one": 1}


def test_other_errors_pass_unchanged(empty_dsn: str) -> None:
    """An error that is not Tallybook's reaches the caller as the driver raised it."""
    with psycopg.connect(empty_dsn) as conn, pytest.raises(psycopg.errors.InvalidSchemaName):
        send_welcome.enqueue_sync(conn, 1)


def test_bad_values_are_refused_before_anything_is_sent(connect: Any) -> None:
    """S5-01: a value that cannot be stored raises PayloadError with its path, and no transaction begins."""
    conn = connect(autocommit=False)
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for value, path in [
        ("a\0b", r"\$\.lang"),
        ("\ud800", r"\$\.lang"),
        (float("nan"), r"\$\.lang"),
        ({"at": datetime(2030, 1, 1)}, r"\$\.lang\.at"),
        ({1: 2}, r"\$\.lang"),
        (deep, r"\$\.lang"),
        ("x" * 1_000_001, r"\$"),
        (object(), r"\$\.lang"),
    ]:
        wrong: Any = value
        with pytest.raises(PayloadError, match=path):
            send_welcome.enqueue_sync(conn, 1, lang=wrong)
        with pytest.raises(PayloadError):
            app.enqueue_many_sync(conn, (send_welcome.job(i, lang=wrong if i == 2 else "en") for i in range(3)))
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_bulk_skips_live_keys(db: Any) -> None:
    """S3-11: one call enqueues 300 jobs; those whose key is live are skipped and reported, in order."""
    before = {n: charge.enqueue_sync(db, n).id for n in range(0, 300, 3)}
    report = app.enqueue_many_sync(db, [charge.job(n) for n in range(300)])
    assert [job.created for job in report] == [n % 3 != 0 for n in range(300)]
    assert [job.id for job in report[::3]] == list(before.values())
    assert len(ids(db)) == 300
    assert app.enqueue_many_sync(db, []) == []


def test_an_open_transaction_holds_up_nobody(connect: Any, db: Any) -> None:
    """S1-01: an enqueue returns at once while another transaction that enqueued on the queue stays open."""
    slow = connect(autocommit=False)
    send_welcome.enqueue_sync(slow, 1)
    db.execute("set statement_timeout = '2s'")
    job = send_welcome.enqueue_sync(db, 2)
    assert ids(db) == [job.id]


async def test_active_key_is_a_silent_no_op(dsn: str, db: Any) -> None:
    """S1-05: twenty producers enqueue one key at the same moment: one job, and no error."""

    async def produce() -> Any:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            return await charge.enqueue(conn, 42)

    report = await asyncio.gather(*[produce() for _ in range(20)])
    assert sum(job.created for job in report) == 1
    assert {job.id for job in report} == set(ids(db))


async def test_key_is_free_after_the_end(dsn: str, db: Any) -> None:
    """S1-06: after a job has completed, or died, its key can be used again."""
    own = App("own", dsn=dsn)

    @own.task(unique=True, max_attempts=1)
    async def refresh(asset: str) -> None:
        if asset == "bad":
            raise LookupError(asset)

    for asset, state in [("good", "completed"), ("bad", "dead")]:
        first = refresh.enqueue_sync(db, asset)
        assert refresh.enqueue_sync(db, asset).created is False
        await own.drain()
        assert own.get(first).sync(db).state == state
        again = refresh.enqueue_sync(db, asset)
        assert again.created
        assert again.id != first.id
        await own.drain()


async def test_pipeline_in_the_handlers_transaction(dsn: str, db: Any) -> None:
    """S5-12: a handler saves its result and enqueues the next step in one transaction, or neither."""
    own = App("own", dsn=dsn)
    db.execute("create table page (id int, body text)")

    @own.task(retry=Constant(timedelta(hours=1)))
    async def fetch(page: int) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await conn.execute("insert into page values (%s, 'text')", [page])
            await index.enqueue(conn, page)
            if page == 13:
                raise LookupError("after the enqueue")

    @own.task
    async def index(page: int) -> None:
        db.execute("update page set body = upper(body) where id = %s", [page])

    own.enqueue_many_sync(db, [fetch.job(1), fetch.job(13)])
    await own.drain()
    assert db.execute("select id, body from page").fetchall() == [(1, "TEXT")]
    assert db.execute("select task, state from tallybook.job order by id").fetchall() == [
        ("fetch", "completed"),
        ("fetch", "retrying"),
        ("index", "completed"),
    ]


def test_enqueue_inside_the_business_statement(connect: Any, db: Any) -> None:
    """S5-01: one round trip saves the row and enqueues, in plain SQL, and the task's function can load the args."""
    conn = connect(autocommit=False)
    conn.execute("create table customer (id int generated always as identity, name text)")
    conn.execute(
        "with c as (insert into customer (name) values ('Ada') returning id)"
        " select tallybook.enqueue('mail', 'send_welcome', jsonb_build_object('user_id', c.id)) from c"
    )
    assert ids(db) == []
    conn.commit()
    (args,) = db.execute("select args from tallybook.job").fetchone()
    assert send_welcome.args.load(args) == ([], {"user_id": 1})


async def test_wrong_connections_are_named(dsn: str) -> None:
    """A wrong object, or a connection of the other kind, is refused with the name of the right one."""
    with psycopg.connect(dsn) as conn:
        with pytest.raises(ConnectionNotSupported, match=r"psycopg\.Connection .* this one to enqueue_sync\(\)"):
            await send_welcome.enqueue(conn, 1)
        with conn.cursor() as cursor, pytest.raises(ConnectionNotSupported, match=r"psycopg\.Cursor"):
            send_welcome.enqueue_sync(cursor, 1)
    async with await psycopg.AsyncConnection.connect(dsn) as aconn:
        with pytest.raises(ConnectionNotSupported, match=r"this one to \.on\(conn\)"):
            app.cancel(1).sync(aconn)
    for wrong in (42, None, object(), dsn, "nowhere"):
        with pytest.raises(ConnectionNotSupported, match="psycopg Connection"):
            send_welcome.enqueue_sync(wrong, 1)
        with pytest.raises(ConnectionNotSupported, match="asyncpg"):
            await send_welcome.enqueue(wrong, 1)


async def test_pools_and_other_databases_are_told(dsn: str) -> None:
    """A pool or engine is refused with a hint to take one connection; SQLite, as it is not PostgreSQL."""
    import asyncpg
    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    async with asyncpg.create_pool(**asyncpg_options(dsn), min_size=0) as pool:
        with pytest.raises(ConnectionNotSupported, match="one connection out of it"):
            await send_welcome.enqueue(pool, 1)
    engine = sa.create_engine("sqlite://")
    with pytest.raises(ConnectionNotSupported, match="one connection out of it"):
        send_welcome.enqueue_sync(engine, 1)
    with Session(engine) as session, pytest.raises(ConnectionNotSupported, match="to PostgreSQL"):
        send_welcome.enqueue_sync(session, 1)


def test_tracing_proxies_pass(connect: Any, db: Any) -> None:
    """A proxy around a connection, as tracing libraries add, counts as that connection."""

    class Proxy:
        def __init__(self, conn: Any) -> None:
            self._conn = conn

        def __getattribute__(self, name: str) -> Any:
            return getattr(object.__getattribute__(self, "_conn"), name)

    job = send_welcome.enqueue_sync(Proxy(connect()), 1)
    assert ids(db) == [job.id]


def test_queue_verbs_name_the_queue(db: Any) -> None:
    """Pause and resume return whether they changed something; pause refuses an unknown queue."""
    with pytest.raises(UnknownQueue, match="nowhere"):
        app.queues.pause("nowhere").sync(db)
    send_welcome.enqueue_sync(db, 1)
    assert [app.queues.pause("mail", "me").sync(db) for _ in range(2)] == [True, False]
    assert [app.queues.resume("mail").sync(db) for _ in range(2)] == [True, False]
    assert timedelta(0) <= datetime.now(UTC) - app.get(ids(db)[0]).sync(db).enqueued_at < timedelta(minutes=5)
