"""The App and its tasks: checks at declaration, options, keys, and the App's own connections."""

import asyncio
import gc
import inspect
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

import tallybook
from tallybook import App, Constant, Context, Exponential, Job, JobCall
from tallybook._db.texts import text_array
from tallybook.errors import (
    ConfigError,
    DuplicateTask,
    InvalidArgument,
    QueueUnavailable,
    SchemaMissing,
    SignatureError,
    UnknownJob,
)


def keyed(app: App) -> Any:
    @app.task(unique=True)
    def charge(order_id: int, note: str = "") -> None:
        pass

    return charge


def test_public_names() -> None:
    """The public names are exactly these."""
    public = (
        "App AuditRow BreakerInfo Cancel Cancelled Complete ConcurrencyInfo Constant Context Counts Dead DeadLetter "
        "Difference Drop Exponential Finding Fire Fired HeldRange Job JobCall JobDone JobInfo JobLine JobPage Kill "
        "Level Linear Node Provider QueueInfo RateInfo Reason Reject Reschedule RetentionInfo Retried ScheduleInfo "
        "Secret ServiceInfo Snooze Subject SubjectCall SubjectInfo SubjectPage SubjectReport Task Throughput Timings "
        "TopJob TraceEvent Truncated __version__ migrate"
    )
    assert tallybook.__all__ == public.split()
    assert all(hasattr(tallybook, name) for name in tallybook.__all__)


def test_defining_tasks_does_no_work() -> None:
    """Importing and declaring opens no socket, resolves no annotation, and loads no library but our own driver."""
    program = (
        "import socket, sys\n"
        "def refuse(*args): raise SystemExit('a socket was opened')\n"
        "socket.socket.connect = refuse\n"
        "from tallybook import App\n"
        "app = App('shop', dsn='host=192.0.2.1')\n"
        "@app.task(queue='mail', unique=('user_id',))\n"
        "async def send(user_id: 'Later'): ...\n"
        "print([name for name in ('sqlalchemy', 'django', 'asyncpg', 'psycopg_pool') if name in sys.modules])\n"
        "print(*(name for name in sys.modules if name.startswith('tallybook.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    libraries, own = done.stdout.splitlines()
    assert libraries == "[]"
    assert len(own.split()) <= 40, f"the import grows: what only some programs need is imported at its first use: {own}"


async def test_a_task_stays_a_function(app: App) -> None:
    """A task can be called as a plain function; its name, doc and signature are the function's."""

    @app.task
    async def double(n: int) -> int:
        """Twice n."""
        return 2 * n

    @app.task(name="shop.half", queue="math", priority=0, max_attempts=7, retry=Constant(timedelta(seconds=1)))
    def half(ctx: Context, n: int) -> float:
        return n / 2

    context: Any = object()
    assert await double(4) == 8
    assert half(context, 4) == 2
    assert (double.__name__, double.__doc__) == ("double", "Twice n.")
    assert list(inspect.signature(double).parameters) == ["n"]
    assert (double.name, double.queue, double.priority, double.max_attempts) == ("double", "default", 2, None)
    assert (half.name, half.queue, half.priority, half.max_attempts) == ("shop.half", "math", 0, 7)
    assert (double.is_async, half.is_async) == (True, False)
    assert (double.wants_context, half.wants_context) == (False, True)
    assert half.retry == Constant(timedelta(seconds=1))
    assert double.retry.delay(1, lambda: 1.0) == timedelta(seconds=5)
    assert app.tasks == {"double": double, "shop.half": half}
    assert half.job(4).args == '{"n":4}'


def test_two_functions_of_one_name_are_refused(app: App) -> None:
    """A second task with the same name raises DuplicateTask, which names both places."""

    @app.task
    def send() -> None:
        pass

    with pytest.raises(DuplicateTask, match=r"test_app\.py:\d+\) and in .*test_app") as caught:
        app.task(name="send")(lambda: None)
    assert "send" in str(caught.value.first)
    assert "lambda" in str(caught.value.second)
    assert app.tasks["send"].fn is send.fn


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"queue": ""}, "queue"),
        ({"queue": " mail"}, "queue"),
        ({"queue": "a\0"}, "queue"),
        ({"queue": "x" * 65}, "queue"),
        ({"queue": 3}, "queue"),
        ({"priority": -1}, "priority"),
        ({"priority": 32768}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"retry": timedelta(minutes=5)}, "retry"),
        ({"unique": "user_id"}, "unique"),
        ({"unique": (1,)}, "unique"),
        ({"name": "a\nb"}, "name"),
        ({"name": ""}, "name"),
    ],
)
def test_wrong_options_of_a_task(app: App, options: dict[str, Any], option: str) -> None:
    """A wrong option raises ConfigError when the task is declared, and the error names the option."""
    with pytest.raises(ConfigError) as caught:

        @app.task(**options)
        def send(user_id: int) -> None:
            pass

    assert caught.value.option == option
    assert app.tasks == {}


def test_what_cannot_be_a_task(app: App) -> None:
    """A class, a string, a generator, an unnamed lambda, *args and an unknown option are refused at once."""
    anything: Any = app.task

    async def stream() -> AsyncIterator[int]:
        yield 1

    for wrong in ("mail", int, stream, lambda: None):
        with pytest.raises(ConfigError):
            anything(wrong)
    with pytest.raises(SignatureError, match="args"):

        @app.task
        def many(*numbers: int) -> None:
            pass

    with pytest.raises(TypeError, match="colour"):
        anything(colour="red")
    assert app.tasks == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run_at": datetime(2030, 1, 1)}, "aware"),
        ({"run_at": "2030-01-01"}, "aware"),
        ({"run_at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))}, "out of range"),
        ({"run_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": "5 min"}, "one of them"),
        ({"delay": "5"}, "unit"),
        ({"delay": 5}, "duration"),
        ({"delay": timedelta(seconds=-1)}, "negative"),
        ({"delay": timedelta.max}, "thousand years"),
        ({"priority": -1}, "priority"),
        ({"queue": "no\ttabs"}, "control"),
        ({"unique": ""}, "1 to 512"),
        ({"unique": "x" * 513}, "1 to 512"),
        ({"unique": "a\0"}, "NUL"),
        ({"unique": "\udc00"}, "surrogate"),
        ({"unique": 42}, "tuple"),
        ({"max_attempts": 40_000}, "max_attempts"),
        ({"headers": ["a"]}, "mapping"),
        ({"headers": {"a": "\0"}}, "headers"),
        ({"headers": {"a": "x" * 8000}}, "headers"),
    ],
)
def test_wrong_options_of_a_job(app: App, options: dict[str, Any], words: str) -> None:
    """with_ refuses a wrong option before any job is described."""
    charge = keyed(app)
    with pytest.raises(ValueError, match=words):
        charge.with_(**options)


def test_arguments_are_checked_like_a_call(app: App) -> None:
    """Arguments that do not fit the signature raise SignatureError, a TypeError, when the job is described."""
    charge = keyed(app)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((1, "", 3), {}),
        ((1,), {"order_id": 1}),
        ((1,), {"queue": "mail"}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(SignatureError, match="charge"):
            charge.job(*args, **kwargs)


def test_options_do_not_collide_with_arguments(app: App) -> None:
    """A task may have arguments called conn, queue, delay and job."""

    @app.task
    def odd(conn: int, queue: str, delay: int, job: int) -> None:
        pass

    call = odd.with_(delay="5 min").job(conn=1, queue="q", delay=2, job=3)
    assert call.args == '{"conn":1,"queue":"q","delay":2,"job":3}'
    assert call.options.delay == timedelta(minutes=5)
    with pytest.raises(AttributeError):
        call.args = "{}"  # type: ignore[misc]


def test_keys_are_derived_from_args(app: App) -> None:
    """unique=True takes all args in any order, a tuple takes those args, a string is the key, False is no key."""
    charge = keyed(app)
    assert charge.job(1, note="x").unique_key == charge.job(note="x", order_id=1).unique_key
    assert charge.job(1).unique_key != charge.job(2).unique_key
    one = charge.with_(unique=("order_id",))
    assert one.job(1, note="x").unique_key == one.job(1, note="y").unique_key == charge.job(1).unique_key
    assert charge.with_(unique="mine").job(1).unique_key == "mine"
    assert charge.with_(unique=False).job(1).unique_key is None
    assert charge.with_(priority=0).job(1).unique_key == charge.job(1).unique_key
    with pytest.raises(ConfigError, match=r"no argument 'user'.*order_id"):
        charge.with_(unique=("user",)).job(1)


def test_keys_are_per_task(app: App, db: Any) -> None:
    """S1-05: the same key on two tasks makes two jobs, on one task it makes one."""
    charge = keyed(app)

    @app.task
    def refund(order_id: int) -> None:
        pass

    report = [task.with_(unique="k").enqueue_sync(db, 1) for task in (charge, refund, charge)]
    assert [job.created for job in report] == [True, True, False]
    assert report[0].id == report[2].id


def test_enqueue_many_takes_descriptions_only(app: App, db: Any) -> None:
    """enqueue_many refuses anything but a JobCall, with its index, before it sends anything."""
    wrong: Any = [keyed(app).job(1), keyed]
    with pytest.raises(InvalidArgument, match="job 1 is of type function"):
        app.enqueue_many_sync(db, wrong)
    assert db.execute("select count(*) from tallybook.job").fetchone() == (0,)


def test_enqueue_many_keeps_the_order(app: App, db: Any) -> None:
    """Jobs with mixed queues, priorities and headers are stored as described and returned in order."""
    charge = keyed(app)
    many: list[JobCall] = []
    for n in range(60):
        bound = charge.with_(
            queue=f"q{n % 3}", priority=n % 4, headers={"n": n} if n % 5 == 0 else None, max_attempts=n % 7 or None
        )
        many.append((charge if n % 11 == 0 else bound).job(n, note='{"} \\'))
    report = app.enqueue_many_sync(db, many)
    for n, job in enumerate(report):
        info = app.get(job).sync(db)
        plain = n % 11 == 0
        assert info.args == {"order_id": n, "note": '{"} \\'}
        assert (info.queue, info.priority) == (("default", 2) if plain else (f"q{n % 3}", n % 4))
        assert info.headers == ({"n": n} if n % 5 == 0 and not plain else None)
        assert info.max_attempts == (None if plain else n % 7 or None)
        assert info.unique_key == many[n].unique_key


def test_array_literals(db: Any) -> None:
    """Every text passes PostgreSQL's array literal unchanged."""
    for items in (
        ["a"],
        ["", "NULL", None, "{}", ","],
        ["\x1f", '"', "\\", "\\\\"],
        ["a\nb", " x ", "\u2028🦆"],
        [None],
    ):
        assert db.execute("select %s::text::text[]", [text_array(items)]).fetchone() == (items,)


def test_job_ids_are_checked(app: App, db: Any) -> None:
    """A verb takes a Job or an id; a wrong type is an InvalidArgument, an id of no job an UnknownJob."""
    charge = keyed(app)
    job = charge.enqueue_sync(db, 1)
    assert app.get(job).sync(db) == app.get(job.id).sync(db)
    wrong: Any
    for wrong in ("1", None, True, 1.0):
        with pytest.raises(InvalidArgument, match="whole number"):
            app.get(wrong).sync(db)
    for unknown in (0, -1, 1 << 63, 999):
        with pytest.raises(UnknownJob, match=str(unknown)) as caught:
            app.get(unknown).sync(db)
        assert caught.value.job == unknown
    with pytest.raises(InvalidArgument, match="NUL"):
        app.cancel(job, "a\0b").sync(db)


def test_hooks_are_registered(app: App) -> None:
    """lifespan and around_job take only async generator functions of one parameter, around_job plain ones too."""

    @app.lifespan
    async def clients(ctx: Context) -> AsyncIterator[None]:
        yield

    @app.around_job
    async def around(ctx: Context) -> AsyncIterator[None]:
        yield

    @app.around_job
    def in_thread(ctx: Context) -> Iterator[None]:
        yield

    assert (app._lifespans, app._arounds, app._thread_arounds) == ([clients], [around], [in_thread])
    wrong: Any

    async def no_yield(ctx: Context) -> None: ...
    async def no_parameter() -> AsyncIterator[None]:
        yield

    def plain_without() -> Iterator[None]:
        yield

    for wrong in (no_yield, no_parameter, plain_without, 3):
        with pytest.raises(ConfigError, match="lifespan"):
            app.lifespan(wrong)
        with pytest.raises(ConfigError, match="around_job"):
            app.around_job(wrong)


async def test_the_apps_own_connections(dsn: str, db: Any) -> None:
    """On the App a verb commits by itself: through the pool inside open(), else on a connection per call."""
    app = App("shop", dsn=dsn)
    charge = keyed(app)
    jobs = [await charge.enqueue(app, 1), await asyncio.to_thread(charge.enqueue_sync, app, 2)]
    async with app.open(), app.open():
        jobs += await asyncio.gather(*[charge.enqueue(app, n) for n in range(3, 30)])
        jobs += await app.enqueue_many(app, [charge.job(30), charge.job(30)])
        names = db.execute(
            "select application_name from pg_stat_activity where datname = current_database()"
        ).fetchall()
        assert names.count(("tallybook shop",)) in range(1, 5)
        assert await app.cancel(jobs[0]) == "cancelled"
        with pytest.raises(UnknownJob):
            await app.cancel(999)
        assert (await app.get(jobs[1])).state == "available"
    assert len({job.id for job in jobs}) == 30
    assert jobs[-1] == Job(jobs[-2].id, created=False)
    assert (await app.get(jobs[-1])).state == "available"


async def test_each_loop_has_its_own_pool(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second loop that opens and closes the App leaves the first loop its pool; one that is closed is forgotten."""
    app = App("shop", dsn=dsn)
    charge = keyed(app)

    async def other() -> None:
        async with app.open():
            await charge.enqueue(app, 1)

    def abandoned() -> weakref.ref[asyncio.AbstractEventLoop]:
        loop = asyncio.new_event_loop()
        opened = app.open()
        loop.run_until_complete(opened.__aenter__())
        loop.run_until_complete(next(iter(app._pools.values())).close())
        loop.close()
        return weakref.ref(loop)

    gone = await asyncio.to_thread(abandoned)
    async with app.open():
        gc.collect()
        assert gone() is None
        await asyncio.to_thread(asyncio.run, other())
        monkeypatch.setattr(psycopg.AsyncConnection, "connect", None)
        assert (await charge.enqueue(app, 2)).created


async def test_where_the_dsn_comes_from(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSN is App(dsn=...), then TALLYBOOK_DSN, then libpq's variables; SQLAlchemy's URLs are accepted."""
    charge = keyed(App("shop"))
    monkeypatch.setenv("TALLYBOOK_DSN", dsn)
    assert (await asyncio.to_thread(charge.enqueue_sync, charge.app, 1)).created
    monkeypatch.delenv("TALLYBOOK_DSN")
    given = psycopg.conninfo.conninfo_to_dict(dsn)
    for name, variable in [("host", "PGHOST"), ("port", "PGPORT"), ("user", "PGUSER"), ("dbname", "PGDATABASE")]:
        if given.get(name):
            monkeypatch.setenv(variable, str(given[name]))
    if not given.get("password"):
        assert not (await asyncio.to_thread(charge.enqueue_sync, charge.app, 1)).created
    assert "host=db " in App("x", dsn="postgresql+asyncpg://me@db/shop").conninfo()


async def test_what_can_go_wrong_with_own_connections(empty_dsn: str) -> None:
    """No server, no schema and a broken DSN raise our errors, never with the password."""
    gone = App("shop", dsn="host=127.0.0.1 port=1 user=me password=hunter2 dbname=shop")
    charge = keyed(gone)
    for attempt in (charge.enqueue(gone, 1), gone.open().__aenter__()):
        with pytest.raises(QueueUnavailable, match="port=1") as caught:
            await attempt
        assert "hunter2" not in str(caught.value)
    with pytest.raises(QueueUnavailable):
        await asyncio.to_thread(charge.enqueue_sync, gone, 1)
    with pytest.raises(SchemaMissing, match="tallybook migrate"):
        await asyncio.to_thread(charge.enqueue_sync, App("shop", dsn=empty_dsn), 1)
    with pytest.raises(ConfigError) as broken:
        await asyncio.to_thread(charge.enqueue_sync, App("shop", dsn="postgresql//me:hunter2@db/shop"), 1)
    assert "hunter2" not in str(broken.value)
    assert broken.value.__cause__ is None


def test_retry_policies_are_public() -> None:
    """Retry policies are importable from the top of the package."""
    assert Exponential(timedelta(minutes=5)).delay(3) == timedelta(minutes=20)
