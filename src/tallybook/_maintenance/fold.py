"""Services that keep tables small: fold adds changes to the counters, prune deletes history past its retention."""

import random

from tallybook._db.declared import Declared
from tallybook._maintenance.service import REFUSED, Service

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
    """Deletes one piece per run, and the next one soon after while there is more.

    See https://github.com/tallybook/tallybook/blob/main/docs/history.md.
    """

    name = "prune"
    every = 60.0

    async def serve(self) -> str | float | None:
        effect, again = await self._row(_PRUNE.worker)
        if effect is None:
            return REFUSED
        return _PIECE * random.uniform(0.75, 1.25) if again else None
