"""What lets jobs go on that wait: for other jobs, for a permit at a concurrency limit, for their turn among fair keys."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.link import Link
from tallybook._maintenance.service import REFUSED, Release, about_a_second

_RESOLVE = Declared("""
  parents_resolve(parents bigint[], after bigint, as_service boolean)
  -> row (ended int, released int, cancelled int, busy int, last bigint, remain boolean)""")
_PERMITS = Declared("concurrency_release(names text[], as_service boolean) -> row (released int, remain boolean)")
_FAIR = Declared("""
  fair_release(known jsonb, max_line int, as_service boolean)
  -> row (known jsonb, released int, busy boolean, remain boolean)""")
_FAIR_RELEASE = _FAIR.select("known::text, released, busy, remain")
_BATCH = 500
_ROUND = 1.0
# A round over all that jobs wait for takes about a twentieth of one connection's time, however many these are.
_APART = 0.25
_LOCKED = 0.05
# Jobs with fair keys in line: a fast worker with many slots would find too few between two looks.
_LINE, _LONGEST_LINE = 200, 1000
# Another deals: what was claimed since it looked is ours to find.
_AGAIN = 0.01


class Parents(Release):
    """Jobs that wait for others go on when those have ended; told the ids of jobs."""

    name = "parents_resolve"
    _after: int | None = None

    async def look(self) -> int:
        """A round over all, whoever else runs one: how many jobs were started or cancelled."""
        self._ended.clear()
        moved: int = 0
        last: int | None = None
        while True:
            _, released, cancelled, _, last, _ = await self._run(None, last, as_service=False)
            moved += released + cancelled
            if last is None:
                return moved

    async def _run(self, parents: list[int] | None, after: int | None, *, as_service: bool) -> Any:
        row = await self._row(_RESOLVE.worker, parents, after, as_service)
        if row[1]:
            self._on_released()
        return row

    async def serve(self) -> str | float | None:
        """What was told first; else the next part of a round."""
        if self._ended:
            parents = list(self._ended)[:_BATCH]
            self._ended.difference_update(parents)
            _, _, _, busy, _, remain = await self._run(parents, None, as_service=False)
            if busy:  # another's transaction has a child of them: it looks again for what it had not seen
                self._ended.update(parents)
                return _LOCKED * random.uniform(0.5, 1.0)
            return 0.0 if self._ended else _ROUND if remain else None
        ended, _, _, busy, self._after, remain = await self._run(None, self._after, as_service=True)
        if ended is None:
            return about_a_second() if remain else REFUSED
        if self._after is not None:
            return _APART
        if busy:
            return _APART * random.uniform(0.5, 1.0)
        return about_a_second() if remain else None


class Permits(Release):
    """Jobs that wait for a permit at a concurrency limit go on when one is free; told the keys of limits."""

    name = "concurrency_release"

    async def look(self) -> int:
        """Let go on who may, whoever else does the same: how many were let go on."""
        self._ended.clear()
        released, _ = await self._run(None, as_service=False)
        return int(released)

    async def _run(self, names: list[str] | None, *, as_service: bool) -> Any:
        row = await self._row(_PERMITS.worker, names, as_service)
        if row[0]:
            self._on_released()
        return row

    async def serve(self) -> str | float | None:
        """What was told first; else all that jobs wait for."""
        if self._ended:
            names = sorted(self._ended)[:_BATCH]
            self._ended.difference_update(names)
            released, remain = await self._run(names, as_service=False)
            if released is None:  # somebody has the row of one of them
                self._ended.update(names)
                return _LOCKED * random.uniform(0.5, 1.0)
            return 0.0 if self._ended else _ROUND if remain else None
        released, remain = await self._run(None, as_service=True)
        return about_a_second() if remain else REFUSED if released is None else None


class FairRelease(Release):
    """Jobs with a fair key go to their lanes in rounds, as those in line are claimed. Claims of such jobs tell it, too.

    Each run costs as much as a hundred jobs, so it waits until its share of half a line was claimed, or a claim has found
    less than it wanted.
    """

    name = "fair_release"
    _known: str | None = None
    _last_time = True
    _remain = False
    _claimed = 0
    _workers = 1

    def __init__(self, link: Link, told: asyncio.Event, *, slots: int, on_released: Callable[[], None]) -> None:
        super().__init__(link, told, on_released=on_released)
        self._line = min(max(_LINE, 4 * slots), _LONGEST_LINE)
        self.run_at = 0.0  # a look sees what is new: what a worker before this one has left is found here

    def pause(self, workers: int) -> float:
        self._workers = max(1, workers)
        return super().pause(workers)

    def claimed(self, jobs: int, short: bool) -> None:
        """A claim has taken so many of them, or found nothing; short: less than it had room for."""
        self._claimed += jobs
        if (short and (jobs or self._remain)) or 2 * self._workers * self._claimed >= self._line:
            self.soon()

    def soon(self) -> None:
        self._last_time = False
        super().soon()

    async def look(self) -> int:
        """Release, whoever else does the same: how many jobs went on."""
        released, _, _ = await self._run(as_service=False)
        return released

    async def _run(self, *, as_service: bool) -> tuple[int, bool, bool]:
        # What it knows of a database that was replaced is thrown away with what it knew of the lanes of that one.
        self._claimed = 0
        self._known, released, busy, self._remain = await self._row(_FAIR_RELEASE, self._known, self._line, as_service)
        if released:
            self._on_released()
        return released, busy, self._remain

    async def serve(self) -> str | float | None:
        released, busy, remain = await self._run(as_service=True)
        if busy:
            return _AGAIN * random.uniform(0.5, 1.5)
        if released or remain:
            self._last_time = False
            return about_a_second()
        if self._last_time:
            return None
        # Told, and found nothing: what was committed very late is found by the look from the beginning, every few seconds.
        self._last_time = True
        return 3.1
