"""A process forked after the app has opened its connections, and the signals that a worker handles."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from support.paths import ROOT
from support.workers import eventually
from tallybook import App
from tallybook._worker.life import signals


@pytest.mark.slow
@pytest.mark.parametrize("how", ["inside", "between"])
def test_a_fork_does_not_use_its_parents_connections(dsn: str, db: Any, how: str) -> None:
    """F42: after a fork with a pool open, the child enqueues, opens a pool, runs a worker; the parent still works."""
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "support.forked", dsn, how],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stderr
    assert db.execute("select count(*) from tallybook.job").fetchone() == (24 if how == "inside" else 5,)


def test_without_the_look_a_fork_would_use_its_parents_pool(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F42, negative control: except for the process number, the inherited pool looks like the child's own."""
    app = App("shop", dsn=dsn)

    async def main() -> None:
        async with app.open():
            pool = app._own_pool()
            assert pool is not None
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: -1)
                assert app._own_pool() is None
                patch.setattr(app, "_pools", {(-1, asyncio.get_running_loop()): pool})
                assert app._own_pool() is not None

    asyncio.run(main())


@pytest.mark.parametrize("taken", [False, True])
def test_a_program_keeps_the_signals_that_it_handles(dsn: str, db: Any, taken: bool) -> None:
    """run_worker stops at a SIGTERM that nobody handles; a handler of the program (a web server, say) stays."""

    async def note() -> None:
        """Do nothing: a worker without a task would not start."""

    app, heard = App("shop", dsn=dsn), []
    app.task(note)
    before = signal.getsignal(signal.SIGTERM)

    def mine(*_: object) -> None:
        heard.append(1)

    async def main() -> None:
        if taken:
            signal.signal(signal.SIGTERM, mine)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        expected = signal.getsignal(signal.SIGTERM)
        life = asyncio.create_task(app.run_worker())
        on_record = "select count(*) from tallybook.worker where ended_at is null"
        await eventually(lambda: db.execute(on_record).fetchone() == (1,), "it runs")
        os.kill(os.getpid(), signal.SIGTERM)
        if taken:
            await eventually(lambda: heard, "the program hears it")
            assert db.execute(on_record).fetchone() == (1,)
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
        else:
            await asyncio.wait_for(life, 10)
        assert signal.getsignal(signal.SIGTERM) == expected

    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_worker_in_another_thread_takes_no_signal() -> None:
    """Only the main thread handles signals: in another thread a worker starts without them."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(signals.unclaimed()))
    thread.start()
    thread.join()
    assert found == [()]
