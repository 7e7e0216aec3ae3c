"""Child processes for plain handlers: a job can damage only its own process.

One child runs one job at a time and is reused for the next; the setting `children` limits their number. A child is
started as a new program, never forked from this process, which has threads and connections. It receives the job as JSON
over its own socket, and finds the function by importing its module. SIGKILL ends it at a deadline. When a child dies,
its attempt ends as crashed at once; the other jobs do not notice.

    worker -> child   run, cancel, answer
    child -> worker   ready | unusable, then for each job: started | broken, ask, and ended | failed
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

from tallybook._model.at_node import at_node
from tallybook._model.failure import safe_text
from tallybook._worker import logs
from tallybook._worker.deadline import deadline_passed
from tallybook._worker.jobs import AnyTask, Running, spawn
from tallybook._worker.run import frames
from tallybook._worker.run.ending import ChildResult, FailedInChild, ProcessDied
from tallybook._worker.run.verbs import Verbs
from tallybook.errors import ConfigError, LeaseLost

# Credentials of the database: a handler in its own process gets only those that its task names.
CREDENTIALS = (
    "TALLYBOOK_DSN", "TALLYBOOK_PARENT_DSN", "TALLYBOOK_TEST_DSN", "TALLYBOOK_KEYS", "TALLYBOOK_KEYS_FILE",
    "PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE",
)  # fmt: skip
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from tallybook._worker.run.child_main import main; main(int(sys.argv[2]))"
)
importing_main = False
"""True in a child while it loads the program's main module, which must not start another worker then."""
_START_LIMIT = 60.0
"""Seconds that a child may take to import its modules."""
_LAST_WORDS = 0.5
_VERBS: dict[str, Callable[..., Any]] = {
    verb.__name__: verb
    for verb in (Verbs.progress, Verbs.set_checkpoint, Verbs.get_checkpoint, Verbs.limit, Verbs.push)
}
"""The verbs that a handler may ask for."""
_END_LIMIT = 1.0


def check(task: AnyTask) -> None:
    """Raise ConfigError unless a child process can find the task's function by its module and name."""
    if not task.execution.process:
        return
    fn = task.fn
    if fn.__module__ == "__main__" and not any(_main_module()):
        hint = "Put it into a file"
        raise ConfigError("process", task.name, "its function was typed in, so no process can import it", hint=hint)
    found: Any = sys.modules.get(fn.__module__)
    for part in fn.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not task and found is not fn:
        where = f"{fn.__module__}.{fn.__qualname__}"
        hint = "Let the task have the name after `def`, or rename the function"
        raise ConfigError("process", task.name, f"{where} is not its function, so no process can find it", hint=hint)


def _main_module() -> tuple[str | None, str | None]:
    """Return the name (python -m) or the file of the main module, for a child to load it under another name."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return spec.name, None
    path = getattr(main, "__file__", None)
    return None, os.path.abspath(path) if path and os.path.exists(path) else None  # noqa: PTH100, PTH110 - as given


class Child:
    def __init__(self, env: tuple[str, ...]) -> None:
        self.env = env
        self.killed = False
        self.imported = set[tuple[str, str]]()
        """Module and name of the functions that it has run: it reports no start for these."""
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None
        self._exit: asyncio.Task[int] | None = None

    async def start(self, worker_name: str, *, with_main: bool) -> None:
        """Start the process and send it its settings; do not wait until it is ready."""
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())]
        env = {name: value for name, value in os.environ.items() if name not in CREDENTIALS or name in self.env}
        with theirs, ExitStack() as failed:
            failed.enter_context(ours)
            # process_group: Ctrl-C in the terminal is for the worker; a kill includes the processes that it has started
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=env, process_group=0
            )
            failed.pop_all()
        self._exit = asyncio.ensure_future(self._process.wait())
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        # The socket of a dead process, which others may hold open, is closed soon: its last message may arrive.
        loop, writer = asyncio.get_running_loop(), self._writer
        self._exit.add_done_callback(lambda _: loop.call_later(_LAST_WORDS, writer.close))
        name, path = _main_module() if with_main else (None, None)
        self.send({"argv": sys.argv, "main_name": name, "main_path": path, "worker": worker_name, **logs.current()})

    @property
    def usable(self) -> bool:
        return not self.killed and self._exit is not None and not self._exit.done()

    def send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None
        with suppress(ConnectionError, RuntimeError):  # its death is detected elsewhere
            self._writer.write(frames.pack(message))

    def tell_cancel(self) -> None:
        """Ask the handler to stop: sets ctx.cancelled."""
        self.send({"kind": "cancel"})

    def kill(self) -> None:
        """Kill it, and every process that it has started, now."""
        self.killed = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def next(self) -> dict[str, Any]:
        """Return its next message. Raises ProcessDied when it is dead, even if other processes hold its socket open."""
        assert self._exit is not None and self._reader is not None
        try:
            head = await self._reader.readexactly(frames.HEAD)
            found: dict[str, Any] = json.loads(await self._reader.readexactly(frames.size(head)))
            return found
        except (EOFError, ConnectionError):  # it has closed its socket: it is ending, or has to be killed
            has_ended = (await asyncio.wait((self._exit,), timeout=_LAST_WORDS))[0]
        except Exception:  # not a message of this protocol
            has_ended = set()
        if not has_ended:
            self.kill()
        code = await self._exit
        self._kill_the_rest()
        raise ProcessDied(code)

    def _kill_the_rest(self) -> None:
        """Kill the processes that a dead one has started. While one lives, no new process gets the group's id."""
        assert self._process is not None
        try:
            os.kill(self._process.pid, 0)
        except ProcessLookupError:  # otherwise the id is in use again, so none of them is left
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        except PermissionError:
            pass

    async def close(self) -> None:
        """Close its socket, at which it ends; kill it if that takes long."""
        if self._writer is not None:
            self._writer.close()
        if self._exit is not None:
            await asyncio.wait((self._exit,), timeout=0 if self.killed else _END_LIMIT)
            self.kill()
            await self._exit


class Children:
    def __init__(self, worker_name: str, most: int) -> None:
        self._worker_name = worker_name
        self._most = most
        self._room = asyncio.Semaphore(most)
        self.waiting: Counter[str] = Counter()
        """By queue: the jobs that wait for a child."""
        self._answers: set[asyncio.Task[None]] = set()
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._ending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def turn(self, queue: str) -> AsyncIterator[None]:
        """Wait until a job of this queue may run in a child, and let it run."""
        self.waiting[queue] += 1
        try:
            await self._room.acquire()
        finally:
            self.waiting[queue] -= 1
        try:
            yield
        finally:
            self._room.release()

    async def run(self, job: Running, task: AnyTask, verbs: Verbs, carried: dict[str, str] | None = None) -> Any:
        """Run one job in a child; return its result. Raises FailedInChild, ProcessDied, TimeoutError, an Outcome.

        `verbs` are those of the job's node; `carried` is the context of the job's trace.
        """
        guard = job.guard
        assert guard is not None
        child = await self._take(task)
        guard.child = child
        answer: dict[str, Any] | None = None
        try:
            if guard.left or guard.given_back or job.cancel_reason is not None:
                raise asyncio.CancelledError
            function = task.fn.__module__, task.fn.__qualname__
            imported = function in child.imported
            child.send(_message(job, task, carried, imported=imported))
            async with asyncio.timeout(None if imported else _START_LIMIT) as start:
                if imported:
                    guard.start()
                while (answer := await child.next())["kind"] not in ("ended", "failed", "broken"):
                    if answer["kind"] == "started":  # the import does not count as the job's time
                        child.imported.add(function)
                        start.reschedule(None)
                        guard.start()
                    else:  # before its start, it is from a thread that an earlier job left behind
                        spawn(self._answers, self._answer(job, child, verbs, answer))
        except ProcessDied:
            if child.killed:  # by us: raise the reason
                if guard.timed_out and guard.timeout is not None and job.cancel_reason is None:
                    raise deadline_passed(guard.timeout) from None
                raise asyncio.CancelledError from None
            raise
        finally:
            guard.child = None
            guard.clear()
            self._back(child, answer)
        assert answer is not None
        if answer["kind"] == "ended":
            return frames.from_frame(answer["outcome"]) if "outcome" in answer else ChildResult(answer["value"])
        raise FailedInChild(answer)

    async def _answer(self, job: Running, child: Child, verbs: Verbs, question: dict[str, Any]) -> None:
        """Run a handler's verb that needs the database, such as progress or a checkpoint."""
        verb, values = _VERBS[question["verb"]], question["values"]
        if verb is Verbs.push:
            values[1] = timedelta(seconds=values[1])
        try:
            if question["job"] != [job.job_id, job.attempt]:  # from a thread that an earlier job left behind
                raise LeaseLost(*question["job"])
            value = await verb(verbs, job, *values)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": safe_text(error)}
        else:
            answer = {"value": value}
        child.send({"kind": "answer", "id": question["id"], **answer})

    def _back(self, child: Child, answer: dict[str, Any] | None) -> None:
        """Keep a child for the next job, if it is as good as new."""
        if answer is None or answer["kind"] not in ("ended", "failed", "broken"):
            child.kill()  # nobody waits for it any more
        # The imports of a broken child are incomplete, and memory that a job filled may still be in use.
        if child.usable and answer is not None and answer["kind"] != "broken" and not answer.get("memory"):
            self._idle.append(child)
        else:
            self._discard(child)

    async def _take(self, task: AnyTask) -> Child:
        wanted = task.execution.env
        for child in reversed(self._idle):
            if child.env == wanted and child.usable:
                self._idle.remove(child)
                return child
        for child in [child for child in self._idle if not child.usable]:
            self._idle.remove(child)
            self._discard(child)
        if self._idle and len(self._all) >= self._most:
            self._discard(self._idle.pop(0))
        child = Child(wanted)
        self._all.add(child)
        try:
            await child.start(self._worker_name, with_main=task.fn.__module__ == "__main__")
            async with asyncio.timeout(_START_LIMIT):
                first = await child.next()
        except BaseException as error:
            child.kill()
            self._discard(child)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"its process was not ready after {_START_LIMIT:g} s") from None
            raise
        if first["kind"] != "ready":
            self._discard(child)
            raise FailedInChild(first)
        return child

    def _discard(self, child: Child) -> None:
        self._all.discard(child)
        spawn(self._ending, child.close())

    async def close(self) -> None:
        for child in list(self._all):
            if child not in self._idle:
                child.kill()
            self._discard(child)
        self._idle.clear()
        if self._ending:
            await asyncio.wait(self._ending)


def _message(job: Running, task: AnyTask, carried: dict[str, str] | None, *, imported: bool) -> dict[str, Any]:
    timeout, at = task.execution.timeout, at_node.get()
    credentials = at is not None and "TALLYBOOK_DSN" in task.execution.env
    row = (
        job.job_id, job.attempt, task.name, job.args, job.headers, job.failures, job.crashes, job.max_attempts,
        None, None, json.dumps(job.options) if job.options else None,
    )  # fmt: skip
    return {
        "kind": "run",
        "node": at and [at.name, *((at.dsn, at.list_dsn) if credentials else ("", ""))],
        "module": task.fn.__module__,
        "name": task.fn.__qualname__,
        "imported": imported,
        "task": task.name,
        "attempt": job.attempt,
        "row": row,
        "queue": job.queue,
        "worker": job.worker_name,
        "memory": task.execution.memory,
        "timeout": None if timeout is None else timeout.total_seconds(),
        "carried": carried,
    }
