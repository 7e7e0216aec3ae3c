"""The job of `make bench BENCH=cpu_bound`: 50 ms of CPU time, and a line with start and end. Imports no queue."""

from __future__ import annotations

import os
import time
from pathlib import Path

SECONDS = 0.05


def burn(n: int) -> None:
    """Use CPU time, and record start and end."""
    started, until = time.monotonic(), time.process_time() + SECONDS
    value = n
    while time.process_time() < until:
        for _ in range(1000):
            value = (value * 1103515245 + 12345) % 2147483648
    line = f"{n} {started} {time.monotonic()}\n"
    with Path(os.environ["BURN_LOG"], str(os.getpid())).open("a", encoding="ascii") as file:
        file.write(line)
