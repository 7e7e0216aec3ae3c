"""The services that move jobs and keep tables small, and the one that follows a move to another cluster.

promote moves due jobs from scheduled to their lanes, rescue returns the jobs of dead workers to their queues, fold adds
changes to the counters, and prune deletes history past its retention:
see https://github.com/tallybook/tallybook/blob/main/docs/history.md.

rebase gives the lanes new cursors after a move to another cluster, automatically. A worker also checks for that on each
new connection, before it claims anything there: see https://github.com/tallybook/tallybook/blob/main/docs/moving.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection, Connection, InvalidSchemaName, UndefinedFunction
from tallybook._db.link import Link
from tallybook._maintenance.service import REFUSED, Service

log = logging.getLogger("tallybook.worker")

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
        self.after: datetime | None = None  # the mark: no job is scheduled before it, but by late commits; None: all
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


_RESCUE = Declared("rescue(grace interval, as_service boolean) -> row (lost int, suspects int)")
_GRACE = timedelta(seconds=1)
_AFTER_GRACE = 1.05
# Every check covers each worker. So the total work grows only linearly with the number of workers if each checks
# less often the more there are. Together they check twice a second, until `every` is reached.
_CHECKS = 0.5
_SOONEST = 1.0


class Rescuer(Service):
    """Runs when a worker seems dead, and again after the grace; checks more often when there are few workers."""

    name = "rescue"

    def __init__(self, link: Link, on_work: Callable[[], object], *, lease: timedelta, every: timedelta | None) -> None:
        super().__init__(link, on_work)
        self._lease = lease
        self._own = every
        self._conn: object = None
        self._since = -math.inf

    def pause(self, workers: int) -> float:
        """Return the seconds to the next check, see _CHECKS."""
        every = self.every if self._own is None else self._own.total_seconds()
        return min(every, max(_SOONEST, _CHECKS * workers)) * random.uniform(0.5, 1.0)

    def asks(self, now: float) -> bool:
        """Return False while the grace of a suspect runs: an earlier run would only postpone the next one."""
        return self.run_at == math.inf and super().asks(now)

    def connected_by(self, conn: object) -> None:
        """Note the connection of a check. After an outage, others reconnect later: a missing session proves nothing."""
        if conn is not self._conn:
            self._since = -math.inf if self._conn is None else time.monotonic()
            self._conn = conn

    async def look(self) -> None:
        """Run once, even beside other workers."""
        lost, _ = await self._run()
        if lost is None:
            await self._run(as_service=False)

    async def _run(self, *, as_service: bool = True) -> tuple[int | None, int | None]:
        async def call(conn: AsyncConnection) -> Any:
            self.connected_by(conn)
            settled = time.monotonic() - self._since > self._lease.total_seconds()
            grace = _GRACE if settled else self._lease
            return await (await conn.execute(_RESCUE.worker, (grace, as_service))).fetchone()

        lost, suspects = await self._link.run(call)
        if lost:
            log.warning("returned %s jobs of dead workers to their queues", lost)
            self._on_work()
        return lost, suspects

    async def serve(self) -> str | float | None:
        """Claim one run; run again after the grace if there are suspects."""
        lost, suspects = await self._run()
        if lost is None:
            return REFUSED
        if not suspects:
            return None
        # That run also sees workers that have died meanwhile: no check is needed before it.
        self.look_at = max(self.look_at, asyncio.get_running_loop().time() + _AFTER_GRACE + _CHECKS)
        return _AFTER_GRACE


FOLD = Declared("fold(as_service boolean) -> bigint")
_PRUNE = Declared("prune(as_service boolean) -> row (effect bigint, again boolean)", as_service="true")
# Seconds between two pieces. A piece takes some ten milliseconds, and the other services of this worker run in between.
_PIECE = 0.05


class Folder(Service):
    """Runs about once a second while anything changes. Readers add unfolded changes, so nothing waits."""

    name = "fold"

    async def serve(self) -> str | float | None:
        (found,) = await self._row(FOLD.worker, True)
        # Refused: another worker has just folded. With nothing to fold, wait for the next check.
        return None if found == 0 else random.uniform(0.9, 1.3)


class Pruner(Service):
    """Deletes one piece per run, and the next one soon after while there is more."""

    name = "prune"
    every = 60.0

    async def serve(self) -> str | float | None:
        effect, again = await self._row(_PRUNE.worker)
        if effect is None:
            return REFUSED
        return _PIECE * random.uniform(0.75, 1.25) if again else None


# cursors: data that came without its row in `installation` is detected only by a cursor ahead of the cluster.
_REBASE = Declared("""
  rebase(cursors boolean, as_service boolean)
  -> row (rebased boolean, lanes moved lost cancelled scheduled waiting dead workers late int)""")


@dataclass(frozen=True)
class Rebased:
    rebased: bool  # whether this check rebased the lanes: the database had come from another cluster
    lanes: int
    moved: int  # attempts that no worker had claimed; their jobs are available again
    lost: int  # attempts that a worker of the other cluster had claimed; their jobs are available again
    cancelled: int
    scheduled: int
    waiting: int
    dead: int
    workers: int  # workers of the other cluster that were marked as ended
    late: int
    """Jobs that transactions older than the rebase have written to a retired lane since; moved to the current one."""

    def __str__(self) -> str:
        return (
            f"this database came from another cluster: {self.lanes} lanes rebased, {self.moved + self.lost} jobs"
            f" available again ({self.lost} of them had been running there), {self.cancelled} ended as cancelled,"
            f" {self.scheduled} scheduled, {self.waiting} waiting and {self.dead} dead kept,"
            f" {self.workers} workers marked as ended"
        )

    def told(self) -> Rebased:
        if self.rebased:
            log.warning("%s", self, extra={"event": "rebased"})
        elif self.late:
            log.info("moved %s jobs of transactions older than the move", self.late, extra={"event": "rebased"})
        return self


async def on_connect(conn: AsyncConnection, *, cursors: bool = True) -> None:
    """Check on a new connection, before anything else is done on it."""
    try:
        row = await (await conn.execute(_REBASE.worker, (cursors, False))).fetchone()
    except (InvalidSchemaName, UndefinedFunction):
        return  # no schema, or an older one: the schema check has a better message
    assert row is not None
    Rebased(*row).told()


def rebase(conn: Connection) -> Rebased:
    """Check on a synchronous connection, for a thread or a command; the schema must exist."""
    row = conn.execute(_REBASE.worker, (True, False)).fetchone()
    assert row is not None
    return Rebased(*row).told()


class Rebaser(Service):
    """Checks every few seconds: a database can be replaced under a connection, and transactions may commit late."""

    name = "rebase"

    async def foreign_cursor(self) -> bool:
        """Rebase after a claim was refused with TB004, even beside other workers. Return whether this run did it."""
        return self._told(Rebased(*await self._row(_REBASE.worker, True, False))).rebased

    def _told(self, found: Rebased) -> Rebased:
        found.told()
        if found.rebased or found.late:
            self._on_work()
        return found

    async def serve(self) -> str | None:
        row = await self._row(_REBASE.worker, False, True)
        if row[0] is None:
            return REFUSED
        self._told(Rebased(*row))
        return None
