"""Ends of attempts that may have ended already, in a transaction whose outcome this worker does not know.

A connection can be lost at COMMIT. A handler can call `ctx.complete` or `ctx.end` in its own transaction and never end
it. So such an end is never stored blindly. First the server is asked how the attempt ended. If it has not ended, the
end is sent like any other: it waits for a transaction that may still commit another end, and the first of the two
counts. The finisher's connection is not used for this: all other jobs' ends would wait behind one such transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from tallybook._db.driver import AsyncConnection, LockNotAvailable
from tallybook._db.ends import ENDED, FAIL, SubjectEnd
from tallybook._db.link import Link, end
from tallybook._db.policy import backoff
from tallybook._worker.jobs import Running, spawn
from tallybook.errors import QueueUnavailable

log = logging.getLogger("tallybook.worker")

_ALL_ENDED = f"""\
select array_agg({ENDED.called(lease="x.l", job_id="x.j", attempt="x.a")} order by x.n)
  from unnest(%s::text[]::uuid[], %s::bigint[], %s::int[]) with ordinality x(l, j, a, n)"""  # noqa: S608
_MOST_ASKED = 200
# The same limit as the rescuer's: check, do not wait, since others may be queued behind this lock.
_LOOK = "set local lock_timeout = '200ms'"
_NO_ERROR = "jsonb_build_object('message', 'its end (' || {verb:text} || ') could not be stored', 'type', {kind:text})"
_COULD_NOT = "select " + FAIL.called("order", error=_NO_ERROR, retry_in="null", max_attempts="null", final="false")
_LOUD_AFTER = 2
# The pause between two such checks grows up to this number, to about a second.
_SLOWEST = 4


@dataclass(slots=True)
class End:
    """An end other than completed, and the statement that stores it. Its first parameters: lease, job, attempt."""

    running: Running
    verb: str
    sql: str
    params: tuple[Any, ...]
    wake_in: timedelta | None = None

    def failed(self, error: Exception) -> End:
        """Return the end for an attempt whose end the server has refused to store."""
        return End(self.running, "fail", _COULD_NOT, (*self.params[:3], self.verb, type(error).__name__))


class DoubtfulEnds:
    """Finds out how attempts in doubt have ended, and ends those that have not. Connects at the first one."""

    def __init__(self, link: Link, on_end: Callable[[Running, str, str, timedelta | None], object]) -> None:
        self._link = link
        self._on_end = on_end
        self._open: set[asyncio.Task[None]] = set()
        self._asked: list[End] = []
        self._looking = False

    def settle(self, end: End) -> None:
        """End this attempt with `end`, unless it has ended already."""
        self._asked.append(end)
        if not self._looking:
            self._looking = True
            spawn(self._open, self._look(), "tallybook-settle")

    async def _look(self) -> None:
        # Nearly all of them have ended normally. While one check runs, the next ends gather.
        try:
            while self._asked:
                ends, self._asked = self._asked[:_MOST_ASKED], self._asked[_MOST_ASKED:]
                try:
                    columns = zip(*(end.params[:3] for end in ends), strict=True)
                    ((states,),) = await self._link.rows(_ALL_ENDED, *map(list, columns))
                except QueueUnavailable:
                    return  # the worker stops and cannot reach the server: they will be rescued
                except Exception as error:
                    log.warning("checking %s ends one by one: %s", len(ends), error)
                    states = [None] * len(ends)
                for end, state in zip(ends, states, strict=True):
                    if state in (None, "running"):
                        spawn(self._open, self._settle(end), "tallybook-settle")
                    else:
                        self._tell(end, _found(end, state) or "refused")
        finally:
            self._looking = False

    async def settled(self) -> None:
        while self._open:
            await asyncio.wait(self._open)

    async def close(self) -> None:
        """Give up the ends that are still in doubt: others will rescue those jobs."""
        await end(self._open)
        await self._link.close()

    async def _settle(self, end: End) -> None:
        looks = 0
        while True:
            try:
                said = await self._link.run(partial(self._say, end))
                if said is not None:
                    break
                looks += 1
                if looks == _LOUD_AFTER:
                    log.warning("job %s: its end waits for an open transaction that completes it", end.running.job_id)
                await asyncio.sleep(backoff(min(looks, _SLOWEST)))
            except QueueUnavailable:
                return  # the worker stops and cannot reach the server: it will be rescued
            except Exception as error:
                log.error("job %s: its end (%s) cannot be stored: %s", end.running.job_id, end.verb, error)
                if end.sql == _COULD_NOT:
                    await asyncio.sleep(1)
                end = end.failed(error)
        self._tell(end, said)

    def _tell(self, end: End, said: str | SubjectEnd) -> None:
        if isinstance(said, SubjectEnd):
            self._on_end(end.running, said.verb, said.said, said.wake_in)
        else:
            self._on_end(end.running, "complete" if said == "completed" else end.verb, said, end.wake_in)

    async def _say(self, end: End, conn: AsyncConnection) -> str | SubjectEnd | None:
        """Return how the attempt has ended; None: an open transaction may end it."""
        if said := await self._found(conn, end):
            return said
        try:
            async with conn.transaction():
                await conn.execute(_LOOK)
                row = await (await conn.execute(end.sql, end.params)).fetchone()
        except LockNotAvailable:  # not for the link, which would take it for an outage
            return None
        said = row[0] if row else "refused"
        if said == "refused":  # the other transaction has committed since, or another end came first
            return await self._found(conn, end) or said
        return str(said)

    async def _found(self, conn: AsyncConnection, end: End) -> str | SubjectEnd | None:
        row = await (await conn.execute(ENDED.worker, end.params[:3])).fetchone()
        return _found(end, row[0] if row else None)


def _found(end: End, state: str | None) -> str | SubjectEnd | None:
    """Return how an attempt in this state ended; None: it has not ended."""
    if state == "running":
        return None
    own = end.running.own_end
    if own is not None and state == own.state:
        return own
    if state != "completed":
        return "refused"
    if end.verb != "complete":
        log.info("job %s: completed by its own transaction", end.running.job_id)
    return "completed"
