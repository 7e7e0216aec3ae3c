"""The doctor of an App; a mixin of App like _operations."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tallybook._model.finding import Finding

__all__ = ["Doctor"]


class Doctor:
    """Mixed into App."""

    if TYPE_CHECKING:

        def conninfo(self, dsn: str | None = None) -> str:
            """Of Source."""

    async def doctor(self, *, dsn: str | None = None, verify: bool = False) -> list[Finding]:
        """Look at the database and say, check by check, what was found and what to do; on a connection of its own.

        `verify` recounts the counters whatever the size of the history, which can take minutes. QueueUnavailable: no server.

            wrong = [found for found in await app.doctor() if not found.good]
        """
        return await asyncio.to_thread(self.doctor_sync, dsn=dsn, verify=verify)

    def doctor_sync(self, *, dsn: str | None = None, verify: bool = False) -> list[Finding]:
        """Look at the database and say what was found and what to do; doctor without an event loop."""
        from tallybook._db import doctor

        return doctor.doctor(self.conninfo(dsn), verify=verify)
