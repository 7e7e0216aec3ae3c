"""The helpers for users' tests, as a user's test uses them, on a real PostgreSQL."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from support.pages import python
from tallybook import App, Constant
from tallybook.errors import InvalidArgument, QueueUnavailable
from tallybook.testing import (
    assert_enqueued,
    assert_enqueued_async,
    assert_not_enqueued,
    assert_not_enqueued_async,
    drain,
    drain_async,
    fresh_databases,
    travel,
)

HOUR = timedelta(hours=1)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".")
app = App("shop")


@app.task(queue="mail")
async def send_welcome(user_id: int, *, since: date | None = None) -> None:
    pass


def test_assert_enqueued_sees_the_own_transaction(dsn: str) -> None:
    """A job that is not committed yet is found and returned on its own connection, and on no other."""
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        job = send_welcome.enqueue_sync(conn, 42, since=date(2030, 1, 2))
        send_welcome.enqueue_sync(conn, 43)
        found = assert_enqueued(conn, send_welcome, user_id=42, since=date(2030, 1, 2))
        assert (found.id, found.queue, found.state) == (job.id, "mail", "available")
        assert assert_enqueued(conn, "send_welcome").args == {"user_id": 43}  # the newest
        assert_not_enqueued(dsn, send_welcome)
        conn.commit()
    assert assert_enqueued(dsn, send_welcome, user_id=42).id == job.id


def test_a_failed_assertion_shows_what_is_there(db: Any) -> None:
    """A failed assertion names the job that it expected and lists the jobs that exist."""
    with pytest.raises(AssertionError, match=r"no job send_welcome\(user_id=1\) is enqueued; there are no jobs at all"):
        assert_enqueued(db, send_welcome, user_id=1)
    job = send_welcome.enqueue_sync(db, 42)
    with pytest.raises(AssertionError, match=rf"there is:\n  {job.id} send_welcome\(user_id=42\) available in mail"):
        assert_enqueued(db, send_welcome, user_id=1)
    with pytest.raises(AssertionError, match=rf"job {job.id}, send_welcome\(\), is enqueued"):
        assert_not_enqueued(db, send_welcome)


@pytest.mark.parametrize("args", [{"user_id": True}, {"user_id": "42"}, {"user_id": None}, {"since": "2030-01-02"}])
def test_args_are_equal_as_json_is(db: Any, args: dict[str, Any]) -> None:
    """Args are compared as JSON: a bool or a text is no number, null is not a missing arg; 42.0 is 42."""
    send_welcome.enqueue_sync(db, 42)
    assert_not_enqueued(db, send_welcome, **args)
    assert_enqueued(db, send_welcome, user_id=42.0)


def test_a_wrong_argument_name_is_told(db: Any) -> None:
    """A wrong argument name does not let assert_not_enqueued pass; a task with **kwargs takes any name."""
    with pytest.raises(InvalidArgument, match="no argument 'user'"):
        assert_not_enqueued(db, send_welcome, user=42)
    with pytest.raises(InvalidArgument, match="expected a task"):
        assert_enqueued(db, send_welcome.fn)  # type: ignore[arg-type]

    @App("other").task
    def anything(**named: int) -> None: ...

    anything.enqueue_sync(db, whatever=1)
    assert_enqueued(db, anything, whatever=1)


async def test_assertions_on_an_async_connection(dsn: str) -> None:
    """The async forms accept an async connection, as `enqueue` does."""
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await assert_not_enqueued_async(conn, send_welcome)
        job = await send_welcome.enqueue(conn, 42)
        assert (await assert_enqueued_async(conn, send_welcome, user_id=42)).id == job.id
        with pytest.raises(AssertionError, match="is enqueued"):
            await assert_not_enqueued_async(conn, send_welcome, user_id=42)


def test_drain_runs_every_queue_and_what_follows(dsn: str, db: Any) -> None:
    """S5-12: drain also runs jobs that handlers enqueue through the App; ended jobs no longer count as enqueued."""

    @app.task
    async def two_steps(left: int) -> None:
        if left:
            await two_steps.with_(queue="follow-ups").enqueue(app, left - 1)

    app.enqueue_many_sync(db, [send_welcome.job(1), two_steps.job(0)])
    two_steps.with_(queue="follow-ups").enqueue_sync(db, 3)
    report = drain(app, dsn=dsn)
    assert (report.processed, report.completed) == (6, 6)
    assert app.dsn is None
    assert_not_enqueued(dsn, two_steps)


async def test_drain_inside_a_running_loop_says_what_to_do(dsn: str, db: Any) -> None:
    """drain() in a coroutine raises an error that names drain_async, which works there."""
    send_welcome.enqueue_sync(db, 1)
    with pytest.raises(RuntimeError, match="drain_async"):
        drain(app, dsn=dsn)
    assert (await drain_async(app, dsn=dsn)).completed == 1


def test_travel_makes_due_what_is_scheduled(dsn: str, db: Any) -> None:
    """A delay and a backoff of an hour end after an hour's travel, and not a minute earlier."""

    @app.task(retry=Constant(HOUR), max_attempts=2)
    async def broken() -> None:
        raise ValueError("no luck")

    send_welcome.with_(delay=HOUR).enqueue_sync(db, 1)
    broken.enqueue_sync(db)
    assert drain(app, dsn=dsn).retrying == 1
    assert travel(dsn, timedelta(minutes=59)) == 2
    assert drain(app, dsn=dsn).processed == 0
    assert travel(db, timedelta(minutes=1)) == 2
    report = drain(app, dsn=dsn)
    assert (report.completed, report.dead) == (1, 1)


def test_travel_lets_jobs_expire(dsn: str, db: Any) -> None:
    """An available or scheduled job expires once travel reaches its expires_at, and not before."""
    at = datetime.now(UTC) + HOUR
    in_line = send_welcome.with_(expires_at=at).enqueue_sync(db, 1)
    later = send_welcome.with_(expires_at=at, delay=timedelta(minutes=30)).enqueue_sync(db, 2)
    travel(dsn, timedelta(minutes=59))
    assert app.get(in_line).sync(db).expires_at == at - timedelta(minutes=59)
    travel(dsn, timedelta(minutes=2))
    assert drain(app, dsn=dsn).dead == 2
    assert {app.get(job).sync(db).reason for job in (in_line, later)} == {"expired"}


def test_travel_reaches_what_was_pushed(dsn: str, db: Any) -> None:
    """A debounced job that was pushed an hour later while available runs after an hour's travel, and not before."""
    for run_at in (datetime.now(UTC), datetime.now(UTC) + HOUR):
        send_welcome.with_(unique="k", on_conflict="push_run_at", run_at=run_at).enqueue_sync(db, 1)
    assert drain(app, dsn=dsn).completed == 0
    travel(dsn, timedelta(minutes=59))
    assert drain(app, dsn=dsn).completed == 0
    travel(dsn, timedelta(minutes=2))
    assert drain(app, dsn=dsn).completed == 1


@pytest.mark.parametrize("jitter", [timedelta(0), timedelta(minutes=10)])
def test_travel_reaches_schedules(dsn: str, db: Any, jitter: timedelta) -> None:
    """A schedule fires once travel reaches its tick, once however far, and not before; then by the clock again."""
    timed = App("timed")
    later = datetime.now(UTC) + 12 * HOUR  # no tick of its own within the jitter before now

    @timed.task(schedule=f"{later.minute} {later.hour} * * *", jitter=jitter)
    async def nightly() -> None: ...

    assert drain(timed, dsn=dsn).processed == 0  # registers the schedule
    (left,) = db.execute("select due_at - clock_timestamp() from tallybook.schedule").fetchone()
    travel(dsn, left / 2)
    assert drain(timed, dsn=dsn).processed == 0
    travel(dsn, left / 2)
    assert drain(timed, dsn=dsn).completed == 1
    travel(dsn, timedelta(days=30))
    assert drain(timed, dsn=dsn).completed == 1
    assert drain(timed, dsn=dsn).processed == 0
    assert db.execute("select what, count(*) from tallybook.fire group by 1").fetchall() == [("enqueued", 2)]
    assert db.execute("select tick > clock_timestamp() from tallybook.schedule").fetchone() == (True,)


def test_travel_reaches_rate_limits(dsn: str, db: Any) -> None:
    """S1-18: a call starts once travel reaches its turn, and not before; no window gets more calls for it."""
    calling = App("calling")
    calling.rate_limit("provider", 2, per=timedelta(hours=2))

    @calling.task(limits=("provider:acme",))
    async def call(n: int) -> None: ...

    calling.enqueue_many_sync(db, [call.job(n) for n in range(4)])
    assert drain(calling, dsn=dsn).completed == 1
    travel(dsn, timedelta(minutes=59))
    assert drain(calling, dsn=dsn).completed == 0
    travel(dsn, timedelta(minutes=1))
    assert drain(calling, dsn=dsn).completed == 1
    assert db.execute("select calls_in_window from tallybook.rate where name = 'provider:acme'").fetchone() == (2,)
    travel(dsn, timedelta(hours=5))  # no catch-up: calls start a gap apart, as usual
    assert drain(calling, dsn=dsn).completed == 1
    assert db.execute("select calls_in_window from tallybook.rate where name = 'provider:acme'").fetchone() == (1,)


def test_travel_reaches_what_was_pushed_back(dsn: str, db: Any) -> None:
    """S1-18: a limit that was pushed back an hour lets a call start after an hour's travel, and not before."""
    calling = App("calling")

    @calling.task(limits=("provider",))
    async def call() -> None: ...

    calling.rate_limits.set("provider", 60, per="1 min").sync(db)
    calling.rate_limits.push("provider", datetime.now(UTC) + HOUR).sync(db)
    call.enqueue_sync(db)
    travel(dsn, timedelta(minutes=59))
    assert drain(calling, dsn=dsn).completed == 0
    travel(dsn, timedelta(minutes=1))
    assert drain(calling, dsn=dsn).completed == 1


def test_travel_reaches_breakers(dsn: str, db: Any) -> None:
    """An open breaker lets its probe through once travel reaches its end; failures before travel leave the window."""
    calling = App("calling")

    @calling.task(limits=("provider",), max_attempts=1)
    async def call(fails: bool) -> None:
        if fails:
            raise ConnectionError("down")

    calling.breakers.set("provider", 2, per="1 min", open_for="1 hour").sync(db)
    for _ in range(2):  # never two within a minute
        call.enqueue_sync(db, True)
        assert drain(calling, dsn=dsn).dead == 1
        travel(dsn, timedelta(minutes=2))
    call.enqueue_sync(db, True)
    call.enqueue_sync(db, True)
    assert drain(calling, dsn=dsn).dead == 2
    call.enqueue_sync(db, False)
    assert drain(calling, dsn=dsn).completed == 0  # open by now
    travel(dsn, timedelta(minutes=58))
    assert drain(calling, dsn=dsn).completed == 0
    travel(dsn, timedelta(minutes=3))
    assert drain(calling, dsn=dsn).completed == 1


def test_travel_is_part_of_the_transaction(dsn: str, db: Any) -> None:
    """On a connection, travel is part of the transaction; backwards it is refused."""
    send_welcome.with_(delay=HOUR).enqueue_sync(db, 1)
    with psycopg.connect(dsn) as conn:
        assert travel(conn, HOUR) == 1
        conn.rollback()
    assert drain(app, dsn=dsn).processed == 0
    with pytest.raises(InvalidArgument, match="forwards"):
        travel(dsn, -HOUR)


def test_fresh_databases_on_a_given_server(server: Any) -> None:
    """On a server given by DSN, each database is new, has the schema, and is gone at the end, as is the template."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        with fresh_databases(server.dsn()) as databases:
            with databases.fresh() as first, databases.fresh() as second:
                send_welcome.enqueue_sync(App("a", dsn=first), 1)
                assert_not_enqueued(second, send_welcome)
                names = [conninfo_to_dict(dsn)["dbname"] for dsn in (first, second)]
                left_open = psycopg.connect(second)
            left_open.close()
            names.append(databases._template)
        assert conn.execute("select datname from pg_database where datname = any (%s)", (names,)).fetchall() == []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("postgresql://u@/postgres?host=/run&port=1", "postgresql://u@/other%20db?host=/run&port=1"),
        ("postgresql:///postgres?host=/run", "postgresql:///other%20db?host=/run"),
        ("postgresql://u:p%40@h:1", "postgresql://u:p%40@h:1/other%20db"),
        ("host=/run dbname=postgres", "dbname='other db' host=/run"),
    ],
)
def test_the_dsn_of_a_database_keeps_its_form(given: str, named: str) -> None:
    """A URI stays a URI, which SQLAlchemy, asyncpg and Django need; a conninfo stays a conninfo."""
    with fresh_databases(given) as databases:
        assert databases.dsn("other db") == named


@pytest.mark.slow
@pytest.mark.parametrize("embedded", [False, True], ids=["given", "embedded"])
def test_a_users_test_file(tmp_path: Path, server: Any, embedded: bool) -> None:
    """A user's test file needs nothing but the fixtures: no conftest, no settings, no server of the user's own."""
    users_test = """
import psycopg
import pytest
from tallybook import App
from tallybook.testing import assert_enqueued, assert_not_enqueued, drain

app = App("shop")

@app.task
async def send_welcome(user_id: int) -> None: ...

@pytest.mark.parametrize("user_id", [1, 2])
def test_a_registration_is_welcomed(tallybook_dsn, user_id):
    with psycopg.connect(tallybook_dsn) as conn:
        assert_not_enqueued(conn, send_welcome)
        send_welcome.enqueue_sync(conn, user_id)
        assert_enqueued(conn, send_welcome, user_id=user_id)
    assert drain(app, dsn=tallybook_dsn).completed == 1

def test_a_second_database(tallybook_server, tallybook_dsn):
    with tallybook_server.fresh() as other:
        assert other != tallybook_dsn
"""
    (tmp_path / "test_shop.py").write_text(users_test)
    given = {} if embedded else {"TALLYBOOK_TEST_DSN": server.dsn()}
    assert "3 passed" in python(tmp_path, "host=/nowhere", *PYTEST, **given)


def test_a_server_that_does_not_answer_is_told_without_its_password() -> None:
    """pytest would print the arguments of psycopg's frames, so they are not in the error."""
    password = token_hex(8)
    with (
        fresh_databases(f"postgresql://u:{password}@127.0.0.1:1/x") as away,
        pytest.raises(QueueUnavailable, match="Connection refused") as refused,
        away.fresh(),
    ):
        raise AssertionError("it is away")
    assert refused.value.__suppress_context__ and password not in str(refused.getrepr(style="long", funcargs=True))


@pytest.mark.slow
def test_the_plugin_starts_nothing_and_imports_no_manager_of_servers(tmp_path: Path) -> None:
    """pytest in an environment with Tallybook loads no testing module and no embedded server until a test needs it."""
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_it():\n    assert not {'tallybook.testing', 'tallybook.embedded'} & sys.modules.keys()\n"
    )
    python(tmp_path, "host=/nowhere", *PYTEST)
