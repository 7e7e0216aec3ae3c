"""The doctor for the pages: one run at a time for all viewers, in its own thread and on its own connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

from tallybook._db import doctor
from tallybook._db.driver import Error, connect
from tallybook._db.link import CONNECT, dsn_for_people
from tallybook._model.history import Finding
from tallybook.errors import TallybookError

_WAIT = 0.02
"""The seconds that a page waits for the doctor. The page shows the findings so far and requests the rest later."""
_PATIENCE = timedelta(seconds=2)
"""The time limit of each group of checks, close to that of a page."""
_GOOD, _LAST_GOOD = 10.0, 60.0
"""The seconds for which findings are reused, in general and by the overview."""


class Examination:
    """The doctor in its own thread, one run at a time for all viewers. No page waits for a slow check."""

    def __init__(self, conninfo: Callable[[], str]) -> None:
        self._conninfo = conninfo
        self._looking: asyncio.Task[None] | None = None
        self._found: list[Finding] = []
        self._whole: list[Finding] = []
        self._ended = float("-inf")
        self.runs = 0
        """The number of runs."""

    async def look(self, wait: float = _WAIT) -> tuple[list[Finding], bool]:
        """Return the findings, at most 10 s old, and whether they are complete, after at most `wait` seconds."""
        looking = self._look(_GOOD)
        await asyncio.wait((looking,), timeout=wait)
        return list(self._found), looking.done()

    def last(self) -> list[Finding]:
        """Return the findings of the last run, none before the first. Starts a new run if it is older than a minute."""
        self._look(_LAST_GOOD)
        return self._whole

    def _look(self, good: float) -> asyncio.Task[None]:
        looking = self._looking
        if looking is None or (looking.done() and time.monotonic() - self._ended >= good):
            self._found = []
            self.runs += 1
            looking = self._looking = asyncio.create_task(asyncio.to_thread(self._run), name="tallybook doctor")
        return looking

    def _run(self) -> None:
        try:
            with connect(self._conninfo(), **CONNECT, application_name="tallybook web doctor") as conn:
                conn.prepare_threshold = None
                for one in doctor.examine(conn, patience=_PATIENCE):
                    self._found.append(one)
        except (Error, TallybookError, OSError) as error:
            where = ""
            with contextlib.suppress(TallybookError):
                where = f" {dsn_for_people(self._conninfo())}"
            text = f"the doctor has no connection to the database{where}: {type(error).__name__}"
            advice = "Check whether the server is up and has a free connection."
            self._found.append(Finding(name="connection", level="problem", finding=text, advice=advice))
        finally:
            self._whole, self._ended = list(self._found), time.monotonic()
