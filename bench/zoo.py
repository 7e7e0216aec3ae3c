"""Handlers that fail in every way that an exception can (F29); each failure must affect only its own job."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import timedelta

from bench.app import app
from tallybook import Constant


class Unprintable(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


class Ending(Exception):
    """An error that ends any code that shows it."""

    def __str__(self) -> str:
        raise SystemExit(3)


def _unprintable() -> None:
    raise Unprintable


def _ending() -> None:
    raise Ending


def _exit() -> None:
    sys.exit(1)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _huge() -> None:
    raise ValueError("x" * 5_000_000)


def _unstorable() -> None:
    raise ValueError("a NUL \0 and half a character \ud800")


def _deep() -> None:
    _deep()


def _cancelled() -> None:
    raise asyncio.CancelledError


def _cyclic() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def _group() -> None:
    members: list[BaseException] = [Unprintable(), KeyboardInterrupt(), ValueError("y" * 100_000)]
    raise BaseExceptionGroup("many", members)


POISONS: tuple[Callable[[], None], ...] = (
    _unprintable,
    _ending,
    _exit,
    _interrupt,
    _huge,
    _unstorable,
    _deep,
    _cancelled,
    _cyclic,
    _group,
)
ATTEMPTS = 2
_AT_ONCE = Constant(timedelta(0))


@app.task(retry=_AT_ONCE, max_attempts=ATTEMPTS)
async def poison(kind: int) -> None:
    """Fail on the event loop."""
    POISONS[kind % len(POISONS)]()


@app.task(retry=_AT_ONCE, max_attempts=ATTEMPTS)
def poison_thread(kind: int) -> None:
    """Fail in a thread."""
    POISONS[kind % len(POISONS)]()


@app.task(retry=_AT_ONCE, max_attempts=ATTEMPTS)
async def poison_own_task(kind: int) -> None:
    """Cancel the asyncio task that it runs in, and then fail, or wait for the cancel to arrive."""
    me = asyncio.current_task()
    assert me is not None
    me.cancel()
    if kind % 2:
        POISONS[kind % len(POISONS)]()
    await asyncio.sleep(60)


TASKS = ("poison", "poison_thread", "poison_own_task")
