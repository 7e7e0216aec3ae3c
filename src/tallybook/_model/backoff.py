"""Backoff: how long a job waits after a failure before its next attempt.

A policy is a value with one method, `delay(failures)`. `failures` counts the failures so far, this one included, so it
is 1 after the first. Snoozes, rate limits and crashes are no failures and do not lengthen the delay.

    Exponential(timedelta(minutes=5))    5, 10, 20, 40, 80 min, ... at most 6 hours
    Constant(timedelta(seconds=30))      30 s, always
    Linear(timedelta(minutes=1))         1, 2, 3, ... min, at most 6 hours
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Protocol

from tallybook.errors import ConfigError

__all__ = ["DEFAULT", "Backoff", "Constant", "Exponential", "Linear"]

_SIX_HOURS = timedelta(hours=6)


class Backoff(Protocol):
    """Anything that says how long to wait; the classes here, or the user's own."""

    def delay(self, failures: int, rng: Callable[[], float] = random.random) -> timedelta:
        """The delay after the `failures`-th failure; `rng` returns a number in [0, 1) and is there for tests."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """first x factor^(failures - 1), at most `cap`.

    With `jitter` the delay is drawn evenly from [0, that] ("full jitter"), which spreads the retries of jobs that
    failed together, for example when a service they all call went down. Without it the delays are exact.
    """

    first: timedelta = timedelta(seconds=5)
    _: KW_ONLY
    factor: float = 2
    cap: timedelta = _SIX_HOURS
    jitter: bool = False

    def __post_init__(self) -> None:
        _check("Exponential", first=self.first, cap=self.cap)
        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float):
            raise ConfigError("Exponential.factor", self.factor, "not a number")
        if not (self.factor >= 1 and math.isfinite(self.factor)):
            raise ConfigError("Exponential.factor", self.factor, "must be a finite number, at least 1")

    def delay(self, failures: int, rng: Callable[[], float] = random.random) -> timedelta:
        """The delay after the `failures`-th failure (1 is the first); never more than `cap`, whatever the number."""
        try:
            full = min(self.first * float(self.factor) ** (max(failures, 1) - 1), self.cap)
        except OverflowError:  # of the power or of the timedelta: far past any cap, unless it is nothing times that
            full = self.cap if self.first else self.first
        return full * rng() if self.jitter else full


@dataclass(frozen=True, slots=True)
class Constant:
    """The same delay after every failure."""

    every: timedelta

    def __post_init__(self) -> None:
        _check("Constant", every=self.every)

    def delay(self, failures: int, rng: Callable[[], float] = random.random) -> timedelta:
        """Always `every`."""
        return self.every


@dataclass(frozen=True, slots=True)
class Linear:
    """first, then `step` more after every failure (by default `first` again: 1, 2, 3 min, ...), at most `cap`."""

    first: timedelta
    step: timedelta | None = None
    cap: timedelta = _SIX_HOURS

    def __post_init__(self) -> None:
        _check("Linear", first=self.first, cap=self.cap)
        if self.step is not None:
            _check("Linear", step=self.step)

    def delay(self, failures: int, rng: Callable[[], float] = random.random) -> timedelta:
        """The delay after the `failures`-th failure (1 is the first); never more than `cap`."""
        step = self.first if self.step is None else self.step
        try:
            return min(self.first + step * (max(failures, 1) - 1), self.cap)
        except OverflowError:
            return self.cap


def _check(policy: str, **durations: timedelta) -> None:
    for name, value in durations.items():
        if not isinstance(value, timedelta):
            raise ConfigError(f"{policy}.{name}", value, "not a timedelta", hint="Write timedelta(minutes=5)")
        if value < timedelta(0):
            raise ConfigError(f"{policy}.{name}", value, "a delay cannot be negative")
    if "cap" in durations and durations["cap"] < durations["first"]:
        # Cutting the first delay silently would hide the mistake in Exponential(timedelta(days=1)).
        raise ConfigError(f"{policy}.cap", durations["cap"], f"less than the first delay, {durations['first']}")


DEFAULT: Backoff = Exponential(timedelta(seconds=5), jitter=True)
"""What a task has that names no retry policy."""
