"""The application that the benchmarks' workers run."""

from __future__ import annotations

import time
from typing import Any

from tallybook import App

app = App("bench")
seen: dict[str, Any] = {"done": 0, "first": 0.0, "last": 0.0}
starts: dict[int, float] = {}


@app.task
async def noop(to: str, n: int) -> None:
    """Nothing, and when."""
    now = time.time()
    if not seen["done"]:
        seen["first"] = now
    seen["last"] = now
    seen["done"] += 1


@app.task
async def note(n: int) -> None:
    """When the handler of job n started."""
    starts[n] = time.time()
