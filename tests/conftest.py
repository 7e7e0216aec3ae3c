"""One PostgreSQL server per run; each test has a database to itself, which support/databases.py resets for the next.

TALLYBOOK_TEST_DSN names a server that runs already (tools/run_tests.py starts one and shares it between the
processes of pytest-xdist); without it each process starts its own, of the version in TALLYBOOK_TEST_PG.

With TALLYBOOK_TEST_POOLER, the DSN of a PgBouncer in transaction mode in front of that server, the tests go through it
(`tools/run_tests.py --pooled`). Tests marked `direct(reason)` are then skipped, with their reason.
"""

import gc
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from support.clusters import cluster
from support.database import Connect, Connection, fresh, one
from support.databases import CREATE, DROP, Aside, Database, Template
from support.fleet import Fleet, renumber
from support.shop import Shop
from support.workers import Jobs
from tallybook import App
from tallybook._db.migrate import migrate
from tallybook.embedded import Server, temporary_server

# The time of an example depends on the load of the machine. All else is Hypothesis's default.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

SETTINGS = {"max_prepared_transactions": "20", "max_connections": "200"}


class GivenServer:
    """A server that another program starts and stops, with what tests need of embedded.Server."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._conn = psycopg.connect(self.dsn(), autocommit=True)

    def dsn(self, dbname: str = "postgres") -> str:
        return make_conninfo(self._conninfo, dbname=dbname)

    def create_database(self, name: str, template: str | None = None) -> str:
        self._conn.execute(CREATE.format(sql.Identifier(name), sql.Identifier(template or "template1")))
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        self._conn.execute(DROP.format(sql.Identifier(name)))

    def close(self) -> None:
        self._conn.close()


POOLER = os.environ.get("TALLYBOOK_TEST_POOLER")


def pytest_collection_finish() -> None:
    """Exempt what the collection made, thousands of tests, from the garbage collector's rounds."""
    gc.collect()
    gc.freeze()


CORE = Path(__file__).parent / "sql"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the core's tests for every server. Through a pooler, deselect tests without database, skip direct ones."""
    for item in items:
        if item.path.is_relative_to(CORE):
            item.add_marker(pytest.mark.servers)
    if not POOLER:
        return
    meets = [item for item in items if {"dsn", "empty_dsn"} & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in meets])
    items[:] = meets
    for item in items:
        if mark := item.get_closest_marker("direct"):
            item.add_marker(pytest.mark.skip(reason=f"direct: {mark.args[0]}"))


def _through(direct: str) -> str:
    """The same database through the pooler, if there is one."""
    return make_conninfo(POOLER, dbname=str(conninfo_to_dict(direct)["dbname"])) if POOLER else direct


@pytest.fixture(scope="session")
def server() -> Iterator[Server | GivenServer]:
    """The run's server; each process of pytest-xdist starts its own unless one was given."""
    if given := os.environ.get("TALLYBOOK_TEST_DSN"):
        with closing(GivenServer(given)) as known:
            yield known
    else:
        with temporary_server(int(os.environ.get("TALLYBOOK_TEST_PG") or 18), settings=SETTINGS) as started:
            yield started


def _aside(server: Any, template: str) -> Aside:
    with psycopg.connect(server.dsn(template), autocommit=True) as conn:
        like = Template(template, conn)
    return Aside(server, like, again=not POOLER)


@pytest.fixture(scope="session")
def aside(server: Any, template: str) -> Iterator[Aside]:
    """The source of the tests' databases. Through a pooler, each test has a new one."""
    with closing(_aside(server, template)) as made:
        yield made


@pytest.fixture(scope="session")
def template(server: Any) -> Iterator[str]:
    """The name of a database with the schema installed, the template of the tests' databases.

    Its tables are published, as where an installation publishes all tables: every test must work there.
    """
    with fresh(server) as dsn:
        with psycopg.connect(dsn) as conn:
            migrate(conn)
            conn.execute("create publication every_test for tables in schema tallybook")
            name = conn.info.dbname
        yield name


@pytest.fixture
def empty_dsn(server: Any, aside: Aside) -> Iterator[str]:
    """A new database without the schema: its conninfo."""
    name = f"tallybook_empty_{secrets.token_hex(6)}"
    dsn = server.create_database(name)
    yield _through(dsn)
    aside.drop(Database(name, dsn))


@pytest.fixture
def database(aside: Aside, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database with Tallybook installed; a new one if the test is marked `new_database`."""
    taken = aside.take(new=request.node.get_closest_marker("new_database") is not None)
    yield taken
    aside.give(taken)


@pytest.fixture
def dsn(database: Database) -> str:
    """The conninfo of the test's database, which has Tallybook installed."""
    return _through(database.dsn)


@pytest.fixture(scope="session")
def asides(server: Any, template: str) -> Iterator[Callable[[int], Aside]]:
    """The source of the databases of each node number."""
    made: dict[int, Aside] = {}
    with ExitStack() as stack:

        def of(number: int) -> Aside:
            if number not in made:
                dsn = stack.enter_context(fresh(server, template))
                with psycopg.connect(dsn, autocommit=True) as conn:
                    renumber(conn, number)
                    name = conn.info.dbname
                made[number] = stack.enter_context(closing(_aside(server, name)))
            return made[number]

        yield of


@pytest.fixture
def make_fleet(asides: Callable[[int], Aside]) -> Iterator[Callable[..., Fleet]]:
    """Make nodes of one app: see support/fleet.py."""
    with ExitStack() as stack:

        def make(count: int = 3, **options: Any) -> Fleet:
            return stack.enter_context(closing(Fleet(asides, count, **options)))

        yield make


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    """Three nodes of one app, numbers 1 to 3, with the node table in the first."""
    return make_fleet()


@pytest.fixture
def connect(dsn: str, database: Database) -> Iterator[Connect]:
    """Open further connections to the test's database, autocommit by default; closed at the end.

    The first one without arguments may be an earlier test's, and the next test's.
    """
    with ExitStack() as stack:

        def open_one(**kwargs: Any) -> Connection:
            if not kwargs and (kept := database.session):
                database.session = None
                stack.callback(_keep, database, kept)
                return kept
            if POOLER:  # it does not know a statement that was prepared on another session
                kwargs.setdefault("prepare_threshold", None)
            conn = psycopg.connect(dsn, **{"autocommit": True, **kwargs})
            stack.callback(_close, conn) if kwargs else stack.callback(_keep, database, conn)
            return conn

        yield open_one


def _keep(database: Database, conn: Connection) -> None:
    """Leave a connection to the next test if it is as new."""
    own = conn.row_factory is not tuple_row or conn._notice_handlers or conn._notify_handlers or not conn.autocommit
    if database.session or own or conn.lock.locked() or conn.info.transaction_status != TransactionStatus.IDLE:
        _close(conn)
    else:
        database.session = conn


def _close(conn: Connection) -> None:
    """Close it; first cancel a query that a thread of the test still runs on it, and wait for that thread.

    If a connection is closed under a thread, that thread reads on from a socket number that the next connection gets.
    It takes the server's greeting from it, and the next test waits for that in vain.
    """
    if not conn.lock.acquire(blocking=False):
        conn.cancel_safe(timeout=30)
        assert conn.lock.acquire(timeout=30), "a thread of the test still uses the connection"
    try:
        conn.close()
    finally:
        conn.lock.release()


@pytest.fixture
def db(connect: Connect) -> Connection:
    """A connection to the test's database, autocommit."""
    return connect()


@pytest.fixture
def app() -> App:
    """An App without a database of its own; tests declare their tasks on it."""
    return App("shop")


@pytest.fixture
def jobs(app: App, db: Connection) -> Jobs:
    """The outcomes of the App's jobs, read on the test's connection."""
    return Jobs(app, db)


@pytest.fixture
async def make(dsn: str) -> AsyncIterator[Callable[..., Any]]:
    """Make dashboards of the test's database, with the options of tallybook.web.dashboard; closed at the end."""
    from tallybook.web import Site, dashboard

    made: list[Site] = []

    def make_one(**options: Any) -> Site:
        made.append(dashboard(options.pop("app", None) or App("shop"), dsn=dsn, **options))
        return made[-1]

    yield make_one
    for site in made:
        await site.aclose()


@pytest.fixture
def paused(db: Connection) -> Callable[[], bool]:
    """Make a queue `mail`; return a function that reads whether it is paused."""
    db.execute("select tallybook.queue_set('mail')")
    return lambda: one(db, "select paused_at is not null from tallybook.queues where name = 'mail'")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Coroutine tests run on asyncio only."""
    return "asyncio"


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[str], Server]]:
    """Clusters by name, each with its own identifier, started at first use: see support/shop.py."""
    running: dict[str, Server] = {}
    with ExitStack() as stack:

        def get(name: str) -> Server:
            if name not in running:
                running[name] = stack.enter_context(cluster(epoch=1 if name == "far" else 0))
            return running[name]

        yield get


@pytest.fixture
def shop(clusters: Callable[[str], Server]) -> Iterator[Callable[..., Shop]]:
    """Make a database on the cluster of this name."""
    with ExitStack() as stack:
        yield lambda name, **options: Shop(clusters(name), stack, **options)
