"""The numbers for Prometheus and OpenTelemetry: two functions, called at most once per second and process."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import psycopg

from tallybook._db.counting import counts
from tallybook._db.declared import Declared
from tallybook._db.policy import first_line
from tallybook._db.sync import done, got
from tallybook._model.exposition import COLUMNS, Numbers
from tallybook.errors import QueueUnavailable

log = logging.getLogger("tallybook.telemetry")

FRESH = 1.0  # seconds for which an answer of the database, or its absence, serves all requests
ANSWER = 3.0  # time limit of the database in seconds
_COUNTS = counts.select(f"queue, task, {', '.join(COLUMNS)}")
_BACKLOG = Declared("backlog() -> rows (queue text, state text, oldest_run_at timestamptz)")
_AGE = "greatest(0, extract(epoch from clock_timestamp() - oldest_run_at))::float8"
_AGES = f"{_BACKLOG.select(f'queue, state, {_AGE}')} where isfinite(oldest_run_at)"
T = TypeVar("T")


async def ask(conn: Any) -> Numbers:
    began = time.monotonic()
    found = await got((await got(conn.execute(_COUNTS))).fetchall())
    ages = await got((await got(conn.execute(_AGES))).fetchall())
    tallies = {(queue, task): tuple(map(int, row)) for queue, task, *row in found}
    oldest = {(queue, state): float(age) for queue, state, age in ages}
    return Numbers(tallies, oldest, time.monotonic() - began)


def ask_sync(dsn: str, name: str) -> Numbers:
    """Read the current numbers over a connection for this one query."""
    connect = {"connect_timeout": int(ANSWER), "application_name": f"tallybook {name}"[:63]}
    with psycopg.connect(dsn, prepare_threshold=None, **connect) as conn:  # type: ignore[arg-type]  # of the values
        conn.read_only = True
        conn.execute("select set_config('statement_timeout', %s, true)", (f"{ANSWER:g}s",))
        return done(ask(conn))


class Asked(Generic[T]):
    """The result of `answer`, at most FRESH seconds old for any number of callers; an outage is logged once."""

    def __init__(self, answer: Callable[[], Awaitable[T]]) -> None:
        self._answer = answer
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")
        self._away = False
        self._found: T | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def now(self) -> T | None:
        """Return the result, or None if the database is unavailable."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a query in another loop may have ended with that loop
            self._loop, self._asking = loop, None
        if self._asking is None and time.monotonic() - self._asked_at >= FRESH:
            self._asking = asyncio.create_task(self._ask())
        if self._asking:
            await asyncio.shield(self._asking)  # a caller that is cancelled does not cancel it for the others
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
