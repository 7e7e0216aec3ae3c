"""Wait for a condition, never for a time."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def pauses(what: str, seconds: float) -> Iterator[float]:
    """Yield the seconds to the next check: 10 ms, later a tenth of the wait so far, at most 100 ms.

    At the limit, raise AssertionError with `what`.
    """
    started = time.monotonic()
    while (waited := time.monotonic() - started) <= seconds:
        yield min(max(0.01, waited / 10), 0.1)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def wait_until(condition: Callable[[], T], what: str, *, seconds: float = 60.0) -> T:
    """Return the first true value of `condition`, or raise AssertionError with `what`."""
    wait = pauses(what, seconds)
    while not (value := condition()):
        time.sleep(next(wait))
    return value
