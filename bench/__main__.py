"""`python -m bench [NAME...]`: run the named benchmarks; without a name, all."""

from __future__ import annotations

import importlib
import sys
import time

from bench.figures import SCALE, say

NAMES = (
    "cost",
    "enqueue",
    "drain",
    "claimers",
    "latency",
    "pinned",
    "idle",
    "outage",
    "poison",
    "rescue",
    "schedule",
    "scheduled",
    "pinned_scheduled",
    "upsert",
    "query",
    "roles",
    "limit",
    "concurrency",
    "fair",
    "history",
    "counters",
    "why",
    "pages",
    "lists",
    "fleet",
    "fleet_view",
    "cpu_bound",
    "install",
)
_ASKED_FOR = ("install",)
"""Run only if named: it fills environments from the package index."""
_WITH_PEERS = ("drain", "latency", "cpu_bound")


def main() -> int:
    """Run the benchmarks of the command line."""
    names = sys.argv[1:] or [name for name in NAMES if name not in _ASKED_FOR]
    if unknown := [name for name in names if name not in NAMES]:
        say(f"bench: unknown benchmark {', '.join(unknown)}; choose from {', '.join(NAMES)}")
        return 2
    if any(name in _WITH_PEERS for name in names):
        from bench.peers import setup

        setup.main()
    for name in names:
        say(f"bench {name}, SCALE={SCALE:g}")
        start = time.monotonic()
        importlib.import_module(f"bench.{name}").run()
        say(f"bench {name} took {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
