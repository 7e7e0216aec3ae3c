"""Integrations with FastAPI, Flask and SQLAlchemy: their pages run as written, and their promises hold."""

import json
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.testclient import TestClient
from flask import Flask, current_app
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL, MetaData, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from support.cli import Command
from support.outside import http_server
from support.pages import blocks, project, python
from support.paths import ROOT
from support.waiting import wait_until
from tallybook import App, Context
from tallybook.contrib.fastapi import in_transaction, lifespan, the_app
from tallybook.contrib.flask import Tallybook
from tallybook.contrib.sqlalchemy import include_name
from tallybook.errors import ConfigError, QueueUnavailable
from tallybook.testing import drain
from tallybook.web import dashboard


@pytest.fixture
def app(dsn: str, db: Any) -> App:
    app = App("shop", dsn=dsn)
    db.execute("create table customer (id int primary key, boss int references customer deferrable initially deferred)")

    @app.task
    async def welcome(user_id: int) -> None: ...

    return app


def rows(db: Any) -> tuple[int, int]:
    """The numbers of customers and jobs."""
    return db.execute("select (select count(*) from customer), (select count(*) from tallybook.job)").fetchone()


def url(dsn: str) -> URL:
    """The database's URL for SQLAlchemy."""
    known = {key: str(value) for key, value in conninfo_to_dict(dsn).items() if value is not None}
    return URL.create("postgresql+psycopg", database=known.pop("dbname"), query=known)


# FastAPI


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["psycopg", "async session", "session"])
def test_a_route_and_its_jobs_are_one_transaction(kind: str, app: App, dsn: str, db: Any) -> None:
    """S4-21: after a successful answer row and job exist; after a refusal, an error or a failed COMMIT neither does."""

    def async_sessions(dsn: str) -> async_sessionmaker[AsyncSession]:
        return async_sessionmaker(create_async_engine(url(dsn), poolclass=NullPool))

    def register_route(api: FastAPI, app: App, dsn: str, kind: str) -> None:
        """POST /{user}?boss=: a customer and a job in the request's transaction; user 13 is refused, 14 fails."""
        welcome = app.tasks["welcome"]
        insert = "insert into customer values (:id, :boss)"

        def refuse(user: int) -> None:
            if user == 13:
                raise HTTPException(409)
            if user == 14:
                raise ValueError

        if kind == "psycopg":

            @api.post("/{user}")
            async def psycopg_route(
                conn: Annotated[psycopg.AsyncConnection, in_transaction()], user: int, boss: int
            ) -> None:
                await conn.execute("insert into customer values (%s, %s)", (user, boss))
                await welcome.enqueue(conn, user)
                refuse(user)

        elif kind == "async session":
            transaction = in_transaction(async_sessions(dsn))

            @api.post("/{user}")
            async def async_route(user: int, boss: int, session: AsyncSession = transaction) -> None:
                await session.execute(text(insert), {"id": user, "boss": boss})
                await welcome.enqueue(session, user)
                refuse(user)

        else:
            transaction = in_transaction(sessionmaker(create_engine(url(dsn), poolclass=NullPool)))

            @api.post("/{user}")
            def plain_route(user: int, boss: int, session: Session = transaction) -> None:
                session.execute(text(insert), {"id": user, "boss": boss})
                welcome.enqueue_sync(session, user)
                refuse(user)

    api = FastAPI(lifespan=lifespan(app))
    register_route(api, app, dsn, kind)
    with TestClient(api, raise_server_exceptions=False) as client:
        assert client.post("/1?boss=1").status_code == 200
        assert rows(db) == (1, 1)
        assert client.post("/13?boss=1").status_code == 409
        assert client.post("/14?boss=1").status_code == 500
        assert client.post("/2?boss=99").status_code == 500, "the COMMIT failed after the route, and the answer says so"
        assert rows(db) == (1, 1)
        assert client.post("/3?boss=1").status_code == 200, "the connection is fit for the next one"
    assert rows(db) == (2, 2)


@pytest.mark.slow
def test_without_the_scope_a_failed_commit_would_be_a_success(app: App, db: Any) -> None:
    """The control: FastAPI's default dependency commits after the answer, and a lost row is a 200."""
    api = FastAPI(lifespan=lifespan(app))

    async def late(request: Request) -> AsyncIterator[Any]:
        async with the_app(request)._connection() as conn, conn.transaction():
            yield conn

    by_default = Depends(late)

    @api.post("/")
    async def route(conn: Any = by_default) -> None:
        await conn.execute("insert into customer values (1, 99)")

    with TestClient(api, raise_server_exceptions=False) as client:
        assert client.post("/").status_code == 200
    assert rows(db) == (0, 0)


@pytest.mark.slow
def test_the_lifespan_goes_around_the_users_own(app: App, db: Any) -> None:
    """The pool is open before and after the user's own lifespan, whose state requests have; then it is closed."""
    seen: list[bool] = []

    @asynccontextmanager
    async def own(_: FastAPI) -> AsyncIterator[dict[str, str]]:
        seen.append(app._own_pool() is not None)
        yield {"mine": "here"}
        seen.append(app._own_pool() is not None)

    api = FastAPI(lifespan=lifespan(app, own, max_size=2))

    @api.get("/")
    async def route(request: Request, given: Annotated[App, Depends(the_app)]) -> str:
        await app.tasks["welcome"].enqueue(given, 1)
        return f"{request.state.mine} {given.name} {(pool := app._own_pool()) and pool.max_size}"

    with TestClient(api) as client:
        assert client.get("/").json() == "here shop 2"
    assert seen == [True, True] and not app._pools
    assert rows(db) == (0, 1)


def test_requests_and_jobs_share_the_lifespans_of_the_app(app: App, db: Any) -> None:
    """With shared=True, request.state has what @app.lifespan set, providers too; all closes in reverse order."""
    seen: list[str] = []

    @app.lifespan
    async def first(ctx: Context) -> AsyncIterator[None]:
        ctx.state.words = [ctx.app.name, (await ctx.providers.load()).get("acme")]
        yield
        seen.append(f"first closed, pool {'open' if app._own_pool() else 'closed'}")

    @app.lifespan
    async def second(ctx: Context) -> AsyncIterator[None]:
        ctx.state.mine = f"second after {ctx.state.words[0]}"
        yield
        seen.append("second closed")

    @asynccontextmanager
    async def own(_: FastAPI) -> AsyncIterator[dict[str, str]]:
        yield {"mine": "own"}
        seen.append("own closed")

    @app.task
    async def look(ctx: Context) -> None:
        seen.append(ctx.state.mine)

    api = FastAPI(lifespan=lifespan(app, own, shared=True))

    @api.get("/")
    async def route(request: Request) -> list[Any]:
        return [*request.state.words, request.state.mine]

    with TestClient(api) as client:
        assert client.get("/").json() == ["shop", None, "own"]
    assert seen == ["own closed", "second closed", "first closed, pool open"]
    look.enqueue_sync(db)
    assert drain(app).completed == 1
    assert seen[3:] == ["second after shop", "second closed", "first closed, pool closed"]


def test_a_resource_that_cannot_be_opened_stops_the_web_server(app: App) -> None:
    """An error in a lifespan stops the server's start, after earlier lifespans and the pool are closed."""
    closed: list[bool] = []

    @app.lifespan
    async def first(ctx: Context) -> AsyncIterator[None]:
        try:
            yield
        finally:
            closed.append(True)

    @app.lifespan
    async def second(ctx: Context) -> AsyncIterator[None]:
        raise ValueError("no such host")
        yield

    with TestClient(FastAPI(lifespan=lifespan(app))):
        assert closed == [], "they are the worker's alone without shared=True"
    with pytest.raises(ValueError, match="no such host"), TestClient(FastAPI(lifespan=lifespan(app, shared=True))):
        pass
    assert closed == [True] and not app._pools


@pytest.mark.slow
def test_what_is_missing_is_said() -> None:
    """A missing lifespan, a wrong source of sessions and a missing database each raise a clear error."""
    api = FastAPI()

    @api.get("/")
    def route(given: Annotated[App, Depends(the_app)]) -> None: ...

    with pytest.raises(RuntimeError, match=r"FastAPI\(lifespan=lifespan\(app\)\)"):
        TestClient(api).get("/")
    with pytest.raises(TypeError, match="needs a sessionmaker or an async_sessionmaker, not str"):
        in_transaction("postgresql://")  # type: ignore[arg-type]
    nowhere = FastAPI(lifespan=lifespan(App("shop", dsn="host=127.0.0.1 port=1")))
    with pytest.raises(QueueUnavailable), TestClient(nowhere):
        pass


@pytest.mark.slow
@pytest.mark.direct("a worker has a session of its own")
def test_a_worker_in_the_web_server_runs_jobs_and_warns(app: App, db: Any, caplog: pytest.LogCaptureFixture) -> None:
    """`worker=True` runs jobs that requests enqueue, warns that it is for development, and ends with the server."""
    with caplog.at_level(logging.WARNING, "tallybook.web"), TestClient(FastAPI(lifespan=lifespan(app, worker=True))):
        assert "for development only" in caplog.text
        job = app.tasks["welcome"].enqueue_sync(db, 1)
        wait_until(lambda: app.jobs.state(job).sync(db) == "completed", "the job is run", seconds=60)
    assert db.execute("select count(*) from tallybook.worker where ended_at is null").fetchone() == (0,)


@pytest.mark.slow
def test_a_mounted_dashboard_is_closed_with_the_server(app: App) -> None:
    """The host's own login decides access to a mounted dashboard, whose connections end with the lifespan."""
    from tallybook.web import User

    site = dashboard(app, authenticate=lambda request: User("ada") if "ada" in request.headers else None)
    closed: list[bool] = []
    aclose = site.aclose

    async def noted() -> None:
        await aclose()
        closed.append(True)

    site.aclose = noted  # type: ignore[method-assign]
    api = FastAPI(lifespan=lifespan(app))
    api.mount("/queue", site)
    with TestClient(api) as client:
        assert client.get("/queue/").status_code == 403
        assert client.get("/queue/", headers={"ada": "1"}).status_code == 200
        assert not closed
    assert closed == [True]


@pytest.mark.slow
@pytest.mark.direct("a worker has a session of its own")
def test_the_fastapi_page_runs(tmp_path: Path, dsn: str, db: Any) -> None:
    """S4-07: docs/fastapi.md as written: users register; the cron route and a worker welcome them with one client."""
    uses_fastapi = """
import os
os.environ["CRON_TOKEN"] = "t"
from fastapi.testclient import TestClient
from web import api
with TestClient(api) as client:
    print(client.post("/users/7").json(), client.get("/jobs/1").json())
    print(client.post("/users/7/welcome").json())
    print(client.post("/cron").status_code, client.post("/cron", headers={"Authorization": "Bearer t"}).json())
    print(client.get("/jobs/1").json(), client.get("/queue/").status_code)
    print(client.get("/mail").json(), client.post("/users/8").json())
"""
    db.execute("create table customer (id int primary key)")
    assert project(tmp_path, "docs/fastapi.md") == ["jobs.py", "web.py"]
    with http_server() as mail:
        assert python(tmp_path, dsn, "-c", uses_fastapi, MAIL_URL=mail.url).splitlines() == [
            "{'job': 1} available",
            "{'job': 2}",
            "403 {'processed': 2}",
            "completed 403",
            "200 {'job': 3}",
        ]
        with Command(tmp_path, "worker", "-A", "jobs:app", dsn=dsn, MAIL_URL=mail.url) as worker:
            state = "select state from tallybook.job where id = 3"
            wait_until(lambda: db.execute(state).fetchone() == ("completed",), "the worker runs it", seconds=60)
            worker.send(signal.SIGTERM)
            assert worker.ended() == 0
    got = [(request.path, request.body and json.loads(request.body)["user"]) for request in mail.got]
    assert got == [("/welcome", 7), ("/welcome", 7), ("/health", b""), ("/welcome", 8)]


# Flask


@pytest.fixture
def flask_app(app: App) -> Iterator[Flask]:
    flask_app = Flask("shop")
    flask_app.config["TALLYBOOK_DSN"] = "host=nowhere"  # the App has its own
    tallybook = Tallybook(app, flask_app)
    welcome = app.tasks["welcome"]

    @flask_app.post("/<int:user>/<int:boss>")
    def register(user: int, boss: int) -> str:
        with tallybook.transaction() as conn:
            conn.execute("insert into customer values (%s, %s)", (user, boss))
            with tallybook.transaction() as same:
                assert same is conn
                welcome.enqueue_sync(same, user)
            if user == 13:
                raise ValueError
        return "ok"

    @flask_app.post("/session/<int:user>")
    def with_session(user: int) -> str:
        with Session(create_engine(url(app.conninfo()), poolclass=NullPool)) as session, session.begin():
            session.execute(text("insert into customer values (:id)"), {"id": user})
            welcome.enqueue_sync(session, user)
        return "ok"

    yield flask_app


@pytest.mark.slow
@pytest.mark.direct("counts the sessions that are left")
def test_a_view_and_its_jobs_are_one_transaction(flask_app: Flask, db: Any) -> None:
    """S4-21: with psycopg and with a session, row and job are committed; an exception or failed COMMIT keeps none."""
    client = flask_app.test_client()
    assert client.post("/1/1").status_code == 200
    assert client.post("/session/2").status_code == 200
    assert client.post("/13/1").status_code == 500
    assert client.post("/3/99").status_code == 500
    assert rows(db) == (2, 2)
    open_now = (
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and application_name = 'tallybook shop'"
    )
    wait_until(lambda: db.execute(open_now).fetchone() == (0,), "a request's connection is closed with it")


@pytest.mark.slow
def test_handlers_run_in_the_applications_context(app: App, flask_app: Flask, dsn: str, db: Any) -> None:
    """Plain and async handlers have current_app, and teardowns run after each job."""
    seen: list[str] = []
    torn: list[object] = []
    flask_app.teardown_appcontext(torn.append)

    @app.task
    def plain() -> None:
        seen.append(f"plain {current_app.name}")

    @app.task
    async def asynchronous() -> None:
        seen.append(f"async {current_app.name}")

    app.enqueue_many_sync(db, [plain.job(), asynchronous.job()])
    assert drain(app, dsn=dsn).completed == 2
    assert sorted(seen) == ["async shop", "plain shop"] and len(torn) == 2
    assert not current_app


@pytest.mark.slow
def test_flask_commands_know_the_app(app: App, flask_app: Flask, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`flask tallybook` knows the App and its database, prints errors as one line, and leaves the environment alone."""
    monkeypatch.delenv("TALLYBOOK_APP", raising=False)
    monkeypatch.delenv("TALLYBOOK_DSN", raising=False)
    app.tasks["welcome"].enqueue_sync(db, 1)
    runner = flask_app.test_cli_runner()
    shown = runner.invoke(args=["tallybook", "job", "show", "1"])
    assert shown.exit_code == 0 and "welcome" in shown.output
    wrong = runner.invoke(args=["tallybook", "job", "show", "4711"])
    assert wrong.exit_code == 1 and "tallybook: error:" in wrong.output
    import os

    assert "TALLYBOOK_APP" not in os.environ and "TALLYBOOK_DSN" not in os.environ


@pytest.mark.slow
def test_wrong_uses_of_the_flask_extension_are_said(app: App, dsn: str, db: Any) -> None:
    """A Flask application instead of the App, and a job before init_app, are clear errors."""
    with pytest.raises(ConfigError, match="not a Tallybook App"):
        Tallybook(Flask("shop"))  # type: ignore[arg-type]
    Tallybook(app)
    job = app.tasks["welcome"].enqueue_sync(db, 1)
    drain(app, dsn=dsn)
    assert "call init_app" in (app.get(job).sync(db).last_error or "")


@pytest.mark.slow
def test_the_flask_page_runs(tmp_path: Path, dsn: str, db: Any) -> None:
    """docs/flask.md as written: a job runs in the application's context; its commands run, but for the endless one."""
    uses_flask = """
from web import create_app
from jobs import app
from tallybook.testing import drain
client = create_app(GREETING="hello").test_client()
print(client.post("/users", data={"id": "7"}).json)
drain(app)
print(client.get("/jobs/1").json, app.result(1).sync())
"""
    db.execute("create table customer (id int primary key)")
    assert project(tmp_path, "docs/flask.md") == ["jobs.py", "web.py"]
    assert python(tmp_path, dsn, "-c", uses_flask).splitlines() == [
        "{'job': 1}",
        "{'state': 'completed'} hello, user 7",
    ]
    (commands,) = blocks(ROOT / "docs/flask.md", "sh")
    said = [line.split() for line in commands.splitlines()]
    assert [words[4] for words in said] == ["migrate", "worker", "dead"]
    for words in said:
        python(tmp_path, dsn, "-m", *words, *(["--help"] if words[4] == "worker" else []))


@pytest.mark.slow
@pytest.mark.direct("workers have sessions of their own")
def test_flask_workers_in_several_processes_find_their_app(tmp_path: Path, dsn: str, db: Any) -> None:
    """`flask --app web tallybook worker --processes 2`: each process finds the application and runs its jobs."""
    import os
    import signal
    import subprocess
    import sys

    project(tmp_path, "docs/flask.md")
    db.execute("""select tallybook.enqueue('mail', 'send_welcome', '{"user_id": 7}')""")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TALLYBOOK_", "FLASK_"))}
    words = ["-m", "flask", "--app", "web", "tallybook", "worker", "--processes", "2"]
    running = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env={**clean, "TALLYBOOK_DSN": dsn})
    try:
        done = "select state from tallybook.job"
        wait_until(lambda: db.execute(done).fetchone() == ("completed",), "it is run", seconds=60)
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0


# SQLAlchemy


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Did not recognize type")
@pytest.mark.parametrize("spared", [True, False], ids=["with the helper", "without"])
def test_alembics_autogenerate_leaves_the_schema_alone(spared: bool, app: App, dsn: str) -> None:
    """With include_name, autogenerate drops only the user's forgotten table; without it, Tallybook's tables as well."""
    with create_engine(url(dsn), poolclass=NullPool).connect() as connection:
        opts = {"include_schemas": True, **({"include_name": include_name} if spared else {})}
        found = compare_metadata(MigrationContext.configure(connection, opts=opts), MetaData())
    dropped = {(change[1].schema, change[1].name) for change in found if change[0] == "remove_table"}
    assert any(name == "customer" for _, name in dropped)
    assert any(schema == "tallybook" for schema, _ in dropped) is not spared


@pytest.mark.slow
def test_include_name_speaks_of_that_schema_only() -> None:
    """include_name leaves out the schema tallybook and its tables, and nothing else; the default schema is None."""
    assert not include_name("tallybook", "schema", {})
    assert not include_name("job", "table", {"schema_name": "tallybook"})
    assert include_name(None, "schema", {}) and include_name("other", "schema", {})
    assert include_name("tallybook", "table", {"schema_name": None})


@pytest.mark.slow
def test_the_sqlalchemy_page_runs(tmp_path: Path, dsn: str, db: Any) -> None:
    """S4-21: docs/sqlalchemy.md as written: a customer and a job in one session, and an atomic handler with another."""
    assert project(tmp_path, "docs/sqlalchemy.md") == ["models.py", "signup.py", "web.py"]
    there = url(dsn).render_as_string(hide_password=False).replace("+psycopg", "")
    assert python(tmp_path, there, "signup.py") == "job 1\n"
    code = "from signup import app; from tallybook.testing import drain; drain(app); print(app.result(1).sync())"
    assert python(tmp_path, there, "-c", code) == "welcome, ada@example.org\n"
    code = """
from fastapi.testclient import TestClient
from tallybook.testing import drain
from web import api, app
with TestClient(api) as client:
    job = client.post("/customers", params={"email": "bob@example.org"}).json()
drain(app)
print(app.result(job).sync())
"""
    assert python(tmp_path, there, "-c", code) == "welcome, bob@example.org\n"
