"""The App of `make bench BENCH=cpu_bound`: runs burn in its own process."""

from __future__ import annotations

from bench.burn import burn as work
from tallybook import App

app = App("bench")


@app.task(process=True, queue="burn")
def burn(n: int, to: str) -> None:
    """Use 50 ms of CPU time."""
    work(n)
