"""Prune: history that is past its retention goes, piece by piece; see docs/history.md."""

from __future__ import annotations

import random
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link
from tallybook._maintenance.service import REFUSED, Service

_PRUNE = Declared("prune(as_service boolean) -> row (effect bigint, again boolean)", as_service="true")
# A piece takes some ten milliseconds: the other services of this worker have their turn between two.
_PIECE = 0.05


class Pruner(Service):
    """One piece a run; the next one soon, while there is more to do."""

    name = "prune"
    every = 60.0

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    async def serve(self) -> str | float | None:
        """One claimed run."""

        async def call(conn: AsyncConnection) -> Any:
            return await (await conn.execute(_PRUNE.worker)).fetchone()

        effect, again = await self._link.run(call)
        if effect is None:
            return REFUSED
        return _PIECE * random.uniform(0.75, 1.25) if again else None
