"""Rebase: after a move to another cluster the lanes get new cursors, by themselves; see docs/moving.md.

Looked for at each new connection of a worker, before it claims anything on it, and every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.errors import InvalidSchemaName, UndefinedFunction

from tallybook._db.link import Link

log = logging.getLogger("tallybook.worker")

# cursors: data that came without the row in installation shows only in a cursor that is ahead of the cluster.
_LOOK = (
    "select rebased, lanes, moved, lost, cancelled, scheduled, waiting, dead, workers, late"
    " from tallybook.rebase(cursors => %s::boolean)"
)
_PAUSE = 5.0


@dataclass(frozen=True)
class Rebased:
    """What one look found and did."""

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
        """One line in the log where something was done."""
        if self.rebased:
            log.warning("%s", self, extra={"event": "rebased"})
        elif self.late:
            log.info("%s jobs of transactions older than the move brought over", self.late, extra={"event": "rebased"})


async def on_connect(conn: psycopg.AsyncConnection[Any]) -> None:
    """Look on a new connection, before anything else is done on it."""
    try:
        row = await (await conn.execute(_LOOK, (True,))).fetchone()
    except (InvalidSchemaName, UndefinedFunction):
        return  # no schema, or an older one: the check of the schema has better words for that
    assert row is not None
    Rebased(*row).told()


def rebase(conn: psycopg.Connection[Any]) -> Rebased:
    """The same on a connection of a thread, or of a command; the schema must be there."""
    row = conn.execute(_LOOK, (True,)).fetchone()
    assert row is not None
    found = Rebased(*row)
    found.told()
    return found


class Rebaser:
    """Looks every few seconds: a database can be replaced under a connection, and late transactions commit."""

    def __init__(self, link: Link, *, on_rebased: Callable[[], None]) -> None:
        self._link = link
        self._on_rebased = on_rebased

    async def look(self, *, cursors: bool = False) -> Rebased:
        """One call. cursors: after TB004."""

        async def call(conn: psycopg.AsyncConnection[Any]) -> Any:
            return await (await conn.execute(_LOOK, (cursors,))).fetchone()

        found = Rebased(*await self._link.run(call))
        found.told()
        if found.rebased or found.late:
            self._on_rebased()
        return found

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(_PAUSE * random.uniform(0.75, 1.0))
            await self.look()
