"""tallybook worker: real processes, real signals, and mistakes in -A."""

import asyncio
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from support.cli import Command, children, is_alive
from support.database import one
from support.proxy import Proxy
from support.waiting import wait_until
from tallybook import App
from tallybook._cli.database import check_schema
from tallybook._cli.errors import Problem
from tallybook._cli.loading import load_app
from tallybook._cli.worker import _run
from tallybook._db.link import Link, aside
from tallybook._worker.life.signals import Stop
from tallybook._worker.life.supervisor import Child
from tallybook._worker.settings import WorkerSettings

SHOP = """
import asyncio, logging, os, pathlib, time
from tallybook import App, Context
app = App("shop")

@app.task(queue="mail")
def hello(name: str) -> None:
    logging.getLogger("shop.mail").info("hello %s", name)

@app.task
async def meet(ctx: Context, me: str, other: str) -> None:
    pathlib.Path(me).touch()
    ctx.log.info("waits for %s", other)
    while not pathlib.Path(other).exists():
        await asyncio.sleep(0.02)

@app.task
async def leaves() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(exits())

async def exits() -> None:
    raise SystemExit(0)

@app.task
async def calls(ctx: Context) -> None:
    ctx.log.info("calls")
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 60) for _ in range(40)))
"""
READY = " serves "


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A directory with the module `shop` in it."""
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def worker(folder: Path, dsn: str, *words: str) -> Command:
    return Command(folder, "worker", "-A", "shop:app", "--dsn", dsn, *words)


def put(db: Any, queue: str, task: str, **args: str) -> int:
    return int(one(db, "select tallybook.enqueue(%s, %s, %s::jsonb)", queue, task, json.dumps(args)))


def test_worker_runs_jobs_and_stops(shop: Path, dsn: str, db: Any) -> None:
    """The worker serves the queues of its app's tasks, names the job on each log line, and ends with code 0."""
    with worker(shop, dsn) as running:
        job = put(db, "mail", "hello", name="Ann")
        running.says(f"shop.mail: [hello {job}] hello Ann")
        running.send(signal.SIGTERM)
        assert running.ended() == 0
        assert "stopped: 1 completed" in running.output


def test_worker_logs_json(shop: Path, dsn: str, db: Any) -> None:
    """--log-format json: each line is one object; a job's lines have job, task, queue and attempt."""
    with worker(shop, dsn, "--log-format", "json") as running:
        job = put(db, "mail", "hello", name="Ann")
        running.says("hello Ann")
        running.send(signal.SIGINT)
        assert running.ended() == 0
        lines = [json.loads(line) for line in running.output.splitlines()]
    (line,) = [line for line in lines if line["message"] == "hello Ann"]
    assert (line["job"], line["task"], line["queue"], line["attempt"]) == (job, "hello", "mail", 1)


def test_stop_waits_for_a_running_job(shop: Path, dsn: str, db: Any) -> None:
    """After SIGTERM a running job finishes; a second SIGTERM gives it back unfinished."""
    with worker(shop, dsn, "--queues", "default=1") as running:
        first = put(db, "default", "meet", me="a", other="b")
        running.says(f"[meet {first}] waits for b")
        running.send(signal.SIGTERM)
        running.says("stopping: waiting for 1 running jobs")
        (shop / "b").touch()
        assert running.ended() == 0
    with worker(shop, dsn) as running:
        second = put(db, "default", "meet", me="c", other="never")
        running.says(f"[meet {second}] waits for never")
        running.send(signal.SIGTERM)
        running.says("stopping: waiting")
        running.send(signal.SIGTERM)
        assert running.ended() == 0
        assert "1 given back" in running.output
    found = db.execute("select state, failures from tallybook.job order by id").fetchall()
    assert found == [("completed", 0), ("available", 0)]


def test_sys_exit_in_a_handlers_own_task_stops_the_worker(shop: Path, dsn: str, db: Any) -> None:
    """The worker stops as by a signal, with code 1: that attempt fails, and the job beside it completes."""
    with worker(shop, dsn) as running:
        job = put(db, "default", "meet", me="a", other="b")
        running.says(f"[meet {job}] waits for b")
        put(db, "default", "leaves")
        running.says("stopping: waiting")
        (shop / "b").touch()
        assert running.ended() == 1
        assert "stopped: 1 completed, 1 failed" in running.output
    found = db.execute("select task, state, failures, crashes from tallybook.job order by id").fetchall()
    assert found == [("meet", "completed", 0, 0), ("leaves", "retrying", 1, 0)]


def test_a_call_in_a_thread_does_not_keep_the_process(shop: Path, dsn: str, db: Any) -> None:
    """After the second signal the process ends with code 0, although a call of asyncio.to_thread still runs."""
    with worker(shop, dsn) as running:
        job = put(db, "default", "calls")
        running.says(f"[calls {job}] calls")
        running.send(signal.SIGTERM)
        running.says("stopping: waiting")
        running.send(signal.SIGTERM)
        assert running.ended(20) == 0
        assert "1 given back" in running.output and "asyncio.to_thread still run" in running.output


def test_calls_in_threads_do_not_keep_the_worker_from_its_server(shop: Path, dsn: str, db: Any) -> None:
    """With all threads of asyncio.to_thread in use, a worker whose DSN has a host name connects again."""
    with Proxy(dsn) as proxy, worker(shop, make_conninfo(proxy.dsn, host="localhost")) as running:
        job = put(db, "default", "calls")
        running.says(f"[calls {job}] calls")
        proxy.cut()
        put(db, "default", "hello", name="Ada")
        running.says("hello Ada")


def test_no_signal_falls_between_the_wait_for_the_server_and_the_worker(
    dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SIGTERM at the moment when the server is found stops the worker that would start now."""

    async def told_meanwhile(look: Any, *of: Any) -> Any:
        if look is check_schema:  # the last step of the wait
            return os.kill(os.getpid(), signal.SIGTERM)
        return await aside(look, *of)

    close = Link.close

    async def closed(link: Link) -> None:  # closing may take a turn of the loop
        await asyncio.sleep(0)
        await close(link)

    monkeypatch.setattr(sys.modules["tallybook._cli.worker"], "aside", told_meanwhile)  # the package has the command
    monkeypatch.setattr(Link, "close", closed)
    run = _run(App("shop"), dsn, WorkerSettings(queues={"mail": 1}), None, Stop())
    assert asyncio.run(asyncio.wait_for(run, 10)) == 0
    assert db.execute("select count(*) from tallybook.worker").fetchall() == [(0,)]


def test_replicas_share_the_queue(shop: Path, dsn: str, db: Any) -> None:
    """S2-10: a second worker process shares the queue: two jobs that wait for each other end, with one slot each."""
    with worker(shop, dsn, "--queues", "default=1") as one, worker(shop, dsn, "--queues", "default=1") as two:
        one.says(READY)
        two.says(READY)
        put(db, "default", "meet", me="a", other="b")
        put(db, "default", "meet", me="b", other="a")
        done = "select count(distinct worker_id) from tallybook.attempt where state = 'completed'"
        wait_until(lambda: db.execute(done).fetchall() == [(2,)], "both jobs completed, each by a worker of its own")


def test_worker_waits_for_a_server_that_is_down(shop: Path) -> None:
    """A worker waits for a server that is down, and says so; a stop ends the wait with code 0."""
    with worker(shop, "host=127.0.0.1 port=1 password=geheim") as running:
        running.says("waiting for it")
        running.send(signal.SIGTERM)
        assert running.ended() == 0
        assert "geheim" not in running.output


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("what", ["database", "schema"])
def test_worker_that_cannot_work_ends_at_once(shop: Path, empty_dsn: str, what: str, processes: str) -> None:
    """A missing database or schema gives one line and code 2, with several processes too."""
    wrong = make_conninfo(empty_dsn, dbname="no_such_database") if what == "database" else empty_dsn
    with worker(shop, wrong, "--processes", processes) as running:
        assert running.ended() == 2
        said = "does not exist" if what == "database" else "hint: Run `tallybook migrate`"
        assert said in running.output and "Traceback" not in running.output


@pytest.mark.slow
def test_supervisor_replaces_a_child(shop: Path, dsn: str, db: Any) -> None:
    """--processes 2: a killed child is replaced, and a stop ends all with code 0."""
    quick = ("--heartbeat", "400 ms", "--lease", "2 s")
    with worker(shop, dsn, "--processes", "2", "--name", "pair", *quick) as parent:
        parent.says(READY, times=2)
        before = children(parent.pid)
        os.kill(before[0], signal.SIGKILL)
        parent.says("was ended by SIGKILL; starting a new one in 1 s")
        parent.says(READY, times=3)
        assert len(set(before) - set(children(parent.pid))) == 1
        assert {name for (name,) in db.execute("select name from tallybook.worker").fetchall()} == {"pair-1", "pair-2"}
        parent.send(signal.SIGTERM)
        assert parent.ended() == 0
        assert not any(map(is_alive, before))


@pytest.mark.slow
def test_supervisor_that_cannot_start_a_child_tries_again(shop: Path, dsn: str) -> None:
    """--processes 2: while no new child can be started, the other one works on; later the dead one is replaced."""
    with worker(shop, dsn, "--processes", "2") as parent:
        parent.says(READY, times=2)
        first, second = children(parent.pid)
        limits = resource.prlimit(parent.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        os.kill(first, signal.SIGKILL)
        parent.says("cannot be started")
        assert children(parent.pid) == [second]
        resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, limits)
        parent.says(READY, times=3)
        parent.send(signal.SIGTERM)
        assert parent.ended() == 0


@pytest.mark.slow
def test_supervisor_replaces_a_child_that_a_handler_ends_with_code_2(tmp_path: Path, dsn: str, db: Any) -> None:
    """--processes 2: a handler that ends its process with the code of a wrong setting does not stop the workers."""
    dies = """
import os
from tallybook import App, Context
app = App("shop")

@app.task
async def dies(ctx: Context) -> None:
    if ctx.attempt == 1:
        os._exit(2)
"""
    (tmp_path / "shop.py").write_text(dies)
    with worker(tmp_path, dsn, "--processes", "2") as parent:
        parent.says(READY, times=2)
        put(db, "default", "dies")
        parent.says("ended with code 2; starting a new one in 1 s")
        parent.says(READY, times=3)
        parent.send(signal.SIGTERM)
        assert parent.ended() == 0


@pytest.mark.slow
def test_supervisor_replaces_a_worker_that_is_used_up(tmp_path: Path, dsn: str, db: Any) -> None:
    """F25: a child that lost its threads to endless handlers stops with code 3; a new one takes over."""
    # It never ends, and takes its worker's only slot.
    stuck = """
import time
from datetime import timedelta
from tallybook import App, Constant
app = App("shop")

@app.task(timeout="100 ms", retry=Constant(timedelta(hours=1)))
def stuck() -> None:
    time.sleep(600)
"""
    (tmp_path / "shop.py").write_text(stuck)
    with worker(tmp_path, dsn, "--processes", "2", "--queues", "default=1") as parent:
        parent.says(READY, times=2)
        put(db, "default", "stuck")
        parent.says("the worker stops, to be started again")
        parent.says("ended with code 3; starting a new one in 1 s")
        parent.says(READY, times=3)
        assert db.execute("select failures, crashes, last_error from tallybook.job").fetchall() == [
            (1, 0, "deadline of 100 ms passed")
        ]
        parent.send(signal.SIGTERM)
        assert parent.ended() == 0


def test_supervisor_passes_the_second_signal_on(shop: Path, dsn: str, db: Any) -> None:
    """The first signal to the parent stops its children, the second aborts their jobs."""
    with worker(shop, dsn, "--processes", "2", "--queues", "default=1") as parent:
        job = put(db, "default", "meet", me="a", other="never")
        parent.says(f"[meet {job}] waits for never")
        parent.send(signal.SIGINT)
        parent.says("stopping: waiting for 1 running jobs")
        parent.send(signal.SIGINT)
        assert parent.ended() == 0, parent.output
    assert db.execute("select state, failures from tallybook.job").fetchall() == [("available", 0)]


async def test_a_signal_leaves_the_exit_code_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal for a child that has just ended, which asyncio has not noticed yet, does not make its exit code 255."""
    waitpid, go = os.waitpid, threading.Event()
    monkeypatch.setattr(os, "waitpid", lambda *given: go.wait(60) and waitpid(*given))
    child = Child(["--version"])
    await child.start()
    wait_until(lambda: not is_alive(child.pid), "it has ended, while the loop stands still")
    child.send(signal.SIGTERM)
    go.set()
    assert await child.ended() == 0


def test_children_do_not_outlive_a_killed_supervisor(shop: Path, dsn: str) -> None:
    """After SIGKILL of the parent its children stop by themselves, as after SIGTERM."""
    with worker(shop, dsn, "--processes", "2") as parent:
        parent.says(READY, times=2)
        left = children(parent.pid)
        assert len(left) == 2
        parent.send(signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, left)), "the children are gone", seconds=40)
        assert parent.output.count("stopped: 0 completed") == 2


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("godo:app", "there is no module 'cli_godo'|Did you mean cli_good?"),
        ("good:ap", "has no 'ap'|Did you mean cli_good:app?"),
        ("good:other", "is not an App but of type int|Did you mean cli_good:app?"),
        ("good.py:app", "is a file, not a module|Write -A cli_good:app"),
        ("twin", "there are 2 Apps|Pass one of: cli_twin:one, cli_twin:two"),
        ("none", "there is no App|Write -A module:app"),
        ("broken:app", "SyntaxError: invalid syntax|cli_broken.py:1)"),
        ("raises:app", "KeyError: 'NO_SUCH_NAME'|cli_raises.py:3)"),
        ("needs:app", "No module named 'no_such_thing'|cli_needs.py:1)"),
        ("exits:app", "exits during its import (exit code 3)|cli_exits.py:1)"),
        ("double:app", "task 't' is defined twice|cli_double.py:5)"),
        ("option:app", "not a tuple of names|cli_option.py:3)"),
    ],
)
def test_app_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str) -> None:
    """Errors of -A: the module, the import error with file and line, or the object, and a suggestion."""
    apps = {
        "good": "from tallybook import App\napp = App('good')\nother = 3\n",
        "twin": "from tallybook import App\none = App('a')\ntwo = App('b')\n",
        "none": "x = 1\n",
        "broken": "def f(:\n",
        "raises": "import os\n\nos.environ['NO_SUCH_NAME']\n",
        "needs": "import no_such_thing\n",
        "exits": "raise SystemExit(3)\n",
        "option": "from tallybook import App\napp = App('o')\n@app.task(limits='x')\ndef t(): ...\n",
        "double": "from tallybook import App\napp = App('d')\n@app.task\ndef t(): ...\n"
        "@app.task(name='t')\ndef u(): ...\n",
    }
    for name, text in apps.items():
        (tmp_path / f"cli_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Problem) as caught:
        load_app(f"cli_{target}")
    told = f"{caught.value.message}|{caught.value.hint}"
    assert all(part in told for part in said.split("|")), told
    assert caught.value.code == 2
