"""One measurement of one side of `bench.ab`: prints `{figure: value}` as its last line.

It is run by its path: always this commit's probe, with the `bench` and `tallybook` of the side's path. So it uses only
what every commit's bench has: `drain.ours`, `latency.ours`, and the figures that `cost.run` prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

SCALE = float(os.environ.get("SCALE", "1"))
_DRAINS = {"drain-1": ("jobs_per_s", 1), "drain-2": ("jobs_per_s_two", 2)}
_RATES = {"latency-50": 50, "latency-500": 500}


def _drain(what: str) -> dict[str, float]:
    from bench import drain
    from bench.server import server

    figure, processes = _DRAINS[what]
    with server() as running:  # three: one takes about a second, which anything can disturb
        rates = [drain.ours(running, max(10_000, int(100_000 * SCALE)), processes) for _ in range(3)]
    return {figure: sorted(rates)[1]}


def _latency(what: str) -> dict[str, float]:
    from bench import latency
    from bench.server import server

    rate = _RATES[what]
    with server() as running:
        p50, p99 = latency.ours(running, rate, max(4.0, 20 * SCALE))
    return {f"p50_ms_at_{rate}": p50, f"p99_ms_at_{rate}": p99}


def _cost() -> dict[str, float]:
    from bench import cost

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cost.run()
    figures = [json.loads(line) for line in printed.getvalue().splitlines()]
    return {f["figure"]: float(f["value"]) for f in figures if f["value"] is not None}


def main(what: str, src: str) -> None:
    """Check that the right code is imported, then measure."""
    import tallybook

    found = Path(tallybook.__file__).resolve()
    if not found.is_relative_to(Path(src).resolve()):
        sys.exit(f"bench.ab: {found} would be measured instead of {src}")
    measured = _cost() if what == "cost" else _drain(what) if what in _DRAINS else _latency(what)
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
