"""Services that release waiting jobs: after other jobs, for a permit of a concurrency limit, or by fair keys."""

import asyncio
import random
from collections.abc import Callable

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
# Seconds. A round over all that jobs wait for takes about a twentieth of one connection's time, however long it is.
_APART = 0.25
_LOCKED = 0.05
# How many jobs with fair keys to keep in line: a fast worker with many slots would find too few between two checks.
_LINE, _LONGEST_LINE = 200, 1000
_AGAIN = 0.01  # seconds; another worker is releasing, so this one must check for what was claimed since that began


class Parents(Release):
    """Releases jobs that wait for other jobs when those have ended; notified with job ids."""

    name = "parents_resolve"
    released_at = 1
    _after: int | None = None

    async def look(self) -> int:
        """Run a full round, even beside other workers; return how many jobs were started or cancelled."""
        self._ended.clear()
        moved: int = 0
        last: int | None = None
        while True:
            _, released, cancelled, _, last, _ = await self._row(_RESOLVE.worker, None, last, False)
            moved += released + cancelled
            if last is None:
                return moved

    async def serve(self) -> str | float | None:
        """Handle notified jobs first; else the next part of a round."""
        if self._ended:
            parents = list(self._ended)[:_BATCH]
            self._ended.difference_update(parents)
            _, _, _, busy, _, remain = await self._row(_RESOLVE.worker, parents, None, False)
            if busy:  # another transaction holds a child of them: check again later for what it missed
                self._ended.update(parents)
                return _LOCKED * random.uniform(0.5, 1.0)
            return 0.0 if self._ended else _ROUND if remain else None
        ended, _, _, busy, self._after, remain = await self._row(_RESOLVE.worker, None, self._after, True)
        if ended is None:
            return about_a_second() if remain else REFUSED
        if self._after is not None:
            return _APART
        if busy:
            return _APART * random.uniform(0.5, 1.0)
        return about_a_second() if remain else None


class Permits(Release):
    """Releases jobs that wait for a permit of a concurrency limit when one is free; notified with limit keys."""

    name = "concurrency_release"

    async def look(self) -> int:
        """Release all jobs that may continue, even beside other workers; return how many."""
        self._ended.clear()
        released, _ = await self._row(_PERMITS.worker, None, False)
        return int(released)

    async def serve(self) -> str | float | None:
        """Handle notified limits first; else all limits that jobs wait for."""
        if self._ended:
            names = sorted(self._ended)[:_BATCH]
            self._ended.difference_update(names)
            released, remain = await self._row(_PERMITS.worker, names, False)
            if released is None:  # the row of one of them is locked
                self._ended.update(names)
                return _LOCKED * random.uniform(0.5, 1.0)
            return 0.0 if self._ended else _ROUND if remain else None
        released, remain = await self._row(_PERMITS.worker, None, True)
        return about_a_second() if remain else REFUSED if released is None else None


class FairRelease(Release):
    """Moves jobs with a fair key to their lanes in rounds, as those in line are claimed; claims notify it, too.

    Each run costs as much as a hundred jobs. So it waits until its share of half a line was claimed, or until a claim
    has found less than it wanted.
    """

    name = "fair_release"
    released_at = 1
    _known: str | None = None
    _last_time = True
    _remain = False
    _claimed = 0
    _workers = 1

    def __init__(self, link: Link, told: asyncio.Event, on_work: Callable[[], object], *, slots: int) -> None:
        super().__init__(link, told, on_work)
        self._line = min(max(_LINE, 4 * slots), _LONGEST_LINE)
        self.run_at = 0.0  # a check sees new jobs only; this run finds what an earlier worker left

    def pause(self, workers: int) -> float:
        self._workers = max(1, workers)
        return super().pause(workers)

    def claimed(self, jobs: int, short: bool) -> None:
        """Note a claim of this many such jobs, or none; short: fewer than it had room for."""
        self._claimed += jobs
        if (short and (jobs or self._remain)) or 2 * self._workers * self._claimed >= self._line:
            self.soon()

    def soon(self) -> None:
        self._last_time = False
        super().soon()

    async def look(self) -> int:
        """Release once, even beside other workers; return how many jobs were released."""
        released, _, _ = await self._run(as_service=False)
        return released

    async def _run(self, *, as_service: bool) -> tuple[int, bool, bool]:
        # After the database was replaced, SQL drops the known state together with the lanes that it belongs to.
        self._claimed = 0
        self._known, released, busy, self._remain = await self._row(_FAIR_RELEASE, self._known, self._line, as_service)
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
        # Notified, and found nothing: a very late commit is found by the full check, every few seconds.
        self._last_time = True
        return 3.1
