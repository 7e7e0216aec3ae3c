"""Lists and the dashboard of eight nodes with 10 million jobs in total: eight databases of one server.

Each node is loaded like `why`: nine tenths of its jobs are history, one tenth is in line. The pages are requested over
HTTP from a real `tallybook web --nodes all`, in random order over one connection. Commands run in this process, with a
new connection to each node every time. Nodes on their own servers would answer with eight times the cores.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import psycopg
from click.testing import CliRunner

from bench.cpu import server_cpu
from bench.figures import SCALE, at_most, median, percentile, plain, say
from bench.pages import _measure, serving
from bench.server import database, server, vacuum
from bench.why import _load
from tallybook._cli import cli
from tallybook._db.migrate import migrate

_NODES, _JOBS, _TIMES = 8, 10_000_000, 40
_COMMANDS = (
    ("job", "list"),
    ("job", "list", "--state", "completed"),
    ("job", "list", "--queue", "default", "--limit", "200"),
    ("dead", "list"),
    ("queue", "list"),
    ("count", "list"),
    ("schedule", "list"),
)


def _pages(job: int) -> dict[str, list[str]]:
    return {
        "overview": ["/", "/series?span=15m", "/series?span=7d"],
        "nodes": ["/nodes"],
        "jobs": [
            "/jobs",
            "/jobs?state=completed",
            "/jobs?state=dead",
            "/jobs?queue=default",
            "/jobs?task=nothing-has-this-name",
        ],
        "others": ["/dead", "/queues", "/queues?order=oldest", "/schedules", "/workers", f"/job/{job}"],
    }


def _loaded(dsn: str, number: int) -> int:
    """Fill one node; return a job of it that is in line."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        migrate(conn, node=number)
        conn.execute("select tallybook._lane('default', 2, '')")
        share = _JOBS * SCALE / _NODES
        jobs = _load(conn, max(10_000, int(0.9 * share)), max(5_000, int(0.1 * share)), 500)
        conn.execute("select tallybook.recount()")
    vacuum(dsn)
    say(f"  fleet_view: node {number} of {_NODES} is filled")
    return jobs["available"][0]


def run() -> None:
    """Print the figures."""
    with server() as running, ExitStack() as stack:
        assert running.pid is not None
        dsns = [stack.enter_context(database(running, tallybook=False)) for _ in range(_NODES)]
        job = [_loaded(dsn, number) for number, dsn in enumerate(dsns, 1)][-1]
        named = "\n".join(f"n{number}={dsn}" for number, dsn in enumerate(dsns, 1))
        times = max(5, int(_TIMES * min(1.0, SCALE * 4)))
        with serving(dsns[0], "--nodes", "all", TALLYBOOK_NODES=named) as base:
            before = server_cpu(running.pid)
            took, failed = _measure(base, _pages(job), times)
            used = 1000 * (server_cpu(running.pid) - before)
        commands: dict[str, list[float]] = {" ".join(words): [] for words in _COMMANDS}
        runner = CliRunner(env={"TALLYBOOK_NODES": named, "TALLYBOOK_DSN": dsns[0]})
        for _ in range(10 if SCALE >= 0.1 else 2):
            for words in _COMMANDS:
                began = time.perf_counter()
                answer = runner.invoke(cli, [*words, "--nodes", "all"])
                commands[" ".join(words)].append((time.perf_counter() - began) * 1000)
                assert answer.exit_code == 0 and not answer.stderr.startswith("node"), answer.output
    slow = sorted(took.items(), key=lambda one: -percentile(one[1], 0.95))
    for name, ms in slow[:8]:
        say(f"  fleet_view: {percentile(ms, 0.95):8.1f} ms p95 {median(ms):8.1f} ms p50  {name}")
    every = [one for ms in took.values() for one in ms]
    shown = f"slowest of {len(took)}: {slow[0][0]}; {_NODES} nodes on one server, {int(_JOBS * SCALE):,} jobs in total"
    at_most("fleet_view", "p95_ms", percentile(slow[0][1], 0.95), "ms", 150, shown).show()
    plain("fleet_view", "p95_ms_all", percentile(every, 0.95), "ms", f"{len(every)} requests").show()
    plain("fleet_view", "server_cpu_ms", used / len(every), "ms", "of all nodes together, per page").show()
    at_most("fleet_view", "pages_failed", len(failed), "addresses", 0, ", ".join(failed)).show()
    slowest = max(commands, key=lambda name: median(commands[name]))
    told = f"slowest of {len(commands)}: {slowest} --nodes all; with a new connection to each node"
    plain("fleet_view", "command_p50_ms", median(commands[slowest]), "ms", told).show()
