"""The time from commit to the handler's start, at 50 and at 500 jobs per second; beside Graphile Worker at 50."""

from __future__ import annotations

import time

import psycopg

from bench import peers
from bench.figures import SCALE, Figure, at_most, median, percentile, say
from bench.processes import Process
from bench.server import database, server
from tallybook.embedded import Server


def ours(running: Server, rate: float, seconds: float) -> tuple[float, float]:
    """Return p50 and p99 in ms of one run on a fresh database; this process is the producer, evenly paced."""
    count = int(rate * seconds)
    committed: list[float] = []
    with database(running) as dsn, Process("serve", dsn) as worker, psycopg.connect(dsn, autocommit=True) as conn:
        for _ in range(10):  # warm
            conn.execute("select tallybook.enqueue('default', 'note', '{\"n\": -1}')")
            time.sleep(0.05)
        start = time.perf_counter()
        for n in range(count):
            if (wait := start + n / rate - time.perf_counter()) > 0:
                time.sleep(wait)
            conn.execute("select tallybook.enqueue('default', 'note', jsonb_build_object('n', %s::int))", (n,))
            committed.append(time.time())
        time.sleep(1)
        worker.go()
        starts = {int(n): at for n, at in worker.answer()["starts"].items()}
    late = [max(0.0, (starts[n] - at) * 1000) for n, at in enumerate(committed)]
    return percentile(late, 0.5), percentile(late, 0.99)


def run() -> None:
    """Print the figures."""
    seconds, turns = max(4.0, 30 * SCALE), 3 if SCALE >= 0.5 else 1
    missing = peers.available().get("graphile")
    mine: dict[int, list[tuple[float, float]]] = {50: [], 500: []}
    theirs: list[tuple[float, float]] = []
    with server() as running:
        for _ in range(turns):
            for rate in (50, 500):
                mine[rate].append(ours(running, rate, seconds))
                say(f"  latency: tallybook at {rate}/s: p50 {mine[rate][-1][0]:.2f} ms, p99 {mine[rate][-1][1]:.2f} ms")
            if not missing:
                theirs.append(peers.latency("graphile", running.dsn(), 50, seconds))
                say(f"  latency: graphile at 50/s: p50 {theirs[-1][0]:.2f} ms, p99 {theirs[-1][1]:.2f} ms")
    for rate in (50, 500):
        for place, name, target in ((0, "p50", 1.0), (1, "p99", 5.0)):
            value = median([pair[place] for pair in mine[rate]])
            at_most("latency", f"{name}_ms_at_{rate}", value, "ms", target, f"{turns} run(s) of {seconds:g} s").show()
    if theirs:
        ratio = median([m[1] for m in mine[50]]) / median([t[1] for t in theirs])
        shown = f"graphile p50 {median([t[0] for t in theirs]):.2f}, p99 {median([t[1] for t in theirs]):.2f} ms"
        at_most("latency", "p99_ratio_to_graphile", ratio, "ratio", 0.7, shown).show()
    else:
        Figure("latency", "p99_ratio_to_graphile", None, "ratio", "at most 0.7", None, f"not run: {missing}").show()
