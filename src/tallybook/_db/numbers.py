"""The numbers that are shown to Prometheus and OpenTelemetry: two functions, asked for at most once a second a process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import psycopg

from tallybook._db.counting import COUNTS
from tallybook._db.declared import Declared
from tallybook._db.policy import first_line
from tallybook._model.exposition import COLUMNS, Numbers
from tallybook.errors import QueueUnavailable

log = logging.getLogger("tallybook.telemetry")

FRESH = 1.0
"""For so long an answer of the database serves all who ask, also that it did not answer."""
ANSWER = 3.0
"""So long the database may take."""
_COUNTS = COUNTS.select(f"queue, task, {', '.join(COLUMNS)}")
_BACKLOG = Declared("backlog() -> rows (queue text, state text, oldest_run_at timestamptz)")
_AGE = "greatest(0, extract(epoch from clock_timestamp() - oldest_run_at))::float8"
_AGES = f"{_BACKLOG.select(f'queue, state, {_AGE}')} where isfinite(oldest_run_at)"
_LIMIT = "select set_config('statement_timeout', %s, true)"
Rows = list[tuple[Any, ...]]
T = TypeVar("T")


async def ask(conn: psycopg.AsyncConnection[Any]) -> Numbers:
    """What they are now."""
    began = time.monotonic()
    counts = await (await conn.execute(_COUNTS)).fetchall()
    ages = await (await conn.execute(_AGES)).fetchall()
    return _numbers(counts, ages, began)


def ask_sync(dsn: str, name: str) -> Numbers:
    """What they are now, over a connection for this one question."""
    connect = {"connect_timeout": int(ANSWER), "application_name": f"tallybook {name}"[:63]}
    with psycopg.connect(dsn, prepare_threshold=None, **connect) as conn:  # type: ignore[arg-type]  # of the values
        conn.read_only = True
        conn.execute(_LIMIT, (f"{ANSWER:g}s",))
        began = time.monotonic()
        return _numbers(conn.execute(_COUNTS).fetchall(), conn.execute(_AGES).fetchall(), began)


def _numbers(counts: Rows, ages: Rows, began: float) -> Numbers:
    return Numbers(
        {(row[0], row[1]): tuple(map(int, row[2:])) for row in counts},
        {(row[0], row[1]): float(row[2]) for row in ages},
        time.monotonic() - began,
    )


class Asked(Generic[T]):
    """What `answer` says, at most FRESH seconds old, however many ask; that it does not answer is logged once."""

    def __init__(self, answer: Callable[[], Awaitable[T]]) -> None:
        self._answer = answer
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")
        self._away = False
        self._found: T | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def now(self) -> T | None:
        """None: the database is away."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # whoever asked in another one may have gone with it
            self._loop, self._asking = loop, None
        if self._asking is None and time.monotonic() - self._asked_at >= FRESH:
            self._asking = asyncio.create_task(self._ask())
        if self._asking:
            await asyncio.shield(self._asking)  # who goes away does not cut it short for the others
        return self._found

    async def _ask(self) -> None:
        found = None
        try:
            found = await self._answer()
            if self._away:
                log.info("telemetry: the database answers again")
            self._away = False
        except (psycopg.Error, OSError, QueueUnavailable) as error:
            if not self._away:
                log.warning("telemetry: the database does not answer: %s", first_line(error))
            self._away = True
        finally:
            if self._loop is asyncio.get_running_loop():
                self._found, self._asked_at, self._asking = found, time.monotonic(), None
