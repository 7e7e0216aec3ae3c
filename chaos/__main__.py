"""`python -m chaos`: run producers, workers and a server as real processes, cause faults, and check every job.

    make chaos                          120 s
    make chaos MINUTES=10 SEED=7        the figure
    make chaos SECONDS=30               for CI
    make chaos BREAK=fence              a negative control: must end with code 1 (BREAK=holes too)
    make chaos NEMESES=pause_worker,failover    only these
    make chaos FLEET=3                  workers of three nodes, each on its own server: see fleet.py
    make chaos DISK=/mnt/small          servers on this (small) file system instead of a tmpfs

Two workers and a producer connect through the fault proxy, the others by a DSN with both hosts. The last line is JSON,
see judge.py for its keys. Exit code 1 on any loss, unexpected job or second effect, and if a job did not end or a
worker did not come back; 2 for wrong options.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from chaos.breaks import BREAKS
from chaos.crew import GO, Crew
from chaos.fleet import Fleet
from chaos.judge import OPEN, STUCK, Judge, Verdict
from chaos.nemesis import NEMESES, Stage, schedule
from chaos.places import Place, enter_namespace
from chaos.proxy import Proxy
from chaos.servers import Servers

_DISK = 3 << 30
_LONGEST_DRAIN = 300.0


class Run:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        self.stage: Stage | None = None

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"chaos {time.monotonic() - self.started:6.1f} s  {text}", flush=True)

    async def run(self) -> int:
        """Cause faults, drain, judge; return the exit code."""
        options = self.options
        minutes = f"{options.seconds / 60:g} minutes" if options.seconds >= 120 else f"{options.seconds:g} s"
        self.say(f"{minutes}, seed {options.seed} (again: make chaos SECONDS={options.seconds:g} SEED={options.seed})")
        place = Place(options.disk, _DISK)
        if place.small:
            self.say(f"the disk cannot be filled here: {place.small}")
        code = 1
        try:
            async with self._standing(place) as stage:
                self.stage = stage
                progress = asyncio.create_task(self._progress())
                try:
                    await self._attack(stage)
                    ended = await self._drain(stage)
                finally:
                    progress.cancel()
                code = await self._judge(stage, ended)
        finally:
            place.close(keep=code != 0)
            if code:
                print(f"chaos: logs are kept in {place.path}", file=sys.stderr)
        return code

    @asynccontextmanager
    async def _standing(self, place: Place) -> AsyncIterator[Stage]:
        """Start server, proxies and processes, and stop all at the end."""
        rng = random.Random(self.options.seed)
        servers = Servers(place)
        crew: Crew | None = None
        try:
            await asyncio.to_thread(servers.start, self.options.broken)
            async with (
                Proxy(servers.socket) as proxy,
                Proxy(servers.socket, unacked=None, keepalive=None) as replication,
            ):
                servers.replication = replication
                lazy = servers.dsn(durable=False), servers.dsn(port=proxy.port, durable=False)
                workers = [(lazy[number % 2], bool(number % 2)) for number in range(self.options.workers)]
                producers = [servers.dsn(), servers.dsn(port=proxy.port), servers.dsn()][: self.options.producers]
                crew = Crew(place, workers, producers, seed=self.options.seed, rate=self.options.rate)
                try:
                    crew.start()
                    yield Stage(servers, proxy, crew, place, rng, self.say)
                finally:
                    crew.end()
        finally:
            await asyncio.to_thread(servers.stop)

    async def _attack(self, stage: Stage) -> None:
        await stage.healthy("the start")
        self.say(f"{len(stage.crew.workers)} workers and {self.options.producers} producers are running")
        # Producers start with the attack, so that all of the requested time is a time of faults.
        stage.crew.pace(GO)
        until = time.monotonic() + self.options.seconds
        draw = schedule(self.options.nemeses, stage.rng)
        if self.options.broken:
            draw = itertools.repeat(BREAKS[self.options.broken].shown_by).__next__
        await asyncio.sleep(1)
        while time.monotonic() < until:
            await stage.strike(draw())

    async def _progress(self) -> None:
        stage = self.stage
        assert stage is not None
        while True:
            await asyncio.sleep(5)
            acknowledged, runs = await asyncio.to_thread(stage.crew.counts)
            with suppress(Exception):  # the server may be down; the next line comes soon
                (_, _, completed), *_ = await asyncio.to_thread(stage.servers.ask, OPEN, (), seconds=1.0)
                self._completed = f"{completed} completed"
            self.say(f"{acknowledged} enqueued, {runs} started, {self._completed}; {stage.now}")

    _completed = "0 completed"

    async def _drain(self, stage: Stage) -> bool:
        """Wait, after all faults, until every job has ended; return False if there is no progress."""
        stage.now = "draining"
        self.say("all faults are off, draining")
        await stage.crew.end_producers()
        stall = 12.0 if self.options.broken else 30.0
        last, since, until = (-1, -1, -1), time.monotonic(), time.monotonic() + _LONGEST_DRAIN
        while True:
            (found,) = await stage.ask(OPEN)
            now = time.monotonic()
            if found[:2] == (0, 0):
                return True
            if found != last:
                last, since = found, now
            if now - since > stall or now > until:
                self.say(f"{found[0]} jobs are open and {found[1]} scheduled, without progress")
                for state, count, first in await stage.ask(STUCK):
                    self.say(f"{count} jobs are {state}; the first is {first}")
                return False
            await asyncio.sleep(0.5)

    async def _judge(self, stage: Stage, ended: bool) -> int:
        left = await stage.crew.end_workers()
        judge = await asyncio.to_thread(
            Judge, stage.servers.ask, stage.crew.journals(), stage.crew.runs(), stage.crew.kills, stage.faults
        )
        verdict = await asyncio.to_thread(judge.verdict)
        wrong = [
            *verdict.wrong,
            *stage.problems,
            *left,
            *(f"a process died without a fault: {end}" for end in stage.crew.deaths),
        ]
        if not ended:
            wrong.append("not all jobs have ended")
        self._report(stage, verdict, wrong)
        numbers = verdict.numbers
        bad = bool(numbers["lost"] or numbers["unexpected"] or numbers["second_effects"] or wrong)
        print(json.dumps(numbers), flush=True)
        return 1 if bad else 0

    def _report(self, stage: Stage, verdict: Verdict, wrong: list[str]) -> None:
        noted = stage.servers.log_lines("deadlock detected", "PANIC", "cannot be rescued")
        self.say("server's log: " + ", ".join(f"{count} x {what!r}" for what, count in noted.items()))
        self.say("proxy: " + ", ".join(f"{count} {what}" for what, count in sorted(stage.proxy.counts.items())))
        self.say(
            f"{len(stage.faults)} faults, {len(stage.crew.kills)} workers killed, {stage.servers.promotions} promotions"
        )
        for what in stage.not_run:
            self.say(f"NOT RUN: {what}")
        for what in wrong:
            self.say(f"WRONG: {what}")
        print("\n".join(verdict.histogram), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="duration of the faults (120)")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the order and the details of the faults (random)"
    )
    parser.add_argument("--break", dest="broken", choices=sorted(BREAKS), help="remove a fence: the run must fail")
    parser.add_argument(
        "--nemeses", type=_names, default=list(NEMESES), help=f"faults to cause, of {','.join(NEMESES)}"
    )
    parser.add_argument("--workers", type=int, choices=(2, 3, 4), default=4)
    parser.add_argument("--producers", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--rate", type=float, help="jobs per second of all producers (600; 100 with --break)")
    parser.add_argument(
        "--fleet", type=int, choices=range(2, 9), help="number of nodes that workers serve: see fleet.py"
    )
    parser.add_argument("--disk", type=Path, help="a directory on a small file system, instead of a tmpfs")
    options = parser.parse_args()
    if options.rate is None:
        # A missing fence is found only if workers keep up: a cursor far behind passes no open transaction.
        options.rate = 100.0 if options.broken else 600.0
    if options.seed is None:
        options.seed = secrets.randbelow(1_000_000)
    return options


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in NEMESES]:
        raise argparse.ArgumentTypeError(f"no nemesis {', '.join(unknown)}; there are {', '.join(NEMESES)}")
    return names


def main() -> int:
    """Run the command line and return the exit code."""
    options = _options()
    enter_namespace(network=bool(options.fleet))
    os.environ.pop("TALLYBOOK_DSN", None)
    return asyncio.run(Fleet(options).run() if options.fleet else Run(options).run())


if __name__ == "__main__":
    raise SystemExit(main())
