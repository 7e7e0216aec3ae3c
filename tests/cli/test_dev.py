"""tallybook dev: a database, a worker and reloads of the code; and nothing left behind."""

import asyncio
import os
import re
import shlex
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.cli import Command, children, invoke, is_alive, parent
from support.pages import FENCED, text
from support.waiting import wait_until
from tallybook._cli import dev
from tallybook._worker.life.supervisor import Child

BEFORE = """
from tallybook import App
app = App("shop")

@app.task(queue="mail")
def hello() -> None:
    print("hello from version 1")
"""


@pytest.fixture
def shop() -> Iterator[Path]:
    """A directory with the module `shop`, reachable for the server's user when we are root."""
    with tempfile.TemporaryDirectory(prefix="tallybook-dev-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "shop.py").write_text(BEFORE)
        yield folder


def database(running: Command) -> str:
    """The DSN that it printed."""
    running.says(" serves ")
    found = re.search(r"^database: (.+)$", running.output, re.MULTILINE)
    assert found, running.output
    return found[1]


def processes(dsn: str, running: Command) -> list[int]:
    """Its guard, its worker and the server."""
    with psycopg.connect(dsn) as conn:
        return [*children(running.pid), parent(conn.info.backend_pid)]


def test_only_a_directory_of_its_own_is_hidden_from_git(tmp_path: Path) -> None:
    """The directory of --data gets a .gitignore, but not if it has files already, as the project's own has."""
    dev._make(tmp_path / "new")
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    dev._make(tmp_path)
    assert not (tmp_path / ".gitignore").exists()


def test_a_stop_before_the_first_start_ends_dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal while dev reads the code for the first time ends it with exit code 0, and no worker starts."""
    loops: list[asyncio.AbstractEventLoop] = []
    child = Child([])

    def look(root: Path) -> dict[str, tuple[int, int]]:
        os.kill(os.getpid(), signal.SIGTERM)
        handled = threading.Event()
        loops[0].call_soon_threadsafe(handled.set)
        assert handled.wait(10)
        return {}

    async def run() -> int:
        loops.append(asyncio.get_running_loop())
        return await dev._run(child, tmp_path)

    monkeypatch.setattr(dev, "_look", look)
    assert asyncio.run(run()) == 0 and child.process is None


@pytest.mark.slow
def test_dev_runs_jobs_and_follows_the_code(shop: Path) -> None:
    """dev starts database, schema and worker; it runs changed code and waits out broken code; Ctrl-C ends all."""
    after = BEFORE.replace("version 1", "version 2")
    with Command(shop, "dev", "-A", "shop:app") as running:
        dsn = database(running)
        invoke("enqueue", "mail", "hello", to=dsn)
        running.says("hello from version 1")
        (shop / "shop.py").write_text("def broken(:\n")
        running.says("the worker ended with code 2; it restarts when the code changes")
        assert "SyntaxError" in running.output and "Traceback" not in running.output
        (shop / "shop.py").write_text(after)
        running.says(" serves ", times=2)
        invoke("enqueue", "mail", "hello", to=dsn)
        running.says("hello from version 2")
        started = processes(dsn, running)
        running.send(signal.SIGINT)
        assert running.ended() == 0
        wait_until(lambda: not any(map(is_alive, started)), "worker and server are gone")
    assert (shop / ".tallybook" / ".gitignore").read_text() == "*\n"


@pytest.mark.slow
def test_dev_leaves_nothing_behind_when_killed(shop: Path) -> None:
    """After SIGKILL of dev its worker and its server end by themselves; the next start finds the jobs again."""

    def states(dsn: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(dsn, autocommit=True) as conn:
            return conn.execute("select state from tallybook.job").fetchall()

    with Command(shop, "dev", "-A", "shop:app", "--no-reload") as running:
        dsn = database(running)
        invoke("enqueue", "mail", "hello", to=dsn)
        wait_until(lambda: states(dsn) == [("completed",)], "the job is completed")
        started = processes(dsn, running)
        assert len(started) >= 3  # guard, worker, postmaster
        running.send(signal.SIGKILL)
        running.ended()
        wait_until(lambda: not any(map(is_alive, started)), "guard, worker and server are gone", seconds=40)
    with Command(shop, "dev", "-A", "shop:app", "--no-reload") as running:
        assert states(database(running)) == [("completed",)]
        running.send(signal.SIGTERM)
        assert running.ended() == 0


@pytest.mark.slow
def test_dev_with_a_database_of_ones_own(shop: Path, empty_dsn: str) -> None:
    """With TALLYBOOK_DSN dev installs the schema there and starts no server."""
    with Command(shop, "dev", "-A", "shop:app", dsn=empty_dsn) as running:
        running.says(" serves ")
        invoke("enqueue", "mail", "hello", to=empty_dsn)
        running.says("hello from version 1")
        running.send(signal.SIGTERM)
        assert running.ended() == 0
    assert not (shop / ".tallybook").exists()


def test_dev_says_how_to_get_its_own_server_again(shop: Path) -> None:
    """Where TALLYBOOK_DSN leads to no server, as after `dev` was started again, the hint is to unset it."""
    with Command(shop, "dev", "-A", "shop:app", dsn="host=/nowhere dbname=shop") as running:
        assert running.ended() == 1
        assert "hint: TALLYBOOK_DSN selects this server; unset it to start a private one" in running.output


def test_dev_names_a_missing_module_before_it_starts_anything(shop: Path) -> None:
    """A missing module gives one line and code 2, no server and no directory."""
    with Command(shop, "dev", "-A", "shopp:app") as running:
        assert running.ended() == 2
        assert "there is no module 'shopp'" in running.output and "Did you mean shop?" in running.output
    assert not (shop / ".tallybook").exists()


@pytest.mark.slow
def test_the_first_job_of_the_readme_takes_ten_lines(shop: Path) -> None:
    """The README leads from an empty folder to a first job in ten typed lines, run as written."""
    written = FENCED.findall(text("README.md").split("## A first job\n")[1].split("\n## ")[0])
    typed = [line for _, body in written for line in body.splitlines() if line.strip() and not line.startswith("#")]
    assert len(typed) + 1 <= 10, typed  # and the line that is pasted
    (app,) = [body for language, body in written if language == "python"]
    (shop / "app.py").write_text(app)
    dev, enqueue = (shlex.split(line)[1:] for line in typed if line.startswith(("tallybook ", ".venv/bin/tallybook ")))
    with Command(shop, *dev) as running:
        running.says("export TALLYBOOK_DSN=")
        pasted = re.search(r"^ *export TALLYBOOK_DSN=(.+)$", running.output, re.MULTILINE)
        assert pasted, running.output
        running.says(" serves ")
        with Command(shop, *enqueue, dsn=shlex.split(pasted[1])[0]) as enqueued:
            assert enqueued.ended() == 0, enqueued.output
        running.says("welcome, user 42 (en)")
        running.send(signal.SIGINT)
        assert running.ended() == 0
