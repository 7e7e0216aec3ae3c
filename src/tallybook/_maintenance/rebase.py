"""Rebase: after a move to another cluster the lanes get new cursors, automatically.

See https://github.com/tallybook/tallybook/blob/main/docs/moving.md.

A worker checks on each new connection, before it claims anything there, and every few seconds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection, Connection, InvalidSchemaName, UndefinedFunction
from tallybook._maintenance.service import REFUSED, Service

log = logging.getLogger("tallybook.worker")

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
