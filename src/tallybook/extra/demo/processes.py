"""The demo's processes: started, watched, killed on purpose, and always removed at the end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO

from tallybook.errors import TallybookError

_SECONDS_TO_STOP = 8.0


class ProcessFailed(TallybookError):
    """A process of the demo ended unexpectedly; the text has the last lines that it wrote."""


class Process(subprocess.Popen[bytes]):
    """One Python module in its own process and session, so that only the demo receives Ctrl-C.

    The module ends when its standard input closes, also if the demo is killed with SIGKILL. Its standard error goes to
    an unnamed file.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __init__(self, name: str, module: str, *args: str, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.killed = False
        self.error_log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # -P: a file like http.py in the current directory must not be imported.
        command, pipe = [sys.executable, "-P", "-m", module, *args], subprocess.PIPE
        env = {**os.environ, **(env or {})}
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=self.error_log, env=env, start_new_session=True)

    def check(self) -> None:
        """Raise ProcessFailed if the process has ended and was not killed."""
        if not self.killed and (code := self.poll()) is not None:
            self.error_log.seek(max(0, self.error_log.seek(0, os.SEEK_END) - 4000))
            said = "\n".join(self.error_log.read().decode(errors="replace").splitlines()[-15:])
            raise ProcessFailed(f"{self.name} ended unexpectedly with status {code}", detail=said or None)

    def kill(self) -> None:
        """Send SIGKILL: the process cannot finish or release anything."""
        self.killed = True
        super().kill()
        self.wait()


class Processes(AbstractContextManager["Processes"]):
    """All processes; leaving the block stops those that still run."""

    def __init__(self) -> None:
        self._all: list[Process] = []

    def __exit__(self, *_: object) -> None:
        self.stop(*self._all)
        for process in self._all:
            for file in (process.stdin, process.stdout, process.error_log):
                file.close()

    def start(self, name: str, module: str, *args: str, env: Mapping[str, str] | None = None) -> Process:
        process = Process(name, f"tallybook.extra.demo.{module}", *args, env=env)
        self._all.append(process)
        return process

    def check(self) -> None:
        for process in self._all:
            process.check()

    def stop(self, *processes: Process) -> None:
        """Ask these to stop, all at the same time; kill them after 8 s."""
        until = time.monotonic() + _SECONDS_TO_STOP
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.send_signal(signal.SIGCONT)
            process.stdin.close()
        for process in processes:
            process.killed = True
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True, slots=True)
class Note:
    at: float
    key: str
    attempt: int
    status: int
    started_at: float
    sha256: str

    @property
    def taken(self) -> bool:
        return 200 <= self.status < 300


class ReceiverLog:
    """The receiver's notes about its requests, read from its standard output as they are written."""

    def __init__(self, process: Process) -> None:
        self.notes: list[Note] = []
        self.taken: set[str] = set()
        port = process.stdout.readline()
        if not port:
            process.wait(1)
            process.check()
        self.url = f"http://127.0.0.1:{int(port)}/webhook"
        self.reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self.reader.start()

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            note = Note(**json.loads(line))
            self.notes.append(note)
            if note.taken:
                self.taken.add(note.key)
