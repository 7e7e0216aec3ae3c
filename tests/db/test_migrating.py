"""Migrations under load, and programs that meet a schema of another version."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cli import invoke
from support.database import one
from support.waiting import wait_until
from support.worker_process import Workers, note
from support.workers import Jobs, eventually, working
from tallybook import App
from tallybook._db import migrate as schema
from tallybook._db import schema_load
from tallybook._db.sql_lines import commented, profiled
from tallybook.errors import SchemaBusy, SchemaMissing, SchemaTooNew, SchemaTooOld
from tallybook.testing import drain

pytestmark = pytest.mark.servers
NEWEST = schema.latest()
NEXT = f"{NEWEST + 1:04d}_next.sql"
# A possible next release: a column in the ledger and one in the ledger of keys, and an unchanged works_from.
TEXT = "alter table tallybook.entry add column anything int;\nalter table tallybook.unique_key add column anything int;"

HERE = " and database = (select oid from pg_database where datname = current_database())"
"""All tests' databases are copies of one, so their tables have the same oids."""


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is of the next release, which has one more migration."""
    known = schema.migrations()
    with monkeypatch.context() as patched:
        patched.setattr(schema, "migrations", lambda: [*known, (NEWEST + 1, NEXT, TEXT)])
        patched.setattr(schema, "latest", lambda: NEWEST + 1)
        yield


def columns(db: Any) -> int:
    """Count the new columns that are there."""
    tables = "('tallybook.entry'::regclass, 'tallybook.unique_key'::regclass)"
    return int(one(db, f"select count(*) from pg_attribute where attname = 'anything' and attrelid in {tables}"))  # noqa: S608


def migrating(dsn: str) -> tuple[Future[list[str]], list[str]]:
    """Begin a migration in a thread; return its end to come, and the transactions that it has waited for so far."""
    waited: list[str] = []

    def migrate() -> list[str]:
        with psycopg.connect(dsn, autocommit=True) as conn:
            return schema.migrate(conn, on_wait=waited.append)

    return ThreadPoolExecutor(1).submit(migrate), waited


@pytest.mark.parametrize("level", ["read committed", "serializable"])
def test_a_migration_that_waits_for_the_first_one_finds_it_done(empty_dsn: str, level: str) -> None:
    """F33: of two first migrations one runs and the other finds it done, whatever the isolation level of the role."""
    with psycopg.connect(empty_dsn, autocommit=True) as holder, holder.transaction():
        name = sql.Identifier(holder.info.dbname)
        with psycopg.connect(empty_dsn, autocommit=True) as other:
            other.execute(sql.SQL("alter database {} set default_transaction_isolation = {}").format(name, level))
        holder.execute("select pg_advisory_xact_lock(1413565440, 0)")
        both = [migrating(empty_dsn)[0] for _ in range(2)]
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted and database = (select oid"
        wait_until(lambda: one(holder, waiting + " from pg_database where datname = current_database())") == 2, "two")
    assert sorted(len(migration.result(60)) for migration in both) == [0, 2]


@pytest.mark.parametrize("setting", ["statement_timeout", "lock_timeout", "transaction_timeout"])
def test_no_timeout_of_a_role_ends_a_migration(empty_dsn: str, setting: str) -> None:
    """A migration takes the time that it needs, whatever the timeouts of the role that runs it."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        if not conn.execute("select 1 from pg_settings where name = %s", [setting]).fetchone():
            pytest.skip("PostgreSQL 17 and newer have it")
        conn.execute(sql.SQL("set {} = '100ms'").format(sql.Identifier(setting)))
        assert len(schema.migrate(conn)) == 2


# Under load


@pytest.mark.slow
@pytest.mark.direct("tells sessions by their process")
def test_a_migration_lets_everybody_by_while_a_transaction_holds_a_table(
    dsn: str, db: Any, connect: Any, next_release: None
) -> None:
    """F33: while a transaction holds the ledger, the migration names it and lets producers pass between its tries."""
    holder = connect(autocommit=False)
    holder.execute("select tallybook.enqueue('default', 'held')")
    producer = connect()
    producer.execute("set application_name = 'producer'; set statement_timeout = '5s'")
    migration, waited = migrating(dsn)
    wait_until(lambda: waited, "it has met the transaction")
    for _ in range(20):  # each would wait forever behind a waiting ALTER TABLE
        producer.execute("select tallybook.enqueue('default', 'other', unique_key => gen_random_uuid()::text)")
    wait_until(lambda: len(waited) > 1, "it has tried again")
    assert columns(db) == 0
    assert "idle in transaction" in waited[0] and str(holder.info.backend_pid) in waited[0]
    holder.commit()
    assert migration.result(60)[0] == f"migrations/{NEXT}"
    assert columns(db) == 2
    assert schema.info(db).version == NEWEST + 1


@pytest.mark.slow
def test_without_the_guard_producers_wait_as_long_as_the_transaction(
    dsn: str, db: Any, connect: Any, next_release: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F33: control: without the guard a migration blocks every producer behind the transaction."""
    monkeypatch.setattr(schema, "take", lambda *args, **options: None)
    holder = connect(autocommit=False)
    holder.execute("select tallybook.enqueue('default', 'held')")
    migration, _ = migrating(dsn)
    waiting = "select from pg_locks where relation = 'tallybook.entry'::regclass and not granted" + HERE
    wait_until(lambda: db.execute(waiting).fetchall(), "ALTER TABLE waits")
    producer = connect()
    producer.execute("set statement_timeout = '3s'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        producer.execute("select tallybook.enqueue('default', 'other')")
    holder.commit()
    migration.result(60)


@pytest.mark.slow
def test_no_users_transaction_pays_for_a_migration(dsn: str, db: Any, connect: Any, next_release: None) -> None:
    """F33: a producer that holds one table and needs another never loses a deadlock with the migration."""
    producer = connect(autocommit=False)
    producer.execute("select tallybook.enqueue('default', 'first')")  # holds entry
    migration, waited = migrating(dsn)
    for n in range(3):  # whatever the migration holds by now, this gets through
        seen = len(waited)
        producer.execute("select tallybook.enqueue('default', 'second', unique_key => %s)", (f"k{n}",))
        producer.execute("select count(*) from tallybook.attempt")
        wait_until(lambda seen=seen: len(waited) > seen, "the migration has given way")  # type: ignore[misc]
    producer.commit()
    assert migration.result(60)


@pytest.mark.direct("tells sessions by their process")
def test_a_migration_gives_up_after_its_patience(dsn: str, db: Any, connect: Any, next_release: None) -> None:
    """F33: if a transaction never ends, SchemaBusy names who holds the tables, and nothing is changed."""
    holder = connect(autocommit=False)
    holder.execute("select count(*) from tallybook.job")  # a reader is enough
    with pytest.raises(SchemaBusy, match="idle in transaction") as caught, connect() as conn:
        schema.migrate(conn, patience=timedelta(0))
    assert str(holder.info.backend_pid) in (caught.value.by or "")
    assert columns(db) == 0


@pytest.mark.slow
@pytest.mark.direct("watches which session waits for which")
def test_two_migrations_at_once_under_load_are_one(dsn: str, db: Any, connect: Any, next_release: None) -> None:
    """F33: of two migrations one runs and the other finds it done, while a producer and a worker continue."""
    stop = threading.Event()
    enqueued: list[int] = []

    def produce() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not stop.is_set():
                enqueued.append(note.with_(unique=f"k{len(enqueued)}").enqueue_sync(conn, len(enqueued)).id)

    with Workers(dsn, db) as workers, ThreadPoolExecutor(1) as pool:
        worker = workers.start()
        producing = pool.submit(produce)
        try:
            wait_until(lambda: len(enqueued) > 50, "jobs come in")
            both = [migrating(dsn), migrating(dsn)]
            assert sorted(len(migration.result(60)) for migration, _ in both) == [0, 2]
            seen = len(enqueued)
            wait_until(lambda: len(enqueued) > seen + 50, "jobs come in afterwards")
        finally:
            stop.set()
        producing.result(20)  # the producer had no error
        ran = "select n from ran order by n"
        wait_until(lambda: len(db.execute(ran).fetchall()) >= len(enqueued), "every job has run", seconds=30)
        assert db.execute(ran).fetchall() == [(n,) for n in range(len(enqueued))]
        assert worker.process.poll() is None and len(workers.ids(worker)) == 1


@pytest.mark.direct("watches which session waits for which")
def test_a_migration_that_waited_sees_what_the_other_has_installed(empty_dsn: str) -> None:
    """S3-41: a migration that was second finds the first one's schema, although it had found none before its wait."""
    with (
        psycopg.connect(empty_dsn, autocommit=True) as one,
        psycopg.connect(empty_dsn, autocommit=True) as two,
        ThreadPoolExecutor(1) as pool,
    ):
        assert schema.info(two).version == 0
        with one.transaction():
            one.execute("select pg_advisory_xact_lock(1413565440, 0)")
            migrating = pool.submit(schema.migrate, two)
            waits = f"select from pg_locks where locktype = 'advisory' and not granted and pid = {two.info.backend_pid}"
            wait_until(lambda: one.execute(waits).fetchall(), "it waits for the lock")
            # So little that PostgreSQL sends no signal to empty the other session's caches.
            one.execute("create schema tallybook")
            one.execute("create table tallybook.installation as select 99 version, 99 works_from, '' routines, 0 node")
        with pytest.raises(SchemaTooNew):
            migrating.result(60)


@pytest.mark.slow
def test_migrate_says_whom_it_lets_by(dsn: str, db: Any, connect: Any, next_release: None) -> None:
    """F33: the command line names the blocking transaction."""
    holder = connect(autocommit=False)
    holder.execute("set application_name = 'report'")
    holder.execute("select tallybook.enqueue('default', 'held')")
    with ThreadPoolExecutor(1) as pool:
        command = pool.submit(invoke, "migrate", to=dsn)
        blocked = "select from pg_locks where not granted and relation is not null" + HERE
        wait_until(lambda: db.execute(blocked).fetchall(), "it waits")
        wait_until(lambda: not db.execute(blocked).fetchall(), "it has let it by")
        wait_until(lambda: db.execute(blocked).fetchall(), "it tries again, so it has said who it was")
        holder.commit()
        result = command.result(30)
    assert result.exit_code == 0, result.output
    assert "tables are in use by report (process" in result.output
    assert f"upgraded schema tallybook (version {NEWEST + 1})" in result.output


def test_a_profile_above_a_function_is_in_the_head_that_is_installed(db: Any) -> None:
    """`-- profile: NAME` adds its settings to the function below, and is refused above anything else."""
    (settings,) = db.execute("select proconfig from pg_proc where proname = 'claim'").fetchone()
    assert {"jit=off", "enable_seqscan=off", "plan_cache_mode=force_generic_plan"} <= set(settings)
    head = "-- rights: worker\ncreate or replace function f() returns int language sql"
    made = f"-- profile: nojit\n{head} as $$ select 1 $$;\n"
    assert profiled(made) == f"{head}\nset jit = off\nas $$ select 1 $$;\n"
    own = "create or replace function f() returns int language sql\nset jit = on  -- why\nas $$ select 1 $$;\n"
    assert profiled("-- profile: nojit\n" + own) == own.replace("\nset jit", "\nset jit = off\nset jit")
    for lost in ("-- profile: nojit\n", "-- profile: nojit\ncreate view v as select 1;\n"):
        with pytest.raises(ValueError, match="no function is below: -- profile: nojit"):
            profiled(lost)


def test_a_line_above_a_column_is_its_comment_in_the_database(db: Any) -> None:
    """Each `-->` line of the files is a comment of its table, view or column, for \\d+ in psql."""
    comment = (
        "select col_description(a.attrelid, a.attnum) from pg_attribute a"
        " where (a.attrelid, a.attname) = (%s::regclass, %s)"
    )
    found = db.execute(comment, ["tallybook.entry", "max_attempts"]).fetchone()[0]
    assert found == "How many failures end the job; null: the limit of its task or its queue, or 5."
    made = "--> One row\n--> per job.\ncreate table tallybook.one (\n  a int,\n  --> Yours.\n  b int\n);\n"
    assert commented(made) == (
        "create table tallybook.one (\n  a int,\n  b int\n);\n"
        "comment on table tallybook.one is 'One row per job.';\ncomment on column tallybook.one.b is 'Yours.';\n"
    )
    with pytest.raises(ValueError, match="no table, view or column is below: Nobody's"):
        commented("--> Nobody's\nselect 1;\n")
    for lost in ("--> Nobody's\n", "--> One.\ncreate table tallybook.one (a int)\n"):
        with pytest.raises(ValueError, match="no statement ends below"):
            commented(lost)


def test_the_tables_of_a_migration_are_found() -> None:
    """A migration locks the tables that it alters, drops or makes an index on."""
    text = "alter table tallybook.a add x int;\ncreate index i on tallybook.b (x);\n"
    text += "select * from tallybook.c; drop table tallybook.d;"
    assert schema_load.altered([text, TEXT]) == {"a", "b", "d", "entry", "unique_key"}


# Another version


def at_version(db: Any, version: int, works_from: int) -> None:
    db.execute("update tallybook.installation set version = %s, works_from = %s", (version, works_from))


def test_a_newer_schema_that_works_with_this_release(dsn: str, db: Any) -> None:
    """F32, P12: a worker and the command line of this release work with a newer schema that supports them."""
    at_version(db, NEWEST + 5, NEWEST)
    app = App("shop")

    @app.task
    async def ping() -> None: ...

    ping.enqueue_sync(db)
    assert drain(app, dsn=dsn).completed == 1
    assert invoke("job", "list", to=dsn).exit_code == 0
    info = invoke("doctor", "--info", to=dsn)
    assert info.exit_code == 0 and "newer than this program: they are compatible" in info.output
    migrated = invoke("migrate", to=dsn)  # as an old pod's start would
    assert migrated.exit_code == 0 and "and supports it" in migrated.output
    assert schema.info(db).version == NEWEST + 5


def test_a_newer_schema_that_does_not(dsn: str, db: Any) -> None:
    """F32: on a newer schema that does not support it, a worker does not start, and says what to do."""
    at_version(db, NEWEST + 5, NEWEST + 1)
    with pytest.raises(SchemaTooNew, match="Update the package") as caught:
        drain(App("shop"), dsn=dsn)
    assert (caught.value.found, caught.value.needed) == (NEWEST + 5, NEWEST)
    for words in (["migrate"], ["job", "list"], ["task", "list"]):
        result = invoke(*words, to=dsn)
        assert result.exit_code != 0
    assert invoke("doctor", "--info", to=dsn).exit_code == 1


def test_an_older_schema_is_told(dsn: str, next_release: None) -> None:
    """F32: a schema older than the program is refused with a hint to run migrate."""
    with pytest.raises(SchemaTooOld, match="tallybook migrate"):
        drain(App("shop"), dsn=dsn)


async def test_a_running_worker_stops_when_the_schema_leaves_it_behind(dsn: str, db: Any) -> None:
    """F32: when the schema becomes too new, a worker finishes its running job, stops, and says why."""
    app = App("shop", dsn=dsn)
    jobs = Jobs(app, db)
    started: list[int] = []

    @app.task
    async def slow() -> None:
        started.append(1)
        await eventually(
            lambda: db.execute("select from tallybook.installation where works_from > 900").fetchall(), "x"
        )

    job = slow.enqueue_sync(db)
    with pytest.raises(SchemaTooNew, match="version 999"):
        async with working(app, dsn, heartbeat=timedelta(milliseconds=200)) as worker:
            await eventually(lambda: started, "it runs")
            at_version(db, 999, 999)
            await eventually(worker.claimer.stopping.is_set, "it stops by itself")
    assert jobs(job).state == "completed"
    assert db.execute("select count(*) from tallybook.worker where ended_at is null").fetchone() == (0,)


async def test_a_worker_that_runs_into_missing_functions_says_why(dsn: str, db: Any) -> None:
    """F32: a claim that fails because its function is gone raises SchemaTooNew."""
    app = App("shop", dsn=dsn)
    with pytest.raises(SchemaTooNew, match="version 999"):
        async with working(app, dsn, heartbeat=timedelta(hours=1), lease=timedelta(hours=3)) as worker:
            await eventually(worker._id, "it is on record")
            with db.transaction():
                at_version(db, 999, 999)
                db.execute("drop function tallybook.claim; drop function tallybook.claimed_jobs")
            db.execute("select tallybook.enqueue('default', 'x')")
            await eventually(worker.claimer.stopping.is_set, "it stops by itself")


async def test_a_worker_whose_schema_is_dropped_says_so(dsn: str, db: Any) -> None:
    """F32: a worker whose schema is dropped raises SchemaMissing."""
    app = App("shop", dsn=dsn)
    with pytest.raises(SchemaMissing):
        async with working(app, dsn, heartbeat=timedelta(milliseconds=200)) as worker:
            await eventually(worker._id, "it is on record")
            while True:
                with suppress(psycopg.errors.DeadlockDetected):  # with a statement of the worker
                    db.execute("drop schema tallybook cascade")
                    break
            await eventually(worker.claimer.stopping.is_set, "it stops by itself")


async def test_functions_replaced_under_a_worker_do_not_disturb_it(dsn: str, db: Any) -> None:
    """F32, F33: while a migration replaces functions and views, the worker continues and every job completes."""
    app = App("shop", dsn=dsn)
    jobs = Jobs(app, db)

    @app.task
    async def ping() -> None: ...

    async with working(app, dsn) as worker:
        await eventually(worker._id, "it is on record")
        first = ping.enqueue_sync(db)
        await jobs.ends(first)
        for _ in range(3):
            db.execute("update tallybook.installation set routines = 'other'")
            assert schema.migrate(db) == ["functions and views"]
            await jobs.ends(*[ping.enqueue_sync(db) for _ in range(20)])
    assert db.execute("select count(*) from tallybook.job where state = 'completed'").fetchone() == (61,)


def test_a_call_that_is_inside_a_function_that_is_replaced_ends_as_usual(dsn: str, db: Any, connect: Any) -> None:
    """F32, F33: a call that waits for a table inside a function that the migration drops does not fail."""
    old = "create function tallybook.verb(x text, out said text, out n int) language plpgsql as $$ begin"
    db.execute(f"{old} lock table tallybook.queue in share mode; said := 'old' || x; end $$")
    text = "drop function if exists tallybook.verb(text);"
    new = "create function tallybook.verb(x text, y int default 1, out said text, out n int) language sql"
    new += " as $$ select 'new' || x, y $$"

    def called_while(change: str) -> Any:
        holder = connect(autocommit=False)
        holder.execute("lock table tallybook.queue in access exclusive mode")
        caller = connect()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: caller.execute("select said from tallybook.verb('!')").fetchone())
            waits = "select from pg_locks where relation = 'tallybook.queue'::regclass and not granted" + HERE
            wait_until(lambda: db.execute(waits).fetchall(), "the caller is inside")
            holder.execute(change)  # type: ignore[arg-type]
            holder.execute(new)
            holder.commit()
            return answer.result(20)

    assert called_while(schema_load.aside(text)) == ("old!",)
    assert db.execute("select said from tallybook.verb('!')").fetchone() == ("new!",)
    (left,) = schema_load.set_aside(db)
    assert left == "tallybook._old_verb(text)"
    db.execute("update tallybook.installation set routines = 'other'")
    schema.migrate(db)  # the next migration removes it
    assert schema_load.set_aside(db) == []
    # Control: with a plain drop the caller's transaction fails.
    db.execute("drop function tallybook.verb")
    db.execute(f"{old} lock table tallybook.queue in share mode; said := 'old' || x; end $$")
    with pytest.raises(psycopg.errors.InternalError_, match="cache lookup failed"):
        called_while(text)
