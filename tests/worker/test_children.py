"""Tasks with their own process: a job that damages its process affects no other job."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from support import zoo
from support.cli import is_alive
from support.waiting import wait_until
from support.worker_process import PYTHONPATH
from support.workers import Jobs, eventually, working
from support.zoo import number_in
from tallybook import App, JobInfo
from tallybook._worker.run.children import Children
from tallybook.errors import ConfigError


@pytest.fixture
def jobs(db: Any) -> Jobs:
    return Jobs(zoo.app, db)


async def failed(jobs: Jobs, job: Any) -> dict[str, Any]:
    """Return the error of the only attempt, which has failed."""
    info = await jobs.becomes(job, "retrying")
    assert (info.failures, info.crashes) == (1, 0)
    assert info.errors is not None
    return info.errors[0]


async def test_a_job_runs_in_a_process_that_is_used_again(
    dsn: str,
    db: Any,
    jobs: Jobs,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F28 S25: the child gets typed args and the Context, but no stdin and no credentials; stdout is the handler's."""
    monkeypatch.setenv("TALLYBOOK_DSN", dsn)
    monkeypatch.setenv("PGPASSWORD", "secret")
    caplog.set_level("INFO")  # children log like their worker
    at, order = datetime(2026, 1, 2, 3, tzinfo=UTC), zoo.Order(7, date(2026, 5, 1))
    names = [tmp_path / "one", tmp_path / "two"]
    async with working(zoo.app, dsn, queues={"default": 1}) as worker:
        put = [zoo.work.with_(headers={"trace": "t"}).enqueue_sync(db, 3, at, order, word=str(name)) for name in names]
        infos = await jobs.ends(*put)
    assert [info.state for info in infos] == ["completed"] * 2
    first, second = (json.loads(name.read_text()) for name in names)
    assert first["parent"] == os.getpid() != first["pid"]
    assert first["pid"] == second["pid"]
    assert first["args"] == [3, at.isoformat(), 7, "2026-05-01", str(names[0])]
    assert first["ctx"] == [put[0].id, "work", 1, "default", worker.settings.name, {"trace": "t"}, False, False]
    assert (first["stdin"], first["deadline"]) == ("", "None")
    assert not {"TALLYBOOK_DSN", "PGPASSWORD", "PGPASSFILE"} & set(first["env"])
    out, err = capfd.readouterr()
    assert "this is stdout" in out and "nor is this" in out
    assert f"[work {put[0].id}] page 4" in err
    await eventually(lambda: not is_alive(first["pid"]), "the child has ended with the worker")


async def test_a_task_may_ask_for_credentials(
    dsn: str, db: Any, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S25: the child gets the credentials that `env` names, and no others."""
    for name in ("TALLYBOOK_DSN", "PGPASSWORD", "PGPASSFILE"):
        monkeypatch.setenv(name, dsn if name == "TALLYBOOK_DSN" else "x")
    async with working(zoo.app, dsn):
        await jobs.ends(zoo.trusted.enqueue_sync(db, str(tmp_path / "env")))
    assert json.loads((tmp_path / "env").read_text()) == ["PGPASSWORD", "TALLYBOOK_DSN"]


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("ValueError", "ValueError", "no luck"),
        ("SystemExit", "SystemExit", "3"),
        ("KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("GeneratorExit", "GeneratorExit", ""),
        ("unprintable", "support.zoo.Unprintable", "<unprintable>"),
        ("group", "BaseExceptionGroup", "many (2 sub-exceptions)"),
        ("recursion", "RecursionError", "maximum recursion depth exceeded"),
    ],
)
@pytest.mark.slow
async def test_what_it_raises_comes_back(dsn: str, db: Any, jobs: Jobs, kind: str, name: str, message: str) -> None:
    """F29: type, message and traceback of any exception in the process come back as a failure, which is retried."""
    async with working(zoo.app, dsn) as worker:
        error = await failed(jobs, zoo.raises.enqueue_sync(db, kind))
    assert error["type"] == name
    assert error["message"].startswith(message)
    assert (error["attempt"], error["worker"]) == (1, worker.settings.name)
    assert "zoo.py" in error["traceback"]
    if kind == "ValueError":
        assert "KeyError: 'inner'" in error["traceback"]


@pytest.mark.slow
async def test_what_comes_after_a_failure_is_decided_by_the_exception_itself(dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-07: a policy function, `no_retry` and Retry-After get the exception that was raised in the process."""
    kinds = ("policy", "retry-after", "no_retry", "none")
    async with working(zoo.app, dsn):
        put = {kind: zoo.decides.enqueue_sync(db, kind) for kind in kinds}
        infos = {kind: await jobs.becomes(job, "retrying", "dead") for kind, job in put.items()}
    assert [info.state for info in infos.values()] == ["retrying", "retrying", "dead", "dead"]
    for kind, minutes in (("policy", 7), ("retry-after", 60)):
        run_at = infos[kind].run_at
        assert run_at is not None
        assert timedelta(minutes=minutes - 1) < run_at - datetime.now(UTC) <= timedelta(minutes=minutes)


@pytest.mark.slow
async def test_outcomes_come_back(dsn: str, db: Any, jobs: Jobs) -> None:
    """Snooze, Cancel and Dead work the same in a process; a result without JSON form is dropped, the job completes."""
    async with working(zoo.app, dsn):
        put = {word: zoo.says.enqueue_sync(db, word) for word in ("snooze", "until", "cancel", "dead", "nothing")}
        assert (await jobs.becomes(put["snooze"], "scheduled")).failures == 0
        until = (await jobs.becomes(put["until"], "scheduled")).run_at
        assert until is not None and timedelta(hours=1.9) < until - datetime.now(UTC) < timedelta(hours=2)
        assert (await jobs.becomes(put["cancel"], "cancelled")).reason == "nothing left"
        assert (await jobs.becomes(put["dead"], "dead")).reason == "failed"
        await jobs.becomes(put["nothing"], "completed")


async def test_results_progress_and_checkpoints_go_through(dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-17: result, progress and checkpoint of a handler in a process reach the database."""
    job = zoo.goes_on.enqueue_sync(db)
    async with working(zoo.app, dsn):
        (info,) = await jobs.ends(job)
    assert (info.state, info.failures) == ("completed", 1)
    assert (info.progress, info.progress_message) == (0.5, "page 4")
    assert db.execute("select result from tallybook.result(%s)", (job.id,)).fetchone() == ([2, 4],)


async def test_an_answer_that_nobody_waits_for_any_more_is_dropped(dsn: str, db: Any, jobs: Jobs) -> None:
    """A handler in a process may cancel a call of its Context: the process goes on to read the worker's messages."""
    async with working(zoo.app, dsn):
        await jobs.becomes(zoo.impatient.enqueue_sync(db), "completed", seconds=10)


@pytest.mark.parametrize(
    ("call", "code", "how"),
    [
        (zoo.dies.job("segfault"), -signal.SIGSEGV, "was ended by SIGSEGV"),
        (zoo.dies.job("0"), 0, "ended with code 0"),
        (zoo.dies.job("9"), 9, "ended with code 9"),
        (zoo.dies.job("killed"), -signal.SIGKILL, "was ended by SIGKILL"),
        (zoo.dies.job("without its socket"), 1, "ended with code 1"),
        (zoo.dies.job("with an heir"), 7, "ended with code 7"),
    ],
)
@pytest.mark.slow
async def test_a_process_that_dies_is_a_crash_of_its_job_alone(
    dsn: str, db: Any, jobs: Jobs, tmp_path: Path, call: Any, code: int, how: str
) -> None:
    """F24: a segfault, an exit or a kill ends its own attempt as crashed, at once, and does not affect a neighbour."""
    async with working(zoo.app, dsn) as worker:
        beside = zoo.where.enqueue_sync(db, str(tmp_path / "beside"), 1.0)
        await eventually((tmp_path / "beside").exists, "the neighbour runs")
        (job,) = zoo.app.enqueue_many_sync(db, [call])
        info = await jobs.becomes(job, "scheduled")
        (neighbour,) = await jobs.ends(beside)
        await eventually(lambda: worker.book.free == {"default": 10}, "all slots are free")
    assert (info.crashes, info.failures) == (1, 0)
    assert info.errors is not None
    error = info.errors[0]
    assert (error["type"], error["exit_code"], error["message"]) == ("ProcessDied", code, f"its process {how}")
    assert (neighbour.state, neighbour.attempts, neighbour.crashes) == ("completed", 1, 0)


async def test_a_process_that_dies_takes_along_what_it_started(dsn: str, db: Any, jobs: Jobs, tmp_path: Path) -> None:
    """When a job's process dies by itself, the programs that it started are killed."""
    async with working(zoo.app, dsn):
        await jobs.becomes(zoo.dies.enqueue_sync(db, "with an heir", str(tmp_path / "heir")), "scheduled")
        await eventually(lambda: not is_alive(number_in(tmp_path / "heir")), "the heir is gone", seconds=10)


@pytest.mark.slow
async def test_a_job_that_crashes_three_processes_is_dead(dsn: str, db: Any, jobs: Jobs) -> None:
    """P8 F24: a job that crashed three processes is dead with reason crashed; no failure is counted."""
    async with working(zoo.app, dsn):
        # Three processes start, with pauses between them.
        (info,) = await jobs.ends(zoo.dies.enqueue_sync(db, "1"), seconds=80)
    assert (info.state, info.reason, info.crashes, info.failures, info.attempts) == ("dead", "crashed", 3, 0, 3)
    assert [error["type"] for error in info.errors or []] == ["ProcessDied"] * 3


@pytest.mark.slow
async def test_memory_is_limited_per_task(dsn: str, db: Any, jobs: Jobs, tmp_path: Path) -> None:
    """F28: a handler that uses more than its `memory` fails with MemoryError; the next job has a fresh process."""
    async with working(zoo.app, dsn, queues={"default": 1}):
        error = await failed(jobs, zoo.hoards.enqueue_sync(db, str(tmp_path / "hoards")))
        await jobs.ends(zoo.is_modest.enqueue_sync(db, str(tmp_path / "modest")))
    assert error["type"] == "MemoryError"
    assert number_in(tmp_path / "hoards") != number_in(tmp_path / "modest")


async def test_a_deadline_kills_the_process_and_what_it_started(dsn: str, db: Any, jobs: Jobs, tmp_path: Path) -> None:
    """F25: an endless loop is killed at its deadline, with the programs it started; the error is a TimeoutError."""
    path = tmp_path / "spins"
    async with working(zoo.app, dsn) as worker:
        began = time.monotonic()
        error = await failed(jobs, zoo.spins.enqueue_sync(db, str(path), True))
        pid, started = json.loads(path.read_text())
        await eventually(lambda: not (is_alive(pid) or is_alive(started)), "both are gone")
        assert worker.runner.still_abandoned == 0
        await eventually(lambda: worker.book.free == {"default": 10}, "each slot is free again")
    assert time.monotonic() - began < 40  # the program would have slept for a minute
    assert (error["type"], error["message"]) == ("TimeoutError", "deadline of 1 s passed")


async def test_cancel_is_told_and_then_kills(dsn: str, db: Any, jobs: Jobs, tmp_path: Path) -> None:
    """F45: a handler that sees ctx.cancelled can complete; one that ignores it is killed after the grace: cancelled."""
    async with working(zoo.app, dsn, abort_timeout=timedelta(seconds=2)) as worker:
        paths = tmp_path / "listens", tmp_path / "deaf"
        put = zoo.listens.enqueue_sync(db, str(paths[0])), zoo.deaf.enqueue_sync(db, str(paths[1]))
        for path in paths:
            await eventually(path.exists, f"{path.name} runs")
        for job in put:
            zoo.app.cancel(job, "enough").sync(db)
        completed = await jobs.becomes(put[0], "completed")
        cancelled = await jobs.becomes(put[1], "cancelled")
        await eventually(lambda: not is_alive(number_in(paths[1])), "the deaf one is killed")
        await eventually(lambda: worker.book.free == {"default": 10}, "each slot is free again")
    assert (completed.failures, cancelled.failures, cancelled.crashes) == (0, 0, 0)


async def test_no_more_children_than_allowed(dsn: str, db: Any, jobs: Jobs, tmp_path: Path) -> None:
    """With children=1 a second job waits in its slot, without a process; a cancel ends that at once; a third runs."""
    paths = [tmp_path / name for name in ("first", "second", "third")]
    async with working(zoo.app, dsn, children=1, abort_timeout=timedelta(seconds=0.3)) as worker:
        first = zoo.deaf.enqueue_sync(db, str(paths[0]))
        await eventually(paths[0].exists, "the first runs")
        second = zoo.deaf.enqueue_sync(db, str(paths[1]))
        await jobs.becomes(second, "running")
        zoo.app.cancel(second, "enough").sync(db)
        await jobs.becomes(second, "cancelled")
        third = zoo.says.enqueue_sync(db, "nothing")
        await jobs.becomes(third, "running")
        zoo.app.cancel(first, "enough").sync(db)
        await jobs.becomes(third, "completed")
        await eventually(lambda: worker.book.free == {"default": 10}, "each slot is free again")
    assert [path.exists() for path in paths] == [True, False, False]


async def test_jobs_that_wait_for_a_child_put_off_the_next_claim(
    dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While jobs of a queue wait for a child, a free slot of it makes no claim: later, one claim fills several slots.

    Control: a slot per child, so that each end makes a claim.
    """
    monkeypatch.setattr("tallybook._worker.claim.claimer._CLAIM_PAUSE", 10.0)

    async def claims(slots: int) -> int:
        before = db.execute("select count(*) from tallybook.claim").fetchone()[0]
        put = [zoo.naps.enqueue_sync(db, 0.02) for _ in range(12)]
        async with working(zoo.app, dsn, queues={"default": slots}, children=2):
            await jobs.ends(*put)
        return int(db.execute("select count(*) from tallybook.claim").fetchone()[0] - before)

    assert await claims(6) <= 4
    assert await claims(2) >= 6


async def test_an_abort_gives_back_and_ends_the_process(dsn: str, db: Any, jobs: Jobs, tmp_path: Path) -> None:
    """P9: at the second stop a job in a process is given back, without failure or crash, and its process is killed."""
    path = tmp_path / "deaf"
    job = zoo.deaf.enqueue_sync(db, str(path))
    async with working(zoo.app, dsn, abort_timeout=timedelta(seconds=1)) as worker:
        await eventually(path.exists, "it runs")
        worker.stop()
        worker.stop()
    info = jobs(job)
    assert (info.state, info.failures, info.crashes) == ("available", 0, 0)
    assert not is_alive(number_in(path))


async def test_an_abort_while_a_process_starts_keeps_its_handler_from_beginning(
    dsn: str, db: Any, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the second stop comes while a job's process starts, the job is given back and its handler never begins."""
    take, starts, go = Children._take, asyncio.Event(), asyncio.Event()

    async def taken(self: Children, task: Any) -> Any:
        child = await take(self, task)
        starts.set()
        await go.wait()
        return child

    monkeypatch.setattr(Children, "_take", taken)
    job = zoo.where.enqueue_sync(db, str(tmp_path / "where"))
    async with working(zoo.app, dsn) as worker:
        await eventually(starts.is_set, "its process starts")
        worker.stop()
        worker.stop()
        await eventually(lambda: worker.runner.ends.aborting, "it is aborted")
        go.set()
    assert (jobs(job).state, (tmp_path / "where").exists()) == ("available", False)


@pytest.mark.parametrize("busy", [True, False])
def test_children_end_with_a_worker_that_is_killed(dsn: str, db: Any, tmp_path: Path, busy: bool) -> None:
    """F24: SIGKILL of the worker ends its child process, busy or idle."""
    path = tmp_path / "where"
    with zoo.zoo(dsn) as worker:
        job = zoo.deaf.enqueue_sync(db, str(path)) if busy else zoo.where.enqueue_sync(db, str(path))
        pid = number_in(path)
        if not busy:
            wait_until(lambda: zoo.app.get(job).sync(db).state == "completed", "it has ended")
        assert is_alive(pid)
        worker.process.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "the child is gone")


@pytest.mark.parametrize("what", ["the end", "no message"])
def test_a_child_that_cannot_hear_its_worker_ends(tmp_path: Path, what: str) -> None:
    """Without PR_SET_PDEATHSIG, the child ends when its socket closes with the worker or it cannot read a message."""
    import socket

    ours, theirs = socket.socketpair()
    program = (
        "import sys; from tallybook._worker.run import child_main; child_main._die_with_parent = lambda: None;"
        " child_main.main(int(sys.argv[1]))"
    )
    path = tmp_path / "deaf"
    from tallybook._worker.run.frames import pack, receive

    with subprocess.Popen(
        [sys.executable, "-c", program, str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    ) as child:
        theirs.close()
        hello = {"argv": [], "main_name": None, "main_path": None, "worker": "w", "log_format": "text", "log_level": 20}
        ours.sendall(pack(hello))
        assert receive(ours) == {"kind": "ready"}
        row = [1, 1, "deaf", {"path": str(path)}, None, 0, 0, None, None, None, None]
        words = {"task": "deaf", "attempt": 1, "row": row, "queue": "q", "worker": "w", "memory": None, "timeout": None}
        ours.sendall(pack({"kind": "run", "module": "support.zoo", "name": "deaf", "imported": False, **words}))
        assert receive(ours) == {"kind": "started"}
        assert number_in(path) == child.pid
        if what == "no message":
            ours.sendall(b"\0\0\0\1?")
        else:
            ours.close()
        assert child.wait(30) == 1


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_can_be_its_own_app(dsn: str, db: Any, tmp_path: Path, guarded: bool) -> None:
    """Tasks of the main module run as with multiprocessing; a script without the main guard gets a clear error."""
    main = """
import asyncio, datetime, os, sys
from tallybook import App, Constant

app = App("script", dsn=sys.argv[1])

@app.task(process=True, retry=Constant(datetime.timedelta(hours=1)))
def leave(path: str) -> None:
    with open(path, "w") as file:
        file.write(f"{__name__} {os.getpid() != int(sys.argv[2])}")

{guard}asyncio.run(app.drain())
"""
    script = tmp_path / "script.py"
    script.write_text(main.replace("{guard}", "if __name__ == '__main__': " if guarded else ""))
    job = App("other").task(name="leave")(lambda path: None).enqueue_sync(db, str(tmp_path / "left"))
    run = subprocess.run(
        [sys.executable, str(script), dsn, "0"], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    info: JobInfo = zoo.app.get(job).sync(db)
    if guarded:
        assert (run.returncode, info.state) == (0, "completed"), run.stderr
        assert (tmp_path / "left").read_text() == "__mp_main__ True"
    else:
        assert info.state == "retrying", run.stderr
        assert "if __name__ == '__main__'" in str(info.errors)


def test_wrong_declarations_say_what_to_do() -> None:
    """ConfigError, with a hint, for a function that no process can import and for unsuitable options."""
    app = App("shop")

    async def waits() -> None: ...

    with pytest.raises(ConfigError, match="an async function runs on the worker's loop"):
        app.task(process=True)(waits)
    with pytest.raises(ConfigError, match="a function inside another, or a lambda"):
        app.task(process=True, name="x")(lambda: None)

    def inside() -> None: ...

    with pytest.raises(ConfigError, match="cannot be imported"):
        app.task(process=True)(inside)
    with pytest.raises(ConfigError, match="process of their own"):
        app.task(memory="512 MB")(inside)
    for size in (512, "512", "5 MiB", "1 MB", "lots"):
        with pytest.raises(ConfigError, match="memory"):
            app.task(process=True, memory=size)(number_in)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="env"):
        app.task(process=True, env="TALLYBOOK_DSN")(number_in)
    for timeout in ("0 s", timedelta(seconds=-1), 30, "30"):
        with pytest.raises(ConfigError, match="timeout"):
            app.task(timeout=timeout)(inside)  # type: ignore[call-overload]


async def test_a_function_that_its_name_does_not_find_is_refused_at_the_start(dsn: str) -> None:
    """A worker does not start with a task whose name leads a child to another function."""
    app = App("shop")

    def other() -> None: ...

    other.__qualname__ = "number_in"
    app.task(process=True)(other)
    with pytest.raises(ConfigError, match="is not its function"):
        await app.drain(dsn=dsn)
