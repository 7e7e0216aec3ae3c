"""The server's command line, and our handle on the guard process, which runs it; see guard_main."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from . import EmbeddedError
from .binaries import environment
from .directories import Account

Setting = str | int | float | bool

DEFAULTS: Mapping[str, Setting] = {
    "max_connections": 100, "shared_buffers": "128MB", "log_min_messages": "warning", "timezone": "UTC",
    "log_timezone": "UTC",
}  # fmt: skip
# For data that will be deleted. A commit still waits until its WAL is handed to the operating system
# (synchronous_commit stays on), so that Server.kill() loses no more than a SIGKILL would with real settings. Shared
# memory is in files of the data directory: what a killed server leaves in /dev/shm, only its next start would remove.
NOT_DURABLE: Mapping[str, Setting] = {"fsync": "off", "full_page_writes": "off", "dynamic_shared_memory_type": "mmap"}
# The manager sets where the server listens and for whom, because that keeps it safe.
_OURS = {
    *("listen_addresses", "port", "unix_socket_directories", "unix_socket_permissions", "unix_socket_group"),
    *("data_directory", "hba_file", "ident_file", "external_pid_file", "config_file"),
}

_PROGRAM = Path(__file__).with_name("guard_main.py")
_SECONDS_TO_ANSWER = 20.0
_alive: weakref.WeakSet[Guard] = weakref.WeakSet()


def checked(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings on top of our defaults; raise ValueError for settings that the manager sets."""
    if refused := sorted(_OURS & {name.lower() for name in settings}):
        raise ValueError(f"settings must not contain {', '.join(refused)}: the manager sets them")
    return {**DEFAULTS, **settings}


def command_line(
    programs: Path, data: Path, settings: Mapping[str, Setting], *, sockets: Path, port: int, tcp: bool
) -> list[str | Path]:
    """Return the postmaster's arguments. They override postgresql.conf and `alter system`."""
    ours: dict[str, Setting] = {
        "listen_addresses": "127.0.0.1" if tcp else "",
        "port": port,
        "unix_socket_directories": str(sockets),
        "unix_socket_permissions": "0700",
    }
    line: list[str | Path] = [programs / "postgres", "-D", data]
    for name, value in {**settings, **ours}.items():
        text = ("on" if value else "off") if isinstance(value, bool) else str(value)
        line += ["-c", f"{name}={text}"]
    return line


class Guard:
    """One guard process, which runs at most one server at a time."""

    def __init__(self, run_directory: Path, account: Account | None, log: int, locks: Sequence[int]) -> None:
        self.pid = 0  # the postmaster's, 0 for none
        self.is_ours = True  # False in a forked copy of the process that made it: the server belongs to the parent
        self._started = 0
        self._is_silent = False
        self._unread = b""
        identity = ("-", "-") if account is None else (str(account.uid), str(account.gid))
        if not sys.executable:
            raise EmbeddedError("the guard of an embedded server needs sys.executable, which is empty here")
        # The write end of stdin must be ours alone. Popen makes it close-on-exec, which covers programs that we start.
        # _leave_all covers copies of this process by a bare fork().
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _PROGRAM, run_directory, *identity],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=locks,
            env=environment(),
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal is for us to handle
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.process_id = self._process.pid
        self._commands = self._process.stdin
        self._replies = self._process.stdout
        _alive.add(self)

    def is_alive(self) -> bool:
        # The pipe shows its end a moment before the process can be reaped.
        return not self._is_silent and self._process.poll() is None

    def start(self, argv: Sequence[str | os.PathLike[str]]) -> None:
        """Start the server, which may not be ready yet then, and may even end."""
        self._started = 0
        self._send("start", *argv)
        deadline = time.monotonic() + _SECONDS_TO_ANSWER
        while not self._started:
            if not self._listen(deadline - time.monotonic()):
                raise EmbeddedError("the guard of the embedded server did not start it")

    def exited(self, seconds: float = 0) -> bool:
        """Wait up to `seconds` for the server's end; return whether it has ended (or its guard, which ends it)."""
        deadline = time.monotonic() + seconds
        while self.pid and self._listen(deadline - time.monotonic()):
            pass
        return not self.pid

    def stop(self, mode: str, seconds: float) -> None:
        """Stop the server, harder after `seconds`; return when it is gone."""
        self._send("stop", mode, str(seconds))
        self._await_exit(seconds + _SECONDS_TO_ANSWER)

    def kill(self) -> None:
        """Send SIGKILL to the postmaster and all of its processes; return when they are gone."""
        self._send("kill")
        self._await_exit(_SECONDS_TO_ANSWER)

    def close(self) -> bool:
        """Let the guard end: it stops a server and removes the run directory. False: it was killed before."""
        with suppress(OSError):
            self._commands.close()
        try:
            self._process.wait(2 * _SECONDS_TO_ANSWER)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self.pid = 0
        _alive.discard(self)
        return self._process.returncode == 0

    def _await_exit(self, seconds: float) -> None:
        if not self.exited(seconds):
            raise EmbeddedError(f"PostgreSQL (pid {self.pid}) does not end")

    def _send(self, *words: str | os.PathLike[str]) -> None:
        line = b"\0".join(os.fsencode(word) for word in words)
        if b"\n" in line:
            raise ValueError("paths and settings of an embedded server must not contain line breaks")
        with suppress(BrokenPipeError):  # the other pipe shows its death
            self._commands.write(line + b"\n")

    def _listen(self, seconds: float) -> bool:
        """Read the guard's replies for up to `seconds`; False if it sent none or is gone."""
        poll = select.poll()  # select() does not accept descriptors from 1024 on, which an application may have
        poll.register(self._replies, select.POLLIN)
        if not poll.poll(max(seconds, 0) * 1000):
            return False
        chunk = os.read(self._replies.fileno(), 65536)
        if not chunk:
            self._is_silent = True
            self.pid = 0
            return False
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"started":
                self.pid = self._started = int(number)
            else:
                self.pid = 0
        return True


def _leave_all() -> None:
    """Close our end of every guard's pipe in a forked copy, else a server would live as long as the last copy."""
    for guard in list(_alive):
        guard.pid, guard.is_ours = 0, False  # the server stays the parent's
        for end in (guard._commands, guard._replies):
            with suppress(OSError):
                end.close()


os.register_at_fork(after_in_child=_leave_all)
