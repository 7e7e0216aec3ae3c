"""The command line in child processes, whose output is read while they run, and which are always killed at the end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import click
from click.testing import CliRunner, Result

from support.paths import clean_environment
from support.waiting import wait_until
from tallybook._cli import cli


class Program:
    """Python in `folder`, with both streams in one file there. It is killed at the end of the block."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self._log = folder / f"output-{os.urandom(4).hex()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env={**clean_environment(), "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="replace")

    def says(self, text: str, times: int = 1) -> None:
        """Wait until the output has `text` at least `times` times."""

        def said() -> bool:
            if self.output.count(text) >= times:
                return True
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {text!r}:\n{self.output}"
            return self.output.count(text) >= times

        try:
            wait_until(said, f"{text!r} in the output", seconds=60)
        except AssertionError as error:
            raise AssertionError(f"{error}; it wrote:\n{self.output}") from None

    def address(self) -> str:
        """Wait for the dashboard and return its address, which may have sessions in a browser."""
        self.says("the dashboard is at http")
        return self.output.partition("the dashboard is at ")[2].split()[0].rstrip("/").replace("127.0.0.1", "localhost")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = 60) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end; it wrote:\n{self.output}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        sys.stderr.write(f"--- {self.process.args}\n{self.output[-2000:]}\n")


class Command(Program):
    """One `tallybook ...`."""

    def __init__(self, folder: Path, *words: str, dsn: str | None = None, **environment: str) -> None:
        dsns = {"TALLYBOOK_DSN": dsn} if dsn else {}
        super().__init__(folder, "-P", "-m", "tallybook", *words, **dsns, **environment)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (ProcessLookupError, FileNotFoundError):
        return []


def is_alive(pid: int) -> bool:
    """Return whether a process with this id runs; a zombie does not."""
    return _stat(pid)[:1] not in ([], ["Z"])


def parent(pid: int) -> int:
    """Return the id of the parent process."""
    return int(_stat(pid)[1])


def children(pid: int) -> list[int]:
    """Return the ids of living child processes, oldest first."""
    numbers = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [number for number in numbers if _stat(number)[1:2] == [str(pid)] and is_alive(number)]


@contextmanager
def stopped(postmaster: int) -> Iterator[None]:
    """Stop a server for the block: the postmaster first, so that it starts no more children, and last to go on."""

    def send(number: signal.Signals, processes: list[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    send(signal.SIGSTOP, [postmaster])
    send(signal.SIGSTOP, children(postmaster))
    try:
        yield
    finally:
        send(signal.SIGCONT, [*children(postmaster), postmaster])


def invoke(*words: object, to: str | None = None, typed: str | None = None, **environment: str) -> Result:
    """Run a `tallybook` command in this process and raise its errors. `to` is TALLYBOOK_DSN, `typed` the input."""
    args, env = [str(word) for word in words], {"TALLYBOOK_DSN": to, **environment}
    return CliRunner().invoke(cli, args, env=env, input=typed, catch_exceptions=False)


def run(*words: str, dsn: str, code: int = 0, typed: str | None = None) -> str:
    """Run a command that must exit with this code, and return its output."""
    result = invoke(*words, to=dsn, typed=typed)
    assert result.exit_code == code, result.output
    return result.output


def commands(group: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command, and every group, with its path of words."""
    yield path, group
    if isinstance(group, click.Group):
        for word, command in group.commands.items():
            yield from commands(command, (*path, word))
