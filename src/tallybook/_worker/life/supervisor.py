"""tallybook worker --processes N: N worker processes of one program, restarted when they die.

A child that dies is restarted after 1 s; repeated deaths raise the pause, up to 30 s. The first SIGTERM or SIGINT stops
all children, the second aborts their jobs. Every child holds one end of a socket, and only the parent has the other.
When the parent is gone, even by SIGKILL, the child stops. (PR_SET_PDEATHSIG would be Linux only, and does not reach a
child that has changed its user.)

A child that ends with code 2 before it has served has a wrong setting (no such module, no schema). A new child would
fail the same way, so all children are stopped and the parent ends with 2. A child reports through its socket that it
serves: afterwards a handler may have ended the process with this code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from tallybook._maintenance.service import ends_or, happens
from tallybook._worker.run.ending import exit_text

log = logging.getLogger("tallybook.supervisor")

_SOCKET = "TALLYBOOK_PARENT_SOCKET"
_to_parent: int | None = None
DSN_OF_PARENT = "TALLYBOOK_PARENT_DSN"
"""The value of --dsn that a parent passes to its child."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_LIVED = 60.0  # a child that ran this long did not die of its start
WRONG = 2
WORN_OUT = 3
"""It stopped because handlers that do not end have used it up: it is restarted like one that died."""


def watch_parent(patience: timedelta) -> None:
    """In a child: stop, as by SIGTERM, when the parent is gone, and be killed if that takes longer than `patience`.

    Does nothing in a process that was not started by a supervisor.
    """
    number = os.environ.pop(_SOCKET, None)
    if number is None:
        return
    global _to_parent  # noqa: PLW0603 - the process has one parent
    _to_parent = pipe = int(number)
    os.set_inheritable(pipe, False)

    def wait() -> None:
        with suppress(ConnectionError):  # the parent ended before it had read that this process serves
            while os.read(pipe, 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience.total_seconds())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="tallybook-parent", daemon=True).start()


def serves() -> None:
    """In a child: report that its settings are right. Does nothing in other processes."""
    if _to_parent is not None:
        with suppress(OSError):  # the parent is gone
            os.write(_to_parent, b".")


class Child:
    """One `tallybook` process that does not outlive this one."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.words = list(words)
        self.env = dict(env or {})
        self.process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int:
        """Its process number; 0 before the start."""
        return self.process.pid if self.process else 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Start it in its own process group: Ctrl-C reaches only the parent, which passes it on once."""
        if self._socket is not None:
            self._socket.close()
        self._socket, theirs = socket.socketpair()
        # -P: ignore a click.py in the working directory; the app is still found there
        words = [sys.executable, "-P", "-m", "tallybook", *self.words]
        with theirs:
            self.process = await asyncio.create_subprocess_exec(
                *words,
                env={**os.environ, **self.env, _SOCKET: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                process_group=0,
                stdin=asyncio.subprocess.DEVNULL,
            )

    def has_served(self) -> bool:
        """Return whether it said that it serves; ask once, after its end."""
        assert self._socket is not None
        with suppress(OSError):
            return self._socket.recv(1, socket.MSG_DONTWAIT) != b""
        return False

    async def ended(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        assert self.process is not None
        return await self.process.wait()

    def send(self, number: signal.Signals) -> None:
        if self.running:
            with suppress(ProcessLookupError):
                # process.send_signal may take the exit code of a child that has just ended: asyncio would report 255.
                os.kill(self.pid, number)

    async def stop(self, patience: float) -> int:
        """Send SIGTERM, and SIGKILL after `patience` seconds; return its exit code when it is gone."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience):
                return await self.ended()
        except TimeoutError:
            self.send(signal.SIGKILL)
            return await self.ended()


class _Supervisor:
    def __init__(self, children: Sequence[Child], patience: timedelta) -> None:
        self.children = children
        self.patience = patience.total_seconds()
        self.stopping = asyncio.Event()
        self.code = 0

    def stop(self) -> None:
        """Stop the children at the first signal and abort them at the second; the children count the signals."""
        if not self.stopping.is_set():
            running = sum(child.running for child in self.children)
            log.info("stopping %s worker processes (a second signal aborts their jobs)", running)
            self.stopping.set()
        for child in self.children:
            child.send(signal.SIGTERM)

    async def keep(self, number: int, child: Child) -> None:
        """Run one child, and restart it when it dies, until the supervisor stops."""
        pause = _FIRST_PAUSE
        while not self.stopping.is_set():
            started = time.monotonic()
            try:
                await child.start()
            except OSError as error:  # no memory, or too many processes or open files: the others run on
                log.error("worker process %s cannot be started (%s); trying again in %g s", number, error, pause)
            else:
                log.info("worker process %s is %s", number, child.pid, extra={"event": "started", "pid": child.pid})
                if self.stopping.is_set():
                    child.send(signal.SIGTERM)
                code = await self._ended(child)
                if self.stopping.is_set():
                    # SIGTERM itself ended it: it had not begun yet, or was done except for its exit.
                    self.code = self.code or (0 if code in (0, -signal.SIGTERM) else 1)
                    return
                if code == WRONG and not child.has_served():
                    self.code = WRONG
                    self.stop()
                    return
                pause = _FIRST_PAUSE if time.monotonic() - started > _LIVED else pause
                log.warning(
                    "worker process %s (%s) %s; starting a new one in %g s",
                    number, child.pid, exit_text(code), pause, extra={"event": "died"},
                )  # fmt: skip
            await happens(self.stopping, pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    async def _ended(self, child: Child) -> int:
        """Wait for its end and return its exit code; kill it if a stop takes longer than the patience."""
        ending = asyncio.ensure_future(child.ended())
        await ends_or(ending, self.stopping)
        if not ending.done() and not (await asyncio.wait((ending,), timeout=self.patience))[0]:
            log.error("worker process %s does not end; killing it", child.pid)
            child.send(signal.SIGKILL)
        return await ending


def _port(first: int | None, number: int) -> list[str]:
    return [] if first is None else ["--metrics-port", str(first + number - 1 if first else 0)]


async def supervise(
    words: Sequence[str], name: str | None, processes: int, *, patience: timedelta, metrics_port: int | None = None
) -> int:
    """Run `tallybook worker` with these words in `processes` processes until stopped; return this process's exit code.

    `patience` is how long the children may run after a stop before they are killed. The children use `metrics_port` and
    the ports after it, one each; with 0, each uses any free port.
    """

    def command(number: int) -> list[str]:
        named = ["--name", f"{name}-{number}"] if name else []
        return ["worker", *words, "--processes", "1", *named, *_port(metrics_port, number)]

    children = [Child(command(number)) for number in range(1, processes + 1)]
    supervisor = _Supervisor(children, patience)
    loop = asyncio.get_running_loop()
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(caught, supervisor.stop)
    try:
        await asyncio.gather(*(supervisor.keep(at, child) for at, child in enumerate(children, 1)))
    finally:
        for child in children:
            child.send(signal.SIGKILL)
    return supervisor.code
