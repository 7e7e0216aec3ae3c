"""Promote: moves due jobs from scheduled to their lanes."""

import asyncio
import math
import random
from collections.abc import Callable
from datetime import datetime

from tallybook._db.declared import Declared
from tallybook._db.link import Link
from tallybook._maintenance.service import Service

_PROMOTE = Declared("""
  promote(max_jobs int, after timestamptz, as_service boolean)
  -> row (promoted int, last_run_at timestamptz, next_run_at timestamptz)""")
_RUN = _PROMOTE.select("promoted, last_run_at, extract(epoch from next_run_at - clock_timestamp())::float8")
_BATCH = 1000
# Seconds. When many jobs fall due one after another, they are moved in groups: each run costs as much as ten jobs.
_APART = 0.01
_LOCKED = 0.05
# A check behind the mark walks over everything promoted since the oldest snapshot of others. It may take this share of
# the time: every producer of a job that is due soon asks for one.
_SHARE = 0.1


class Promoter(Service):
    """Runs when the next job is due, when notified of an earlier one, and every few seconds behind its own mark."""

    name = "promote"

    def __init__(self, link: Link, on_work: Callable[[], object]) -> None:
        super().__init__(link, on_work)
        self.after: datetime | None = None
        """The mark: no job is scheduled before it, except for late commits; None: check all."""
        self.told = asyncio.Event()
        self._ran_at = self._behind_at = self._behind_again = -math.inf
        self._behind = False

    def at_latest_in(self, seconds: float, *, behind: bool = False) -> None:
        """Run in this many seconds, when a job falls due. behind: it may lie before the mark, by a late commit."""
        self._behind = self._behind or behind
        when = max(asyncio.get_running_loop().time() + max(0.0, seconds), self._ran_at + _APART)
        if when < self.run_at:
            self.run_at = when
            self.told.set()

    def looked(self, next_in: float | None, passed: datetime | None, *, behind: bool) -> None:
        """Note the result of the check of all services. behind: the check covered times behind the mark."""
        if behind:
            self._behind_at = asyncio.get_running_loop().time()
        if next_in is not None:
            self.at_latest_in(next_in, behind=behind and next_in <= 0)
        if passed is not None and (self.after is None or passed > self.after):
            self.after = passed

    async def look(self) -> int:
        """Run once, even beside other workers; return how many were promoted."""
        if asyncio.get_running_loop().time() - self._behind_at > self.every:
            self._behind, self._behind_again = True, -math.inf
        promoted, _ = await self._run()
        if promoted is None:
            promoted, _ = await self._run(as_service=False)
        return promoted or 0

    async def _run(self, *, as_service: bool = True) -> tuple[int | None, float | None]:
        clock = asyncio.get_running_loop().time
        self._ran_at = clock()
        behind = self.after is None or (self._behind and self._ran_at >= self._behind_again)
        if behind:
            self._behind = False  # requests during the run are for the next run
        after = None if behind else self.after
        promoted, last, next_in = await self._row(_RUN, _BATCH, after, as_service)
        if promoted is None:
            self._behind = self._behind or behind
            return None, next_in
        if behind:
            self._behind_at = self._ran_at
            self._behind_again = clock() + (clock() - self._ran_at) * (1 / _SHARE - 1)
        self.after = last or self.after
        if promoted:
            self._on_work()
        return promoted, next_in

    async def serve(self) -> float | None:
        promoted, next_in = await self._run()
        if promoted == _BATCH:
            return 0.0
        again = math.inf if next_in is None else max(next_in, _APART)
        if next_in is not None and next_in <= 0 and not promoted:  # another worker is promoting, or the job is locked
            again = _LOCKED * random.uniform(0.5, 1.0)
        if self._behind:
            again = min(again, max(_APART, self._behind_again - asyncio.get_running_loop().time()))
        return again if again < math.inf else None
