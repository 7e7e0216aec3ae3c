"""Handlers that misbehave, in a module that a child process can import, and a worker process for them.

The worker is `python -m support.zoo DSN '{"lease": 2.0, ...}'`. TALLYBOOK_TEST_ALONE=no removes the guard that runs
suspects alone.
"""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from support.waiting import wait_until
from support.worker_process import WorkerProcess, Workers, read
from tallybook import App, Cancel, Complete, Constant, Context, Dead, Drop, Kill, Reject, Reschedule, Snooze
from tallybook.errors import ConfigError

app = App("zoo")
LATER = Constant(timedelta(hours=1))
NOW = Constant(timedelta(0))


@dataclass
class Order:
    id: int
    due: date


# Handlers that run in child processes.


@app.task(process=True, retry=LATER)
def work(ctx: Context, a: int, when: datetime, order: Order, *, word: str = "x") -> dict[str, Any]:
    """Write the args, the context and the process's ids to a file, and return them."""
    seen = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "args": [a, when.isoformat(), order.id, order.due.isoformat(), word],
        "ctx": [ctx.job_id, ctx.task, ctx.attempt, ctx.queue, ctx.worker, ctx.headers, ctx.cancelled, ctx.timed_out],
        "deadline": str(ctx.deadline),
        "stdin": sys.stdin.read(),
        "env": sorted(name for name in os.environ if name.startswith(("TALLYBOOK", "PG"))),
    }
    print("this is stdout, not the protocol")
    os.write(1, b"nor is this\n")
    ctx.log.info("page %s", 4)
    Path(word).write_text(json.dumps(seen))
    return seen


@app.task(process=True, retry=LATER, timeout="20 s")
def where(ctx: Context, path: str, seconds: float = 0.0) -> None:
    """Write the process's id, then work for a while."""
    Path(path).write_text(str(os.getpid()))
    assert ctx.deadline is not None and ctx.deadline > datetime.now(UTC)
    time.sleep(seconds)


@app.task(process=True, retry=LATER)
def listens(ctx: Context, path: str) -> None:
    """End when asked to stop."""
    Path(path).write_text(str(os.getpid()))
    while not ctx.cancelled:
        time.sleep(0.01)


@app.task(process=True, retry=LATER, env=("TALLYBOOK_DSN", "PGPASSWORD"))
def trusted(path: str) -> None:
    """Run with access to the database."""
    names = sorted(name for name in os.environ if name in ("TALLYBOOK_DSN", "PGPASSWORD", "PGPASSFILE"))
    Path(path).write_text(json.dumps(names))


@app.task(process=True)
def naps(seconds: float) -> None:
    """Take some time."""
    time.sleep(seconds)


@app.task(process=True, retry=LATER)
def dies(how: str, path: str = "/dev/null") -> None:
    """End the process in this way, or with this exit code."""
    match how:
        case "segfault":
            ctypes.string_at(0)
        case "killed":  # as when the kernel runs out of memory
            os.kill(os.getpid(), signal.SIGKILL)
        case "without its socket":  # the handler's end cannot be received
            os.closerange(3, 256)
        case "with an heir":  # a child that keeps the socket open
            if (heir := os.fork()) == 0:
                time.sleep(30)
                os._exit(0)
            Path(path).write_text(str(heir))
            os._exit(7)
        case _:
            os._exit(int(how))


@app.task(process=True, retry=LATER, memory="512 MB")
def hoards(path: str) -> None:
    """Take memory until there is none."""
    Path(path).write_text(str(os.getpid()))
    kept = []
    while True:
        kept.append(bytearray(16 << 20))


@app.task(process=True, retry=LATER)
def impatient(ctx: Context) -> None:
    """Cancel a call before its answer has come, and make another."""

    async def calls() -> None:
        first = asyncio.ensure_future(ctx.get_checkpoint())
        await asyncio.sleep(0)  # its question is sent
        first.cancel()
        await ctx.progress(0.5)

    asyncio.run(calls())


def limited(ctx: Context) -> None:
    """Push back all calls of one limit, then request a call of another."""
    ctx.push_back_sync("other", timedelta(hours=1))
    ctx.limit_sync("provider:acme")


def locked(ctx: Context) -> None:
    """Request a lock."""
    with ctx.lock("ledger"):
        raise AssertionError("it was taken")


@app.task(process=True, retry=LATER, memory="512 MB")
def is_modest(path: str) -> None:
    Path(path).write_text(str(os.getpid()))


@app.task(process=True, retry=LATER, timeout="1 s")
def spins(path: str, child: bool = False) -> None:
    """Loop for ever; with `child`, start a program that sleeps."""
    started = subprocess.Popen(["sleep", "60"]) if child else None
    Path(path).write_text(json.dumps([os.getpid(), started.pid if started else 0]))
    while True:
        pass


@app.task(process=True, retry=LATER)
def deaf(ctx: Context, path: str) -> None:
    """Never end, and ignore all signals, also SIGTERM."""
    Path(path).write_text(str(os.getpid()))
    while True:
        time.sleep(1)


@app.task(process=True, retry=LATER)
def raises(kind: str) -> None:
    match kind:
        case "ValueError":
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise ValueError("no luck") from error
        case "SystemExit":
            raise SystemExit(3)
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "GeneratorExit":
            raise GeneratorExit
        case "unprintable":
            raise Unprintable
        case "group":
            raise BaseExceptionGroup("many", [KeyboardInterrupt(), ValueError("a\0b \ud800")])
        case "recursion":
            raises(kind)


def by_error(failures: int, error: BaseException) -> timedelta | None:
    """Decide by the exception, whose class exists only in the process where it was raised."""
    return timedelta(minutes=7 * failures) if type(error) is Unprintable else None


@app.task(process=True, retry=by_error, no_retry=(KeyError,))
def decides(kind: str) -> None:
    """Raise an error of this kind, which decides the next step."""
    if kind == "retry-after":
        error = Unprintable()
        error.retry_after = 3600  # type: ignore[attr-defined]
        raise error
    raise {"policy": Unprintable, "no_retry": KeyError, "none": ValueError}[kind]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@app.task(process=True, retry=NOW)
def goes_on(ctx: Context) -> list[int]:
    """Fail once after a checkpoint, and continue from there."""
    start = ctx.get_checkpoint_sync() or {"page": 0}
    ctx.progress_sync(0.5, f"page {start['page']}")
    if ctx.attempt == 1:
        ctx.set_checkpoint_sync({"page": 4})
        raise ValueError("half way")
    try:
        ctx.progress_sync(7.0)
    except ConfigError:
        return [ctx.attempt, start["page"]]
    return []


@app.task(process=True, retry=LATER)
def says(outcome: str) -> Any:
    """Return or raise an outcome, or a value that JSON does not support."""
    match outcome:
        case "snooze":
            return Snooze(timedelta(hours=1))
        case "until":
            raise Snooze(until=datetime.now(UTC) + timedelta(hours=2))
        case "cancel":
            return Cancel("nothing left")
        case "dead":
            raise Dead("for good")
    return object()


@app.task(process=True, retry=LATER)
def iterates(ctx: Context, kind: str, seen: str = "") -> Any:
    """End the iteration in the way of `kind`."""
    assert ctx.subject is not None
    told = f"{ctx.subject.name} {ctx.subject.iterations}"
    match kind:
        case "reschedule":
            raise Reschedule("+1 week", args={"kind": kind, "seen": told})
        case "complete":
            return Complete(args={"kind": kind, "seen": "x"})
        case "drop":
            return Drop()
        case "kill":
            return Kill("no")
        case "reject":
            return Reject("no", {"code": 502}, ref_id="r1", retry_in="1 hour")
        case "misfit":
            return Reschedule("+1 week", args={"colour": "red"})
    return Reschedule("+1 week", args={"kind": object()})


# Handlers that run in the worker's process.


@app.task(timeout="300 ms", retry=LATER)
async def sleeps() -> None:
    await asyncio.sleep(60)


@app.task(timeout="300 ms", retry=LATER)
async def swallows() -> None:
    """Ignore every cancel."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@app.task(timeout="300 ms", retry=LATER)
async def swallows_all() -> None:
    while True:
        with suppress(BaseException):
            await asyncio.sleep(60)


@app.task
async def swallows_for_ever() -> None:
    """Ignore every cancel, without a deadline."""
    await swallows.fn()


@app.task(timeout="300 ms", retry=LATER)
def turns() -> None:
    """Loop for ever in a thread, and release the interpreter now and then."""
    while True:
        time.sleep(0.001)


@app.task(retry=LATER)
async def blocks(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - the mistake that this is about


@app.task
async def fine(n: int = 0) -> None:
    await asyncio.sleep(0.01)


@app.task(retry=NOW)
async def poison() -> None:
    """Kill the worker after the others have begun."""
    await asyncio.sleep(0.1)
    os._exit(9)


@app.task(retry=NOW)
async def neighbour(n: int) -> None:
    """Run long enough to be running when the process is killed."""
    await asyncio.sleep(0.3)


@app.task(retry=NOW)
async def stays() -> None:
    """Run longer than the jobs beside it, also on a busy machine."""
    await asyncio.sleep(4)


@contextmanager
def zoo(dsn: str, **options: Any) -> Iterator[WorkerProcess]:
    """Run one worker of the zoo for the block."""
    with Workers(dsn, module="support.zoo") as workers:
        yield workers.start(wait=False, **options)


def number_in(path: Path) -> int:
    """Return the process id that a handler has written there."""
    wait_until(lambda: path.exists() and path.read_text(), f"{path.name} is written")
    return int(path.read_text())


def main(dsn: str, settings: str) -> None:
    from tallybook._worker import logs
    from tallybook._worker.claim import suspects
    from tallybook._worker.entry import run_worker
    from tallybook._worker.life import supervisor

    if os.environ.get("TALLYBOOK_TEST_ALONE") == "no":  # the negative control: all jobs start together
        suspects.Suspects._apart = lambda self, jobs: ([], jobs)  # type: ignore[method-assign]
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    logs.setup()
    report = asyncio.run(run_worker(app, dsn=dsn, **read(settings)))
    sys.exit(supervisor.WORN_OUT if report.worn_out else 0)


if __name__ == "__main__":
    from support import zoo as importable  # tasks are looked up by this module's name, not as __main__

    importable.main(*sys.argv[1:])
