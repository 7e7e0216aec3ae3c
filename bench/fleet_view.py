"""Lists and the dashboard of eight nodes with 10 million jobs in all: eight databases of one server.

Each node is loaded like `why`: nine tenths of its jobs are history, one tenth is in line. The pages are asked for over HTTP from a
real `tallybook web --nodes all`, in random order over one connection; the lists are the commands, run in this process, with a
connection to each node every time. A server of its own for each node would answer with eight times the cores.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import psycopg
from click.testing import CliRunner

from bench.figures import SCALE, at_most, median, percentile, plain, say
from bench.pages import _measure, serving
from bench.server import database, server, vacuum
from bench.why import _load
from tallybook._cli import cli
from tallybook._db.migrate import migrate

_NODES, _JOBS, _TIMES = 8, 10_000_000, 40
_LISTS = (
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
    """Fill one node; a job of it that is in line."""
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
        dsns = [stack.enter_context(database(running, tallybook=False)) for _ in range(_NODES)]
        job = [_loaded(dsn, number) for number, dsn in enumerate(dsns, 1)][-1]
        named = "\n".join(f"n{number}={dsn}" for number, dsn in enumerate(dsns, 1))
        times = max(10, int(_TIMES * min(1.0, SCALE * 10)))
        with serving(dsns[0], "--nodes", "all", TALLYBOOK_NODES=named) as base:
            took, failed = _measure(base, _pages(job), times)
        lists: dict[str, list[float]] = {" ".join(words): [] for words in _LISTS}
        runner = CliRunner(env={"TALLYBOOK_NODES": named, "TALLYBOOK_DSN": dsns[0]})
        for _ in range(times):
            for words in _LISTS:
                began = time.perf_counter()
                answer = runner.invoke(cli, [*words, "--nodes", "all"])
                lists[" ".join(words)].append((time.perf_counter() - began) * 1000)
                assert answer.exit_code == 0 and not answer.stderr.startswith("node"), answer.output
    for what, found in (("pages", took), ("lists", lists)):
        slow = sorted(found.items(), key=lambda one: -percentile(one[1], 0.95))
        for name, ms in slow[:6]:
            say(f"  fleet_view: {percentile(ms, 0.95):8.1f} ms p95 {median(ms):8.1f} ms p50  {name}")
        every = [one for ms in found.values() for one in ms]
        shown = (
            f"slowest of {len(found)}: {slow[0][0]}; {_NODES} nodes on one server, {int(_JOBS * SCALE):,} jobs in all"
        )
        at_most("fleet_view", f"{what}_p95_ms", percentile(slow[0][1], 0.95), "ms", 150, shown).show()
        plain("fleet_view", f"{what}_p95_ms_all", percentile(every, 0.95), "ms", f"{len(every)} of them").show()
    at_most("fleet_view", "pages_failed", len(failed), "addresses", 0, ", ".join(failed)).show()
