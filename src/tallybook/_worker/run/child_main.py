"""The program of a child process: runs one plain handler at a time for the worker that started it.

Over its socket it receives what to run, finds the function by its module and name, and reports how it ended. Nothing
else uses that socket: stdout and stderr are the worker's, stdin is empty. It has no connection to the database.

It ends with its worker, however the worker dies. Linux sends it SIGKILL, and on every system a thread reads the socket,
which closes with the worker. It ignores SIGTERM and Ctrl-C: the worker handles them.
"""

import asyncio
import contextvars
import ctypes
import faulthandler
import importlib
import inspect
import json
import logging
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from tallybook import errors
from tallybook._model.at_node import At, at_node
from tallybook._model.backoff import is_final
from tallybook._model.failure import describe
from tallybook._model.outcome import Outcome
from tallybook._model.payload import encode
from tallybook._model.retry_after import retry_after
from tallybook._model.signature import ArgsModel
from tallybook._task.task import Task, encoded_result
from tallybook._worker import logs
from tallybook._worker.deadline import Guard
from tallybook._worker.jobs import AnyTask, Lease, Running, current_job
from tallybook._worker.run import children
from tallybook._worker.run.context import Context
from tallybook._worker.run.ending import after_failure
from tallybook._worker.run.frames import KINDS, pack, receive, to_frame
from tallybook._worker.run.verbs import Postponed, Verbs, checked_push
from tallybook.errors import PayloadError

log = logging.getLogger("tallybook.worker")
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class _Verbs(Verbs):
    """The verbs of a handler: the worker sends them to the database and returns the answer."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._number = 0
        self._asked: dict[int, Future[Any]] = {}

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:  # type: ignore[override]
        """The loop that runs the _sync forms, in its own thread; started at the first use."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="tallybook-verbs", daemon=True).start()
        return loop

    async def progress(self, job: Running, done: float | None, message: str | None) -> None:
        await self._ask(job, "progress", done, message)

    async def set_checkpoint(self, job: Running, value: object) -> None:
        await self._ask(job, "set_checkpoint", json.loads(encode(value, task=job.task_name, what="checkpoint")))

    async def get_checkpoint(self, job: Running) -> Any:
        return await self._ask(job, "get_checkpoint")

    async def limit(self, job: Running, keys: Sequence[str]) -> None:
        await self._ask(job, "limit", keys)

    async def push(self, job: Running, key: str, by: timedelta) -> None:
        await self._ask(job, "push", key, checked_push(by).total_seconds())

    async def _ask(self, job: Running, verb: str, *values: object) -> Any:
        future: Future[Any] = Future()
        self._number += 1
        number = self._number
        self._asked[number] = future
        # The message names the job: a thread that an earlier handler left behind may ask while the next job runs.
        self._send({"kind": "ask", "verb": verb, "id": number, "values": values, "job": [job.job_id, job.attempt]})
        return await asyncio.wrap_future(future)

    def answered(self, message: dict[str, Any]) -> None:
        """Pass an answer to the verb that waits for it; called from the listening thread."""
        future = self._asked.pop(message["id"])
        if not future.set_running_or_notify_cancel():
            return  # its handler did not wait for the answer
        if "error" not in message:
            future.set_result(message["value"])
            return
        if message["error"] == Postponed.__name__:
            future.set_exception(Postponed())
            return
        kind: type[errors.TallybookError] = getattr(errors, message["error"], errors.TallybookError)
        error = kind.__new__(kind)  # only its text is known here, not its arguments
        errors.TallybookError.__init__(error, message["message"])
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Found:
    """The object under a function's name in a module; `task`: it is a Task."""

    fn: Callable[..., Any]
    args: ArgsModel
    task: AnyTask | None


class _Child:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.verbs = _Verbs(self.send)
        self._sending = threading.Lock()  # the handler's own threads may send, too
        self._jobs: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._running: Running | None = None
        self._told = False
        self._found: dict[tuple[str, str], _Found] = {}

    def send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._sock.sendall(pack(message))

    def listen(self) -> None:
        """Read the worker's messages, in a thread: they may come while a handler runs. Without it the process ends."""
        try:
            while (message := receive(self._sock)) is not None:
                if message["kind"] == "run":
                    self._told = False
                    self._jobs.put(message)
                elif message["kind"] == "answer":
                    self.verbs.answered(message)
                elif message["kind"] == "cancel":
                    self._told = True  # the job may not have begun
                    if (running := self._running) is not None:
                        running.cancel_reason = ""
        except BaseException:
            log.exception("this process cannot read the messages of its worker")
            os._exit(1)
        if self._running is not None:
            os._exit(1)  # nobody is left to use its result
        self._jobs.put(None)

    def serve(self) -> None:
        while (message := self._jobs.get()) is not None:
            try:
                found = self._find(message["module"], message["name"], message["task"])
            except BaseException as error:
                self.send({"kind": "broken", **_described(error, message)})
                continue
            if not message["imported"]:
                self.send({"kind": "started"})
            self.send(self._run(found, message))

    def _find(self, module: str, name: str, task: str) -> _Found:
        if (module, name) not in self._found:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            if isinstance(found, Task):
                self._found[module, name] = _Found(found.fn, found.args, found)
            elif inspect.isfunction(found):
                model = ArgsModel(found, task=task, is_special=lambda kind: kind is Context)
                self._found[module, name] = _Found(found, model, None)
            else:
                raise TypeError(f"{module}.{name} is neither a task nor a function")
        return self._found[module, name]

    def _run(self, found: _Found, message: dict[str, Any]) -> dict[str, Any]:
        running = Running(tuple(message["row"]), Lease("", 0, message["queue"]), message["worker"])
        running.guard = Guard(running)
        if message["timeout"] is not None:
            running.guard.deadline = datetime.now(UTC) + timedelta(seconds=message["timeout"])
        context = contextvars.copy_context()
        context.run(current_job.set, running)
        if message.get("node"):
            context.run(_be_at, *message["node"])
        if message.get("carried") and found.task is not None and found.task.app._tracing is not None:
            context.run(found.task.app._tracing.enter, message["carried"])
        self._running = running
        if self._told:
            running.cancel_reason = ""
        try:
            positional, named = found.args.load(running.args)
            if found.args.specials:
                positional = [Context(SimpleNamespace(), running, self.verbs), *positional]
            _limit_memory(message["memory"])
            value = context.run(_call, found.fn, positional, named)
        except Outcome as outcome:
            _limit_memory(None)
            value = outcome
        except BaseException as error:
            _limit_memory(None)  # else there is none left to report the error
            memory = issubclass(type(error), MemoryError)
            return {"kind": "failed", "memory": memory, **_described(error, message), **_then(error, running, found)}
        finally:
            _limit_memory(None)
            self._running = None
        try:
            if isinstance(value, KINDS):
                return {"kind": "ended", "outcome": to_frame(value, message["task"])}
            return {"kind": "ended", "value": None if value is None else encoded_result(value, message["task"])}
        except PayloadError as error:  # the new args of a subject
            return {"kind": "failed", **_described(error, message), **_then(error, running, found)}


def _be_at(name: str, dsn: str, list_dsn: str) -> None:
    """Make the app, and the DSN of the environment, use the job's own node."""
    at_node.set(At(name, dsn, list_dsn))
    if dsn:
        os.environ["TALLYBOOK_DSN"] = dsn


def _call(function: Callable[..., Any], positional: list[Any], named: dict[str, Any]) -> Any:
    value = function(*positional, **named)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _described(error: BaseException, message: dict[str, Any]) -> dict[str, Any]:
    return {"error": describe(error, attempt=message["attempt"], worker=message["worker"])}


def _then(error: BaseException, running: Running, found: _Found) -> dict[str, Any]:
    """Decide what follows a failure, as far as only this process can: the exception itself is here."""
    said = (running.options or {}).get("retry")
    try:
        if found.task is None:
            raise errors.ConfigError("retry", said, "not declared here")
        _ = found.task.retry if said is None else isinstance(said, str) and found.task.app._policy(said)
    except errors.ConfigError:  # a named policy that the task's module does not declare: the worker knows it
        if is_final(error, found.task.no_retry if found.task is not None else ()):
            return {"then": {"delay": None, "final": True, "problem": None}}
        wait = retry_after(error, datetime.now(UTC))
        return {"retry_after": None if wait is None else wait.total_seconds()}
    then = after_failure(running, found.task, error)
    delay = None if then.delay is None else then.delay.total_seconds()
    return {"then": {"delay": delay, "final": then.final, "problem": then.problem}}


def _limit_memory(size: int | None) -> None:
    """Limit this process's address space from now on; a hard limit of the user stays in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = hard if size is None else size if hard == resource.RLIM_INFINITY else min(size, hard)
    if wanted != soft:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _die_with_parent() -> None:
    """On Linux, have the kernel end this process with its worker, even while C code holds the interpreter."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _adopt_main(hello: dict[str, Any]) -> None:
    """Make the worker's main module importable as `__main__`, without running the code behind `if __name__`."""
    if hello["main_name"]:
        content = runpy.run_module(hello["main_name"], run_name="__mp_main__", alter_sys=True)
    else:
        content = runpy.run_path(hello["main_path"], run_name="__mp_main__")
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def main(number: int) -> None:
    """Serve the worker at the other end of this socket until it closes."""
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)  # processes that a handler starts must not hold it open
    _die_with_parent()
    for ours in (signal.SIGTERM, signal.SIGINT):  # not SIG_IGN: processes that a handler starts would inherit it
        signal.signal(ours, lambda *_: None)
    faulthandler.enable()
    hello = receive(sock)
    if hello is None:
        return
    sys.argv = hello["argv"]
    logs.setup(hello["log_format"], hello["log_level"])
    child = _Child(sock)
    threading.Thread(target=child.listen, name="tallybook-parent", daemon=True).start()
    try:
        if hello["main_name"] or hello["main_path"]:
            children.importing_main = True
            _adopt_main(hello)
            children.importing_main = False
    except BaseException as error:
        child.send({"kind": "unusable", **_described(error, {"attempt": 0, "worker": hello["worker"]})})
        return
    child.send({"kind": "ready"})
    child.serve()
