"""`make chaos FLEET=3`: workers of several nodes, each node on its own server behind its own proxy.

Each fault hits one node or one worker. A server is killed with all its processes and restarted, is stopped, or loses
its network (packets are lost, or received and not forwarded). The other nodes must continue meanwhile. At the end the
jobs of each node are checked as in judge.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from chaos.cable import Cable, possible
from chaos.crew import GO, Crew
from chaos.judge import OPEN, Fault, Judge
from chaos.places import Place
from chaos.proxy import Proxy
from chaos.servers import DATABASE, SETTINGS, TABLES, VERSION
from chaos.tenants import Tenants
from tallybook._db.migrate import migrate
from tallybook.embedded import Server, temporary_server
from tools import citus

_WORKERS = 2
_HEAL = 45.0
_STALL, _LONGEST_DRAIN = 30.0, 300.0
_KEYS_EACH = 10**9
_ON_RECORD = (
    "select name from tallybook.worker where ended_at is null and seen_at > clock_timestamp() - interval '2.5 s'"
)


class Node:
    """A database on its own server, and the proxy that all but the judge connect through."""

    def __init__(self, number: int, server: Server, proxy: Proxy, cable: Cable | None) -> None:
        self.number, self.server, self.proxy, self.cable = number, server, proxy, cable
        self.name = f"n{number}"
        self.paused = False

    @property
    def dsn(self) -> str:
        host = self.cable.address if self.cable else "127.0.0.1"
        return (
            f"host={host} port={self.proxy.port} dbname={DATABASE} user=postgres sslmode=disable gssencmode=disable"
            " connect_timeout=10"
        )

    def ask(self, statement: str, params: tuple[object, ...] = (), *, seconds: float = 60.0) -> list[tuple[Any, ...]]:
        """Return rows, without the proxy; retry for `seconds` while the server is down."""
        until = time.monotonic() + seconds
        while True:
            try:
                with psycopg.connect(self.server.dsn(DATABASE), autocommit=True, connect_timeout=5) as conn:
                    return conn.execute(statement, params).fetchall()
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server."""
        assert self.server.pid is not None
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
        for pid in [self.server.pid, *map(int, children)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        self.paused = number is signal.SIGSTOP


class Fleet:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rng = random.Random(options.seed)
        self._started = time.monotonic()
        self._wrong: list[str] = []
        self._faults: list[Fault] = []
        self.tenants: Tenants | None = None
        self._pulls = not (why_not := possible())
        if why_not:
            self.say(f"no cable is pulled: {why_not}")

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"chaos {time.monotonic() - self._started:6.1f} s  {text}", flush=True)

    async def run(self) -> int:
        """Cause faults, drain, judge; return the exit code."""
        options = self._options
        self.say(f"{options.fleet} nodes, {options.seconds:g} s, seed {options.seed}")
        place, code = Place(options.disk, 3 << 30), 1
        try:
            async with self._standing(place) as (nodes, crew):
                await self._attack(nodes, crew)
                await self._drain(nodes, crew)
                code = await self._judge(nodes, crew, place)
        finally:
            place.close(keep=code != 0)
            if code:
                self.say(f"logs are kept in {place.path}")
        return code

    @asynccontextmanager
    async def _standing(self, place: Place) -> AsyncIterator[tuple[list[Node], Crew]]:
        async with AsyncExitStack() as stack:
            servers = self._servers(stack.enter_context(ExitStack()))
            nodes = []
            for number, server in enumerate(servers, 1):
                with psycopg.connect(server.dsn(DATABASE), autocommit=True) as conn:
                    migrate(conn, node=number)
                    conn.execute(TABLES)
                socket = psycopg.conninfo.conninfo_to_dict(server.dsn())["host"]
                cable = Cable(number) if self._pulls else None
                listener = cable.listener() if cable else None
                upstream = partial("{}/.s.PGSQL.5432".format, socket)
                proxy = await stack.enter_async_context(Proxy(upstream, listener=listener))
                nodes.append(Node(number, server, proxy, cable))
            os.environ["TALLYBOOK_NODES"] = "\n".join(f"{node.name}={node.dsn}" for node in nodes)
            dsns = [node.dsn for node in nodes]
            workers = [(dsns[0], True)] * _WORKERS
            rate = self._options.rate
            crew = Crew(place, workers, dsns, seed=self._options.seed, rate=rate, options=["--nodes", "all"])
            stack.callback(crew.end)
            crew.start()
            if citus.given():
                self.tenants = Tenants(nodes[0].server.dsn(DATABASE), nodes[0].dsn, place.logs / "tenants.log")
            yield nodes, crew

    def _servers(self, stack: ExitStack) -> list[Server]:
        """Start the servers, each with the database."""
        count = self._options.fleet
        if citus.given():
            return stack.enter_context(citus.cluster(count, DATABASE, {**SETTINGS, "citus.recover_2pc_interval": "2s"}))
        servers = [stack.enter_context(temporary_server(VERSION, settings=SETTINGS)) for _ in range(count)]
        for server in servers:
            server.create_database(DATABASE)
        return servers

    async def _attack(self, nodes: list[Node], crew: Crew) -> None:
        await self._healthy(nodes, crew, "the start")
        self.say(f"{_WORKERS} workers serve {len(nodes)} nodes, with a producer on each")
        crew.pace(GO)
        if self.tenants:
            self.tenants.start()
        await asyncio.sleep(1)
        until = time.monotonic() + self._options.seconds
        bag: list[str] = []
        while time.monotonic() < until:
            if not bag:
                left_out = {"pull_cable": not self._pulls, "move_tenant": not self.tenants}
                bag = [name for name in self._rng.sample(sorted(_FAULTS), len(_FAULTS)) if not left_out.get(name)]
            name, node = bag.pop(), self._rng.choice(nodes)
            self._faults.append(Fault(name, time.time()))
            self.say(f"{name} on {node.name}")
            others = [other for other in nodes if other is not node]
            before = await asyncio.gather(*(asyncio.to_thread(_completed, other) for other in others))
            await _FAULTS[name](self, node, crew)
            after = await asyncio.gather(*(asyncio.to_thread(_completed, other) for other in others))
            for other, first, last in zip(others, before, after, strict=True):
                if last <= first:
                    self._wrong.append(f"{other.name} made no progress in {name} on {node.name}: {first} to {last}")
            await asyncio.to_thread(self._mend, node)
            await self._healthy(nodes, crew, f"{name} on {node.name}")

    def _mend(self, node: Node) -> None:
        if node.paused:
            node.send(signal.SIGCONT)
        node.proxy.heal()
        if node.cable:
            node.cable.plug()
        if node.server.pid is None:
            node.server.start()

    async def _healthy(self, nodes: list[Node], crew: Crew, after: str) -> None:
        """Wait until every worker is registered on every node again; add a problem for those that are late."""
        since = time.monotonic()
        while True:
            seen = [{row[0] for row in await asyncio.to_thread(node.ask, _ON_RECORD)} for node in nodes]
            missing = [
                f"{worker.name} on {node.name}"
                for node, names in zip(nodes, seen, strict=True)
                for worker in crew.workers
                if worker.name not in names
            ]
            if not missing:
                return
            if time.monotonic() - since > _HEAL:
                self._wrong.append(f"{_HEAL:g} s after {after} {', '.join(missing)} were still missing")
                return
            await asyncio.sleep(0.1)

    async def _drain(self, nodes: list[Node], crew: Crew) -> None:
        self.say("all faults are off, draining")
        if self.tenants:
            await asyncio.to_thread(self.tenants.stop)
        await crew.end_producers()
        last: list[Any] = []
        since, until = time.monotonic(), time.monotonic() + _LONGEST_DRAIN
        while True:
            found = [(await asyncio.to_thread(node.ask, OPEN))[0] for node in nodes]
            now = time.monotonic()
            if not any(row[0] or row[1] for row in found):
                return
            if found != last:
                last, since = found, now
            if now - since > _STALL or now > until:
                self._wrong.append(f"not all jobs have ended: {found}")
                return
            await asyncio.sleep(0.5)

    async def _judge(self, nodes: list[Node], crew: Crew, place: Place) -> int:
        left = await crew.end_workers()
        self._wrong += [*left, *(f"a process died without a fault: {end}" for end in crew.deaths)]
        total: dict[str, Any] = {}
        for node in nodes:
            runs = _runs_of(node, crew, place)
            journal = [crew.journal(node.number)]
            verdict = await asyncio.to_thread(Judge(node.ask, journal, [runs], crew.kills, self._faults).verdict)
            self._wrong += [f"{node.name}: {what}" for what in verdict.wrong]
            self.say(f"{node.name}: {json.dumps(verdict.numbers)}")
            for key, value in verdict.numbers.items():
                if isinstance(value, int):
                    total[key] = total.get(key, 0) + value
        if self.tenants:
            numbers, wrong = await asyncio.to_thread(self.tenants.judge)
            self._wrong += wrong
            self.say(f"tenants: {json.dumps(numbers)}")
            total |= {key: total.get(key, 0) + value for key, value in numbers.items()}
        for what in self._wrong:
            self.say(f"WRONG: {what}")
        print(json.dumps({"nodes": len(nodes), "faults": len(self._faults), **total}), flush=True)
        return 1 if self._wrong or total["lost"] or total["unexpected"] or total["second_effects"] else 0


def _completed(node: Node) -> int:
    return int(node.ask(OPEN)[0][2])


def _runs_of(node: Node, crew: Crew, place: Place) -> Path:
    """Write the starts of handlers for the keys of a node's producer to a file, and return its path."""
    path = place.path / f"runs-{node.number}"
    with path.open("wb") as file:
        for found in crew.runs():
            text = found.read_bytes()
            for line in text[: text.rfind(b"\n") + 1].splitlines(keepends=True):
                if int(line.split(b" ", 1)[0]) // _KEYS_EACH == node.number:
                    file.write(line)
    return path


async def _kill_server(run: Fleet, node: Node, crew: Crew) -> None:
    """Send SIGKILL to all processes of the server; it is restarted later."""
    await asyncio.to_thread(node.server.kill)
    await asyncio.sleep(run._rng.uniform(2, 5))


async def _stop_server(run: Fleet, node: Node, crew: Crew) -> None:
    """Stop the server's processes by SIGSTOP."""
    node.send(signal.SIGSTOP)
    await asyncio.sleep(run._rng.uniform(3, 8))


async def _cut_network(run: Fleet, node: Node, crew: Crew) -> None:
    """Receive data and do not forward it; no connection ends."""
    node.proxy.blackhole()
    await asyncio.sleep(run._rng.uniform(3, 8))


async def _pull_cable(run: Fleet, node: Node, crew: Crew) -> None:
    """Lose every packet."""
    assert node.cable is not None
    node.cable.pull()
    await asyncio.sleep(run._rng.uniform(3, 20))


async def _break_connections(run: Fleet, node: Node, crew: Crew) -> None:
    """End all of the node's connections at once."""
    node.proxy.reset()
    await asyncio.sleep(run._rng.uniform(1, 2))


async def _kill_worker(run: Fleet, node: Node, crew: Crew) -> None:
    """Send SIGKILL to a worker, which has jobs of all nodes."""
    crew.kill(run._rng.choice(crew.workers))
    await asyncio.sleep(run._rng.uniform(2, 4))


async def _move_tenant(run: Fleet, node: Node, crew: Crew) -> None:
    """Let Citus move tenants while they order."""
    assert run.tenants is not None
    for _ in range(3):
        run.say(await asyncio.to_thread(run.tenants.move, run._rng))


_FAULTS: dict[str, Callable[[Fleet, Node, Crew], Awaitable[None]]] = {
    "kill_server": _kill_server,
    "stop_server": _stop_server,
    "cut_network": _cut_network,
    "pull_cable": _pull_cable,
    "break_connections": _break_connections,
    "kill_worker": _kill_worker,
    "move_tenant": _move_tenant,
}
