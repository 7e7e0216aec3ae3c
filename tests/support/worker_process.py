"""A worker process, whose handlers write their runs to the test's database.

    with Workers(dsn, db) as workers:
        first = workers.start()
        note.enqueue_sync(db, 1)
        first.signal(signal.SIGKILL)

The worker is `python -m support.worker_process DSN '{"name": "w1", "lease": 2.0, ...}'`.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Self

import psycopg

from support.paths import ROOT
from support.waiting import wait_until
from tallybook import App, Constant, Context

TABLES = """
create table if not exists ran (job_id bigint, attempt int, worker text, n int, primary key (job_id, attempt));
create table if not exists gate (open boolean);
"""
PYTHONPATH = f"{ROOT / 'tests'}{os.pathsep}{ROOT / 'src'}"
QUICK: dict[str, Any] = {"lease": 2.0, "heartbeat": 0.4, "rescue_look": 0.3, "stop_timeout": 15.0, "abort_timeout": 1.0}

app = App("shop")


@app.lifespan
async def connection(ctx: Context) -> AsyncIterator[None]:
    # No prepared statements, as needed behind a pooler in transaction mode.
    options: Any = {"autocommit": True, "prepare_threshold": None}
    async with await psycopg.AsyncConnection.connect(sys.argv[1], **options) as ctx.state.conn:
        yield


async def _leave_trace(ctx: Context, n: int) -> None:
    await ctx.state.conn.execute("insert into ran values (%s, %s, %s, %s)", (ctx.job_id, ctx.attempt, ctx.worker, n))


@app.task
async def note(ctx: Context, n: int) -> None:
    """Write a row to `ran`; a second row of the same attempt would be an error."""
    await _leave_trace(ctx, n)


@app.task(retry=Constant(timedelta(0)))
async def hold(ctx: Context, n: int) -> None:
    """Run until the gate is open."""
    await _leave_trace(ctx, n)
    gate = "select from gate"
    while not await (await ctx.state.conn.execute(gate)).fetchall():  # noqa: ASYNC110  the gate is a table
        await asyncio.sleep(0.02)


@app.task
async def rest(n: int) -> None:
    """Wait a moment without the database, so that the handler survives the server's restart."""
    await asyncio.sleep(0.01)


@app.task
def stuck() -> None:
    """Block a thread for ever."""
    threading.Event().wait(120)


class WorkerProcess:
    """One worker process, whose log can be read while it runs."""

    def __init__(self, dsn: str, name: str, options: dict[str, Any], module: str, **environment: str) -> None:
        self.name = name
        command = [sys.executable, "-m", module, dsn, json.dumps({**QUICK, "name": name, **options})]
        env = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        self.process = subprocess.Popen(command, env=env, stderr=self._log)

    @property
    def said(self) -> str:
        """The log so far; `pread` leaves the position, which the process shares, where it is."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def ends(self, seconds: float = 60.0) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"worker {self.name} did not end within {seconds:g} s") from None

    def kill(self) -> str:
        """Kill the process and return its log."""
        self.process.kill()
        self.process.wait()
        return self.said


class Workers:
    """The worker processes of one test, which are killed at its end."""

    def __init__(self, dsn: str, db: Any = None, *, module: str = "support.worker_process") -> None:
        self._dsn = dsn
        self._module = module
        self._stack = ExitStack()
        self._number = 0
        self.db = db
        if db is not None:
            db.execute(TABLES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, *, wait: bool = True, **options: Any) -> WorkerProcess:
        """Start one more worker, and wait until it is registered."""
        self._number += 1
        worker = WorkerProcess(self._dsn, f"w{self._number}", options, self._module)
        self._stack.callback(lambda: sys.stderr.write(f"--- {worker.name}\n{worker.kill()[-3000:]}\n"))
        if wait:
            wait_until(lambda: self.ids(worker), f"{worker.name} is registered")
        return worker

    def ids(self, worker: WorkerProcess) -> list[int]:
        """Return the ids under which it is, or was, registered."""
        rows = self.db.execute("select id from tallybook.worker where name = %s order by id", (worker.name,)).fetchall()
        return [row[0] for row in rows]

    def ran(self, job: Any) -> list[tuple[int, str]]:
        """Return attempt and worker of every start of this job."""
        return self.db.execute(
            "select attempt, worker from ran where job_id = %s order by attempt", (job.id,)
        ).fetchall()

    def open_gate(self) -> None:
        """Let every `hold` end."""
        self.db.execute("insert into gate values (true)")


def read(settings: str) -> dict[str, Any]:
    """Return the options of a worker; numbers with a decimal point are seconds."""
    given = json.loads(settings).items()
    return {key: timedelta(seconds=value) if isinstance(value, float) else value for key, value in given}


def main(dsn: str, settings: str) -> None:
    from tallybook._worker.entry import run_worker

    asyncio.run(run_worker(app, dsn=dsn, **read(settings)))


if __name__ == "__main__":
    main(*sys.argv[1:])
