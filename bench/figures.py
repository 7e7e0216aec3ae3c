"""Figures, and how they are printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

SCALE = float(os.environ.get("SCALE", "1"))
"""1 is the size for which the figures are stated; CI runs a smaller one."""


@dataclass(frozen=True)
class Figure:
    """One measured value beside its target; `limit` is what bounds it, measured in the same run."""

    bench: str
    figure: str
    value: float | None
    unit: str
    target: str
    met: bool | None
    limit: str

    def show(self) -> None:
        """Print one JSON line on stdout, one line for people on stderr."""
        print(json.dumps(asdict(self)), flush=True)
        value = "-" if self.value is None else f"{self.value:,.2f}".rstrip("0").rstrip(".")
        mark = {True: "met", False: "MISSED", None: "-"}[self.met]
        say(f"  {self.bench:10} {self.figure:26} {value:>14} {self.unit:12} {self.target:22} {mark:7} {self.limit}")


def at_most(bench: str, figure: str, value: float, unit: str, target: float, limit: str = "") -> Figure:
    """Return a figure that has an upper bound."""
    return Figure(bench, figure, round(value, 3), unit, f"at most {target:g}", value <= target, limit)


def at_least(bench: str, figure: str, value: float, unit: str, target: float, limit: str = "") -> Figure:
    """Return a figure that has a lower bound."""
    return Figure(bench, figure, round(value, 3), unit, f"at least {target:g}", value >= target, limit)


def plain(bench: str, figure: str, value: float | None, unit: str, limit: str = "") -> Figure:
    """Return a figure without a bound."""
    return Figure(bench, figure, None if value is None else round(value, 3), unit, "-", None, limit)


def say(line: str) -> None:
    """Print a line for people on stderr."""
    print(line, file=sys.stderr, flush=True)


def in_turn(count: int, *calls: Callable[[], float]) -> list[list[float]]:
    """Make this many calls of each, in turn, and return their answers; the first 20, which make plans, do not count."""
    said: list[list[float]] = [[] for _ in calls]
    for turn in range(count + 20):
        for which in sorted(range(len(calls)), reverse=turn % 2 == 0):
            answer = calls[which]()
            if turn >= 20:
                said[which].append(answer)
    return said


def median(values: list[float]) -> float:
    """Return the median."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def percentile(values: list[float], share: float) -> float:
    """Return the value below which that share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
