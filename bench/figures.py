"""What a figure is, and how it is printed."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

SCALE = float(os.environ.get("SCALE", "1"))
"""1 is the size that the figures are stated for; CI runs less."""


@dataclass(frozen=True)
class Figure:
    """One measured value beside what it should be; `limit` is what bounds it, measured in the same run."""

    bench: str
    figure: str
    value: float | None
    unit: str
    target: str
    met: bool | None
    limit: str

    def show(self) -> None:
        """One JSON line on stdout, one line for people on stderr."""
        print(json.dumps(asdict(self)), flush=True)
        value = "-" if self.value is None else f"{self.value:,.2f}".rstrip("0").rstrip(".")
        mark = {True: "met", False: "MISSED", None: "-"}[self.met]
        say(f"  {self.bench:10} {self.figure:26} {value:>14} {self.unit:12} {self.target:22} {mark:7} {self.limit}")


def at_most(bench: str, figure: str, value: float, unit: str, target: float, limit: str = "") -> Figure:
    """A figure that has an upper bound."""
    return Figure(bench, figure, round(value, 3), unit, f"at most {target:g}", value <= target, limit)


def at_least(bench: str, figure: str, value: float, unit: str, target: float, limit: str = "") -> Figure:
    """A figure that has a lower bound."""
    return Figure(bench, figure, round(value, 3), unit, f"at least {target:g}", value >= target, limit)


def plain(bench: str, figure: str, value: float | None, unit: str, limit: str = "") -> Figure:
    """A figure without a bound of its own."""
    return Figure(bench, figure, None if value is None else round(value, 3), unit, "-", None, limit)


def say(line: str) -> None:
    """For people."""
    print(line, file=sys.stderr, flush=True)


def median(values: list[float]) -> float:
    """The middle one."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def percentile(values: list[float], share: float) -> float:
    """The value below which that share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
