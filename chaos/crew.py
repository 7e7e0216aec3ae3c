"""The processes: workers that are restarted when they die, and producers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaos.places import Place

ROOT = Path(__file__).parent.parent
LEASE = 4.0
HEARTBEAT = 1.0
_SLOTS = "default=20,effects=8"
_KEYS_EACH = 10**9
_LOOK = 0.05
_SECONDS_TO_STOP = 40.0
GO, HOLD, END = b"1", b"0", b"2"


# On Linux, no process outlives the run, even a killed one.
_WITH_US = [found, "--pdeathsig", "KILL"] if (found := shutil.which("setpriv")) else []


def _start(words: list[str], log: Path, **env: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [*_WITH_US, sys.executable, "-m", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))), **env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            # The kernel continues a stopped process whose group loses its shell, and would so end a fault by SIGSTOP.
            start_new_session=True,
        )


@dataclass
class Worker:
    """One place in the crew: one process at a time, each with its own name."""

    number: int
    dsn: str
    proxied: bool
    generation: int = 0
    process: subprocess.Popen[bytes] | None = None
    stopped: bool = False
    """Whether SIGSTOP has stopped it."""

    @property
    def name(self) -> str:
        return f"w{self.number}.{self.generation}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


@dataclass(frozen=True)
class Kill:
    """A SIGKILL to a worker with a session, while the server had been up for at least a lease."""

    worker: str
    at: float


class Crew:
    """All processes of a run."""

    def __init__(
        self,
        place: Place,
        dsns: list[tuple[str, bool]],
        producer_dsns: list[str],
        *,
        seed: int,
        rate: float,
        options: Sequence[str] = (),
    ) -> None:
        self._options = options
        self._place = place
        self.workers = [Worker(number, dsn, proxied) for number, (dsn, proxied) in enumerate(dsns, 1)]
        self._producer_dsns = producer_dsns
        self._producers: list[subprocess.Popen[bytes]] = []
        self._seed = seed
        self._rate = rate / len(producer_dsns)
        self._pace = place.path / "pace"
        self._pace.write_bytes(HOLD)
        self._linger = place.path / "linger"
        self._hold = place.path / "hold"
        self._keeper: asyncio.Task[None] | None = None
        self.kills: list[Kill] = []
        self.deaths: list[str] = []
        """Unexpected ends of processes."""
        self._tails: dict[Path, int] = {}
        self._acknowledged = 0
        self._started: set[bytes] = set()

    def start(self) -> None:
        """Start all processes; producers wait until `pace`."""
        for worker in self.workers:
            self._begin(worker)
        for number, dsn in enumerate(self._producer_dsns, 1):
            words = ["chaos.producer", dsn, str(self.journal(number)), str(number * _KEYS_EACH),
                     str(self._seed * 1000 + number), str(self._rate), str(self._pace)]  # fmt: skip
            hold = {"CHAOS_HOLD": str(self._hold)} if number == 1 else {}
            self._producers.append(_start(words, self._place.logs / f"producer-{number}.log", **hold))
        self._keeper = asyncio.create_task(self._keep())

    def journal(self, number: int) -> Path:
        return self._place.runs / f"journal-{number}"

    def journals(self) -> list[Path]:
        return [self.journal(number) for number in range(1, len(self._producer_dsns) + 1)]

    def _begin(self, worker: Worker) -> None:
        worker.generation += 1
        times = ["--lease", f"{LEASE} s", "--heartbeat", f"{HEARTBEAT} s", "--stop-timeout", "10 s"]
        whom = ["--dsn", worker.dsn, "--name", worker.name, "--queues", _SLOTS]
        words = ["tallybook", "worker", "-A", "chaos.app:app", *whom, *times, *self._options]
        log = self._place.logs / f"worker-{worker.number}.log"
        worker.process = _start(words, log, CHAOS_RUNS=str(self._place.runs), CHAOS_LINGER=str(self._linger))

    async def _keep(self) -> None:
        """Restart dead workers after half a second."""
        while True:
            for worker in self.workers:
                if worker.process is not None and (code := worker.process.poll()) is not None:
                    if code != -signal.SIGKILL:
                        self.deaths.append(f"{worker.name} ended with code {code}")
                    await asyncio.sleep(0.5)
                    self._begin(worker)
            await asyncio.sleep(_LOOK)

    def linger(self) -> None:
        """Make handlers of effects wait right before their end, uncommitted, until `commit`."""
        self._linger.touch()

    def lingers(self, worker: Worker) -> bool:
        """Return whether a handler of this worker waits like that."""
        return self._linger.with_name(f"{self._linger.name}-{worker.pid}").exists()

    def hold_commit(self) -> None:
        """Make the first producer hold its next batch before its commit, until `commit`."""
        self._hold.touch()

    def held_transaction(self) -> str | None:
        """Return the id of the transaction that is held, or None."""
        with suppress(FileNotFoundError):
            return self._hold.with_name("held").read_text() or None
        return None

    def commit(self) -> None:
        """Let go of the producer that holds, and of handlers that linger; in a stopped worker once it runs again."""
        for path in [self._hold, self._linger, *self._linger.parent.glob(f"{self._linger.name}-*")]:
            path.unlink(missing_ok=True)

    def kill(self, worker: Worker) -> None:
        """Send SIGKILL and record the time."""
        self.kills.append(Kill(worker.name, time.time()))
        os.kill(worker.pid, signal.SIGKILL)

    def stop(self, worker: Worker) -> None:
        worker.stopped = True
        os.kill(worker.pid, signal.SIGSTOP)

    def go_on(self, worker: Worker) -> None:
        worker.stopped = False
        os.kill(worker.pid, signal.SIGCONT)

    def pace(self, word: bytes) -> None:
        """Send the producers a word: GO, HOLD or END."""
        with self._pace.open("r+b") as file:
            file.write(word)

    async def end_producers(self) -> None:
        """End the producers and wait for their last line; kill one that hangs, which leaves its last try unknown."""
        self.pace(END)
        await _all_gone(self._producers)
        for process in self._producers:
            if process.poll() is None:
                process.kill()
                process.wait()
            elif process.returncode:
                self.deaths.append(f"a producer ended with code {process.returncode}")

    async def end_workers(self) -> list[str]:
        """Send SIGTERM to all workers; return a message for each that does not end with code 0 in time."""
        if self._keeper is not None:
            self._keeper.cancel()
        for worker in self.workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.process.terminate()
        await _all_gone([worker.process for worker in self.workers if worker.process is not None])
        return [
            f"{worker.name} did not stop: {worker.process.poll()}"
            for worker in self.workers
            if worker.process is not None and worker.process.poll() != 0
        ]

    def end(self) -> None:
        """Kill all processes that still run."""
        if self._keeper is not None:
            self._keeper.cancel()
        for process in [*self._producers, *(worker.process for worker in self.workers if worker.process is not None)]:
            if process.poll() is None:
                process.kill()
            process.wait()

    def counts(self) -> tuple[int, int]:
        """Return the numbers of acknowledged and of started jobs, reading only lines since the last call."""
        for path in self._place.runs.iterdir():
            text, self._tails[path] = _read_on(path, self._tails.get(path, 0))
            if path.name.startswith("journal"):
                self._acknowledged += sum(int(line.split()[2]) for line in text if line.startswith(b"K"))
            else:
                self._started.update(line.split(b" ", 1)[0] for line in text)
        return self._acknowledged, len(self._started)

    def runs(self) -> list[Path]:
        """Return the files of runs."""
        return [path for path in self._place.runs.iterdir() if not path.name.startswith("journal")]


async def _all_gone(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended or the time is up."""
    until = time.monotonic() + _SECONDS_TO_STOP
    while any(process.poll() is None for process in processes):
        if time.monotonic() > until:
            return
        await asyncio.sleep(_LOOK)


def _read_on(path: Path, start: int) -> tuple[list[bytes], int]:
    """Return the complete lines after `start`, and the offset of their end."""
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    end = text.rfind(b"\n") + 1
    return text[:end].splitlines(), start + end
