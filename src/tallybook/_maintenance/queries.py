"""Query-driven schedules: each due one fires in its own transaction, beside the clock and the other schedules.

A query may take minutes, wait for a lock, or be wrong. So each runs on its own connection, within a time limit. Its
error is stored as the result of that tick, and the clock continues meanwhile.
"""

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from tallybook._db.declared import Declared
from tallybook._db.driver import Error
from tallybook._db.link import Link, SocketTimeout, end
from tallybook._db.policy import Action, action_for, backoff, first_line

log = logging.getLogger("tallybook.worker")

LONGEST: Final = 600.0  # seconds that one query may take; then it is cancelled, and its tick is stored as failed
AT_ONCE: Final = 4  # how many queries one worker runs at the same time; with fewer slow ones, no other query is delayed

_FIRE = Declared("""
  _schedule_fire_query(p_plan jsonb, p_at timestamptz)
  -> row (carried boolean, jobs bigint, failed int, reason text)""")
_FAILED = Declared("_schedule_query_failed(p_plan jsonb, p_reason text, p_at timestamptz) -> boolean")
_TIME = "select set_config('statement_timeout', %s, true), set_config('lock_timeout', '0', true)"
_TRIES = 3
_NOT_BEFORE = 5.0  # seconds until a retry when another worker is firing it, or its connection was lost

Plan = dict[str, Any]


class Queries:
    """Starts due schedules that do not run here yet, on connections like `link`; calls `on_end` after each."""

    def __init__(self, link: Link, *, on_fired: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._dsn, self._name = link.dsn, link.name
        self._on_fired = on_fired
        self._on_end = on_end
        self._longest = LONGEST
        self._running: dict[str, asyncio.Task[int]] = {}
        self._free = [link]
        self._not_before: dict[str, float] = {}

    def wanted(self, names: Sequence[str]) -> list[str]:
        now = time.monotonic()
        self._not_before = {name: at for name, at in self._not_before.items() if at > now}
        able = [name for name in names if name not in self._running and name not in self._not_before]
        return able[: AT_ONCE - len(self._running)]

    def start(self, one: Plan, at: datetime) -> asyncio.Task[int]:
        """Start firing one schedule; the task's result is the number of jobs it enqueued."""
        name = str(one["name"])
        running = asyncio.create_task(self._fire(one, at), name=f"tallybook-query-{name}")
        self._running[name] = running
        running.add_done_callback(lambda _: self._ended(name))
        return running

    def _ended(self, name: str) -> None:
        running = self._running.pop(name)
        if not running.cancelled() and (error := running.exception()):
            log.error("schedule %r: its query could not be fired", name, exc_info=error)
            self._not_before[name] = time.monotonic() + _NOT_BEFORE
        self._on_end()

    async def _fire(self, one: Plan, at: datetime) -> int:
        link = self._free.pop() if self._free else Link(self._dsn, self._name)
        try:
            jobs = await self._said(link, one, at)
        except BaseException:
            await link.close()
            raise
        if self._free:
            await link.close()
        else:
            self._free.append(link)
        if jobs:
            self._on_fired()
        return jobs

    async def _said(self, link: Link, one: Plan, at: datetime) -> int:
        name, text = one["name"], json.dumps(one)
        for left in range(_TRIES, 0, -1):
            try:
                carried, jobs, failed, reason = await self._call(link, _FIRE.worker, text, at)
            except (Error, OSError) as error:
                action = action_for(error, link.conn)
                if action is Action.RECONNECT:  # its work is rolled back or committed: the next check shows which
                    log.warning("schedule %r: its connection was lost: %s", name, first_line(error))
                    self._not_before[name] = time.monotonic() + _NOT_BEFORE
                    await link.close()
                    return 0
                if action is Action.AGAIN and getattr(error, "sqlstate", "") != "57014" and left > 1:
                    await asyncio.sleep(backoff(_TRIES - left))
                    continue
                reason = first_line(error)
                if await self._call(link, _FAILED.worker, text, reason, at):
                    _warn(name, reason)
                return 0
            if not carried:
                self._not_before[name] = time.monotonic() + _NOT_BEFORE * random.uniform(0.2, 1.0)
            elif failed:
                _warn(name, reason)
            return int(jobs)
        raise AssertionError("the last try has an end")

    async def _call(self, link: Link, query: Any, *params: object) -> Any:
        conn = await link.connect()
        with SocketTimeout(conn, self._longest + 30.0):
            async with conn.transaction():
                await conn.execute(_TIME, (f"{math.ceil(self._longest * 1000)}ms",))
                row = await (await conn.execute(query, params)).fetchone()
        assert row is not None
        return row if len(row) > 1 else row[0]

    async def close(self) -> None:
        """Stop and roll back the running queries, and close the connections."""
        await end(self._running.values())
        while self._free:
            await self._free.pop().close()


def _warn(name: str, reason: str) -> None:
    log.warning("schedule %r: its query failed: %s", name, reason, extra={"event": "schedule failed"})
