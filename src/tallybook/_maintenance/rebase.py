"""Rebase: after a move to another cluster the lanes get new cursors, by themselves.

See https://github.com/tallybook/tallybook/blob/main/docs/moving.md.

Looked for at each new connection of a worker, before it claims anything on it, and every few seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection, Connection, InvalidSchemaName, UndefinedFunction
from tallybook._db.link import Link
from tallybook._maintenance.service import REFUSED, Service

log = logging.getLogger("tallybook.worker")

# cursors: data that came without the row in installation shows only in a cursor that is ahead of the cluster.
_REBASE = Declared("""
  rebase(cursors boolean, as_service boolean)
  -> row (rebased boolean, lanes moved lost cancelled scheduled waiting dead workers late int)""")


@dataclass(frozen=True)
class Rebased:
    rebased: bool
    """Whether this look rebased the lanes: the database had come from another cluster."""
    lanes: int
    moved: int
    """Attempts that nobody had claimed, in line again."""
    lost: int
    """Attempts that a worker of the other cluster had claimed, in line again."""
    cancelled: int
    scheduled: int
    waiting: int
    dead: int
    workers: int
    """Workers of the other cluster that were taken off record."""
    late: int
    """Jobs that transactions older than the rebase have put into a retired lane since, brought over."""

    def __str__(self) -> str:
        return (
            f"this database came from another cluster: {self.lanes} lanes rebased, {self.moved + self.lost} jobs put in"
            f" line again ({self.lost} of them had been running there), {self.cancelled} ended as cancelled,"
            f" {self.scheduled} scheduled, {self.waiting} waiting and {self.dead} dead kept,"
            f" {self.workers} workers taken off record"
        )

    def told(self) -> None:
        if self.rebased:
            log.warning("%s", self, extra={"event": "rebased"})
        elif self.late:
            log.info("moved %s jobs of transactions older than the move", self.late, extra={"event": "rebased"})


async def on_connect(conn: AsyncConnection) -> None:
    """Look on a new connection, before anything else is done on it."""
    try:
        row = await (await conn.execute(_REBASE.worker, (True, False))).fetchone()
    except (InvalidSchemaName, UndefinedFunction):
        return  # no schema, or an older one: the check of the schema has better words for that
    assert row is not None
    Rebased(*row).told()


def rebase(conn: Connection) -> Rebased:
    """The same on a connection of a thread, or of a command; the schema must be there."""
    row = conn.execute(_REBASE.worker, (True, False)).fetchone()
    assert row is not None
    found = Rebased(*row)
    found.told()
    return found


class Rebaser(Service):
    """Looks every few seconds: a database can be replaced under a connection, and late transactions commit."""

    name = "rebase"

    def __init__(self, link: Link, *, on_rebased: Callable[[], None]) -> None:
        super().__init__(link)
        self._on_rebased = on_rebased

    async def look(self, *, cursors: bool = False) -> Rebased:
        """One run, whoever else runs it. cursors: after TB004."""
        return self._told(Rebased(*await self._row(_REBASE.worker, cursors, False)))

    async def foreign_cursor(self) -> bool:
        """A claim was refused by TB004, for the database was replaced or its data came without the row in installation:
        whether this has rebased it."""
        return (await self.look(cursors=True)).rebased

    def _told(self, found: Rebased) -> Rebased:
        found.told()
        if found.rebased or found.late:
            self._on_rebased()
        return found

    async def serve(self) -> str | None:
        row = await self._row(_REBASE.worker, False, True)
        if row[0] is None:
            return REFUSED
        self._told(Rebased(*row))
        return None
