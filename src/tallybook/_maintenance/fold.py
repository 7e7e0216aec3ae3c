"""What is kept small: the counters take in what has changed (fold), and history past its retention goes (prune)."""

from __future__ import annotations

import random

from tallybook._db.declared import Declared
from tallybook._maintenance.service import REFUSED, Service

FOLD = Declared("fold(as_service boolean) -> bigint")
_PRUNE = Declared("prune(as_service boolean) -> row (effect bigint, again boolean)", as_service="true")
# A piece takes some ten milliseconds: the other services of this worker have their turn between two.
_PIECE = 0.05


class Folder(Service):
    """Runs about once a second while anything changes; readers add what it has not taken in yet, so nothing waits for it."""

    name = "fold"

    async def serve(self) -> str | float | None:
        (found,) = await self._row(FOLD.worker, True)
        # Refused: somebody else has just folded. Who has nothing to do waits for the next look.
        return None if found == 0 else random.uniform(0.9, 1.3)


class Pruner(Service):
    """One piece a run, the next one soon, while there is more to do.

    See https://github.com/tallybook/tallybook/blob/main/docs/history.md.
    """

    name = "prune"
    every = 60.0

    async def serve(self) -> str | float | None:
        effect, again = await self._row(_PRUNE.worker)
        if effect is None:
            return REFUSED
        return _PIECE * random.uniform(0.75, 1.25) if again else None
