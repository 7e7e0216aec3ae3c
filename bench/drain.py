"""100,000 no-op async jobs, one and two worker processes, fully durable; beside Graphile Worker and PgQueuer.

Interleaved: ours, theirs, ours, theirs. Every system is loaded, then vacuumed and analysed (without statistics the
peers are up to twice as slow). Then processes that are connected already drain it, and start together.
"""

from __future__ import annotations

import psycopg

from bench import peers
from bench.figures import SCALE, Figure, at_least, median, plain, say
from bench.processes import drain
from bench.server import database, load, server, vacuum
from tallybook.embedded import Server

_SLOTS = 500


def ours(running: Server, jobs: int, processes: int) -> float:
    """Drain Tallybook once on a fresh database; return jobs per second."""
    with database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            load(conn, jobs)
        vacuum(dsn)
        return drain(dsn, jobs, processes, _SLOTS)


def run() -> None:
    """Print the figures."""
    jobs = max(10_000, int(100_000 * SCALE))
    turns = 3 if SCALE >= 0.5 else 1
    missing = peers.available()
    rates: dict[tuple[str, int], list[float]] = {}
    with server() as running:
        for _ in range(turns):
            for processes in (1, 2):
                for name in ("tallybook", "graphile", "tallybook", "pgqueuer"):
                    if name != "tallybook" and missing.get(name):
                        continue
                    if name == "tallybook":
                        rate = ours(running, jobs, processes)
                    else:
                        rate = peers.drain(name, running.dsn(), jobs, processes)
                    rates.setdefault((name, processes), []).append(rate)
                    say(f"  drain: {name} with {processes}: {rate:,.0f}/s")
    middle = {key: median(values) for key, values in rates.items()}
    for peer, n, target in (("graphile", 1, 2.5), ("graphile", 2, 1.8), ("pgqueuer", 1, 4.0), ("pgqueuer", 2, 4.0)):
        figure = f"ratio_to_{peer}" if n == 1 else f"ratio_to_{peer}_two"
        if (peer, n) not in middle:
            Figure("drain", figure, None, "ratio", f"at least {target:g}", None, f"not run: {missing[peer]}").show()
            continue
        ratio = middle["tallybook", n] / middle[peer, n]
        shown = f"{n} process(es): {peer} {middle[peer, n]:,.0f}/s, ours {middle['tallybook', n]:,.0f}/s"
        at_least("drain", figure, ratio, "ratio", target, shown).show()
    for n in (1, 2):
        name = "jobs_per_s" if n == 1 else "jobs_per_s_two"
        plain(
            "drain", name, middle["tallybook", n], "jobs/s", f"{n} process(es), median of {len(rates['tallybook', n])}"
        ).show()
