"""Fold: the counters take in what has changed."""

from __future__ import annotations

import random
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link
from tallybook._maintenance.service import Service

FOLD = Declared("fold(as_service boolean) -> bigint")
_ROUND = 1.0


class Folder(Service):
    """Runs about once a second while anything changes; readers add what it has not taken in yet, so nothing waits for it."""

    name = "fold"

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    async def look(self) -> int:
        """Fold, whoever else does the same: how many sums have changed."""
        return await self._run(as_service=False) or 0

    async def _run(self, *, as_service: bool) -> int | None:
        async def call(conn: AsyncConnection) -> Any:
            return await (await conn.execute(FOLD.worker, (as_service,))).fetchone()

        (found,) = await self._link.run(call)
        return None if found is None else int(found)

    async def serve(self) -> str | float | None:
        """One fold; another one soon if it has found something."""
        found = await self._run(as_service=True)
        # Refused: somebody else has just folded. Who has nothing to do waits for the next look.
        return None if found == 0 else _ROUND * random.uniform(0.9, 1.3)
