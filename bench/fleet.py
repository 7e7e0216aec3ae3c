"""One worker process over several nodes: the cost of a job, of idle nodes, and of a stopped node for the others.

The first two are measured on eight databases of one server. The third uses three servers and stops one by SIGSTOP.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

from bench.cpu import process_cpu, server_cpu
from bench.figures import SCALE, at_most, median, percentile, plain, say
from bench.idle import said_since
from bench.processes import Process
from bench.server import SETTINGS, args, database, load, server, vacuum
from tallybook._db.migrate import migrate
from tallybook.embedded import Server, temporary_server

_NODES = 8
_BATCH = 500
"""Slots per node: the most jobs that one claim may return."""
_RATE, _AT_ONCE = 2000, 20


@contextmanager
def nodes(running: Server, count: int, first: int = 0) -> Iterator[list[str]]:
    """Make databases on one server, name them in TALLYBOOK_NODES, and yield their DSNs. `first`: first number."""
    with ExitStack() as stack:
        dsns = [stack.enter_context(database(running, tallybook=False)) for _ in range(count)]
        for number, dsn in enumerate(dsns, first):
            with psycopg.connect(dsn, autocommit=True) as conn:
                migrate(conn, node=number)
        named(dsns)
        yield dsns


def named(dsns: list[str]) -> None:
    os.environ["TALLYBOOK_NODES"] = "\n".join(f"n{number}={dsn}" for number, dsn in enumerate(dsns))


class Cpu:
    """CPU seconds of a worker and of a server since this object was made."""

    def __init__(self, worker: Process, running: Server) -> None:
        assert running.pid is not None
        self._pids = worker.pid, running.pid
        self._before = self._now()

    def _now(self) -> float:
        worker, postmaster = self._pids
        return process_cpu(worker) + server_cpu(postmaster)

    def used(self) -> float:
        """Return the seconds until now."""
        return self._now() - self._before


def drained(running: Server, jobs: int, count: int, slots: int) -> float:
    """Return the microseconds of CPU per job, worker and server, of one drain of jobs on this many nodes."""
    with nodes(running, count) as dsns:
        for dsn in dsns:
            with psycopg.connect(dsn, autocommit=True) as conn:
                load(conn, jobs // count)
            vacuum(dsn)
        with Process("drain", dsns[0], f"{slots} {count}") as worker:
            cpu = Cpu(worker, running)
            worker.go()
            said = worker.answer()
            used = cpu.used()
        assert said["completed"] == jobs // count * count, said
    return 1e6 * used / jobs


def paced(running: Server, seconds: float, count: int) -> float:
    """Measure the same at a steady rate: this process enqueues small batches, node by node. Enqueues count, too."""
    with nodes(running, count) as dsns, ExitStack() as stack:
        conns = [stack.enter_context(psycopg.connect(dsn, autocommit=True)) for dsn in dsns]
        settings = json.dumps({"slots": _BATCH * count, "nodes": count})
        worker = stack.enter_context(Process("serve", dsns[0], settings))
        cpu, start, rounds = Cpu(worker, running), time.perf_counter(), int(seconds * _RATE / _AT_ONCE)
        for turn in range(rounds):
            if (wait := start + turn * _AT_ONCE / _RATE - time.perf_counter()) > 0:
                time.sleep(wait)
            conns[turn % count].execute(
                "select tallybook.enqueue_many(%s::text[], %s::text[], %s::text[])",
                (["default"] * _AT_ONCE, ["noop"] * _AT_ONCE, [args(turn)] * _AT_ONCE),
            )
        time.sleep(0.5)
        used = cpu.used()
        worker.go()
        assert worker.answer()["completed"] == rounds * _AT_ONCE
    return 1e6 * used / (rounds * _AT_ONCE)


def cost() -> None:
    """Compare the cost of a job on eight nodes with that on one."""
    jobs, turns = max(16_000, int(1_000_000 * SCALE)), 3 if SCALE >= 0.1 else 1
    found: dict[str, list[float]] = {"one": [], "eight": [], "eight, slots of one": []}
    rated: dict[int, list[float]] = {1: [], _NODES: []}
    with server() as running:
        for _ in range(turns):
            found["one"].append(drained(running, jobs, 1, _BATCH))
            found["eight"].append(drained(running, jobs, _NODES, _NODES * _BATCH))
            found["eight, slots of one"].append(drained(running, jobs, _NODES, _BATCH))
            for count, values in rated.items():
                values.append(paced(running, max(4.0, 20 * SCALE), count))
            say("  fleet: " + ", ".join(f"{name} {values[-1]:.1f} us" for name, values in found.items()))
    one, eight, narrow = (median(values) for values in found.values())
    shown = f"{jobs} jobs on 8 databases of one server, 500 slots each: {eight:.1f} us per job; on one: {one:.1f} us"
    at_most("fleet", "cpu_per_job_ratio", eight / one, "ratio", 1.1, shown).show()
    plain(
        "fleet", "cpu_per_job_ratio_500_slots", narrow / one, "ratio", "500 slots in total, so claims of about 62"
    ).show()
    steady = {count: median(values) for count, values in rated.items()}
    shown = f"{_RATE} jobs per second: {steady[_NODES]:.0f} us each on 8, {steady[1]:.0f} us on one, enqueues included"
    plain("fleet", "cpu_per_job_ratio_at_2000", steady[_NODES] / steady[1], "ratio", shown).show()


def idle() -> None:
    """Measure the cost of a node without work: statements per second, counted in the server's log."""
    seconds = max(10.0, 60 * SCALE)
    logging = {"log_statement": "all", "log_min_messages": "info"}
    with (
        temporary_server(18, settings=SETTINGS | logging, durable=True) as running,
        nodes(running, _NODES) as dsns,
        Process("serve", dsns[0], json.dumps({"nodes": _NODES})) as worker,
    ):
        time.sleep(5)
        log = Path(running.log_path)
        size, start = log.stat().st_size, time.perf_counter()
        cpu = process_cpu(worker.pid)
        time.sleep(seconds)
        passed, used = time.perf_counter() - start, process_cpu(worker.pid) - cpu
        said = said_since(log, size)
        worker.go()
        worker.answer()
    each = sum(said.values()) / passed / _NODES
    shown = f"8 databases of one server, over {passed:.0f} s; worker {100 * used / passed:.1f} % of a core"
    at_most("fleet", "idle_statements_per_node", each, "1/s", 2, shown).show()


def others() -> None:
    """Compare the time from commit to start on two nodes before and while the server of a third one is stopped."""
    turns, seconds = 5 if SCALE >= 0.1 else 2, max(3.0, 12 * SCALE)
    late: dict[str, list[float]] = {"before": [], "stopped": []}
    with ExitStack() as stack:
        servers = [stack.enter_context(temporary_server(18, settings=SETTINGS, durable=True)) for _ in range(3)]
        dsns = [stack.enter_context(nodes(running, 1, at))[0] for at, running in enumerate(servers)]
        named(dsns)
        conns = [stack.enter_context(psycopg.connect(dsn, autocommit=True)) for dsn in dsns]
        worker = stack.enter_context(Process("serve", dsns[0], json.dumps({"nodes": 3})))
        sent: dict[int, tuple[str, float]] = {}
        for _ in range(turns):
            _send([conns[0], conns[1]], "before", seconds, sent)
            conns[2].execute("select tallybook.enqueue('default', 'note', '{\"n\": -1}') from generate_series(1, 20)")
            with _stopped(servers[2]):
                _send([conns[0], conns[1]], "stopped", seconds, sent)
            time.sleep(1)
        worker.go()
        starts = {int(n): at for n, at in worker.answer()["starts"].items()}
    for number, (when, at) in sent.items():
        late[when].append(max(0.0, (starts[number] - at) * 1000))
    p50 = {when: percentile(values, 0.5) for when, values in late.items()}
    p99 = {when: percentile(values, 0.99) for when, values in late.items()}
    shown = f"3 servers, one stopped by SIGSTOP: p50 {p50['before']:.2f} to {p50['stopped']:.2f} ms"
    shown += f", p99 {p99['before']:.1f} to {p99['stopped']:.1f} ms, {len(late['stopped'])} jobs"
    at_most("fleet", "others_p50_ratio", p50["stopped"] / p50["before"], "ratio", 1.1, shown).show()


def _send(conns: list[psycopg.Connection], when: str, seconds: float, sent: dict[int, tuple[str, float]]) -> None:
    """Enqueue 50 jobs per second on these nodes in turn; store their numbers and commit times in `sent`."""
    start = time.perf_counter()
    for turn in range(int(50 * seconds)):
        if (wait := start + turn / 50 - time.perf_counter()) > 0:
            time.sleep(wait)
        number = len(sent)
        conns[turn % len(conns)].execute(
            "select tallybook.enqueue('default', 'note', jsonb_build_object('n', %s::int))", (number,)
        )
        sent[number] = (when, time.time())
    time.sleep(0.5)


@contextmanager
def _stopped(running: Server) -> Iterator[None]:
    """Stop all processes of a server, and continue them afterwards."""
    assert running.pid is not None
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    processes = [running.pid, *map(int, children)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(processes):
            os.kill(pid, signal.SIGCONT)


def run() -> None:
    """Print the figures."""
    cost()
    idle()
    others()
