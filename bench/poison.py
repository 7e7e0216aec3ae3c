"""1,000 poisoned handlers among 100,000 jobs, one worker: the others complete, and the worker does not degrade.

There are ten rounds, each loaded and then awaited. After each, when the worker is idle, its memory, threads and file
descriptors are read. The first rounds warm it up (threads start on demand, caches fill).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from bench import zoo
from bench.figures import SCALE, Figure, at_most, median, say
from bench.processes import Process
from bench.server import database, load, server

_ROUNDS = 10
_WARM = 3
_SLOTS = 50


@dataclass(frozen=True)
class Used:
    """What a process uses now."""

    mib: float
    threads: int
    files: int

    @staticmethod
    def by(pid: int) -> Used:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return Used(int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), files)


def _load(conn: psycopg.Connection[Any], number: int, others: int, poisoned: int) -> None:
    """Load one round: the poisoned jobs are spread among the others."""
    share = others // poisoned
    for n in range(poisoned):
        kind = number * poisoned + n
        conn.execute(
            "select tallybook.enqueue('default', %s, jsonb_build_object('kind', %s::int))",
            (zoo.TASKS[kind % len(zoo.TASKS)], kind // len(zoo.TASKS)),
        )
        load(conn, share, batch=share)


def _wait(conn: psycopg.Connection[Any], seconds: float) -> int:
    """Wait until every attempt has ended and none is due; return how many are left."""
    open_jobs = """select (select count(*) from tallybook.entry) - (select count(*) from tallybook.outcome)
                        + (select count(*) from tallybook.scheduled)"""
    until = time.monotonic() + seconds
    while True:
        row = conn.execute(open_jobs).fetchone()
        assert row is not None
        if not row[0] or time.monotonic() > until:
            return int(row[0])
        time.sleep(0.2)


def run() -> None:
    """Print the figures."""
    if not Path("/proc/self/status").exists():
        Figure("poison", "others_not_completed", None, "jobs", "at most 0", None, "not run: there is no /proc").show()
        return
    poisoned = max(len(zoo.POISONS) * len(zoo.TASKS) // _ROUNDS, int(1_000 * SCALE / _ROUNDS))
    others = 100 * poisoned
    used: list[Used] = []
    with (
        server() as running,
        database(running) as dsn,
        Process("serve", dsn, f'{{"slots": {_SLOTS}}}', quiet=True) as worker,
        psycopg.connect(dsn, autocommit=True) as conn,
    ):
        for number in range(_ROUNDS):
            _load(conn, number, others, poisoned)
            left = _wait(conn, 120)
            time.sleep(0.5)
            used.append(Used.by(worker.pid))
            say(f"  poison: round {number + 1}: {used[-1]}, {left} left")
        states = dict(
            conn.execute(
                "select (task = any(%s))::text || ' ' || state, count(*) from tallybook.job group by 1",
                (list(zoo.TASKS),),
            ).fetchall()
        )
        lives = conn.execute("select count(*) from tallybook.worker").fetchone()
        worker.go()
        worker.answer()
    assert lives == (1,), "the worker was given up for dead, or restarted"
    warm, last = used[_WARM - 1], used[-1]
    total, bad = _ROUNDS * others, _ROUNDS * poisoned
    shown = f"{total:,} others, {bad:,} poisoned in {len(zoo.POISONS)} ways"
    undone = total - states.get("false completed", 0)
    at_most("poison", "others_not_completed", float(undone), "jobs", 0, shown).show()
    ends = f"each failed {zoo.ATTEMPTS} times, then dead"
    at_most("poison", "poisoned_not_dead", float(bad - states.get("true dead", 0)), "jobs", 0, ends).show()
    # Medians of three rounds: one poisoned job raises 5 MB of text, which may or may not be in memory at a reading.
    early, late = (median([u.mib for u in some]) for some in (used[_WARM - 1 : _WARM + 2], used[-3:]))
    shown = f"{early:.1f} MiB after rounds {_WARM} to {_WARM + 2}, {late:.1f} after the last three"
    at_most("poison", "memory_last_to_warm", late / early, "ratio", 1.05, shown).show()
    shown = f"{warm.threads} after round {_WARM}, {last.threads} after round {_ROUNDS}"
    at_most("poison", "threads_more", float(last.threads - warm.threads), "threads", 0, shown).show()
    shown = f"{warm.files} after round {_WARM}, {last.files} after round {_ROUNDS}"
    at_most("poison", "files_more", float(last.files - warm.files), "files", 0, shown).show()
