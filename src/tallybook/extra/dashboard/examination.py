"""The doctor beside the pages: one look at a time for all viewers, in a thread and on a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

from tallybook._db import doctor
from tallybook._db.driver import Error, connect
from tallybook._db.link import CONNECT, dsn_for_people
from tallybook._model.finding import Finding
from tallybook.errors import TallybookError

_WAIT = 0.02
"""So long a page waits for the doctor, in seconds; what it has found by then is shown, and the page asks for the rest."""
_PATIENCE = timedelta(seconds=2)
"""So long each group of its checks may take: none is given up much later than the page that asked for it."""
_GOOD, _LAST_GOOD = 10.0, 60.0
"""So long what it has found is shown to everybody who asks, in seconds; and so long by the overview."""


class Examination:
    """The doctor in a thread of its own, one at a time for all viewers: a page does not wait for a check that takes long."""

    def __init__(self, conninfo: Callable[[], str]) -> None:
        self._conninfo = conninfo
        self._looking: asyncio.Task[None] | None = None
        self._found: list[Finding] = []
        self._whole: list[Finding] = []
        self._ended = float("-inf")
        self.runs = 0
        """How often it has looked."""

    async def look(self, wait: float = _WAIT) -> tuple[list[Finding], bool]:
        """What it finds, at most 10 s old, and whether that is all; after `wait` seconds what there is by then."""
        looking = self._look(_GOOD)
        await asyncio.wait((looking,), timeout=wait)
        return list(self._found), looking.done()

    def last(self) -> list[Finding]:
        """What its last look has found, at most a minute old where somebody asks all the time; none before the first."""
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
            advice = "See whether the server is up and has a connection to spare."
            self._found.append(Finding(name="connection", level="problem", finding=text, advice=advice))
        finally:
            self._whole, self._ended = list(self._found), time.monotonic()
