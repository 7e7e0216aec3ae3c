"""Maintenance: services, how long what is kept, what the doctor finds, the schema."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from starlette.responses import Response

from tallybook._db import doctor
from tallybook._db.driver import Error, connect
from tallybook._db.link import CONNECT, dsn_for_people
from tallybook._model.finding import LEVELS, Finding
from tallybook.errors import TallybookError
from tallybook.extra.dashboard.database import Database
from tallybook.extra.dashboard.pages.queues import rows
from tallybook.extra.dashboard.view import Act, Pages, View

pages = Pages()

_SCHEMA = """\
select i.version, i.works_from, i.node, i.installed_at, i.migrated_at, current_setting('server_version') as server
  from tallybook.installed as i"""
_WAIT = 0.02
"""So long a page waits for the doctor, in seconds; what it has found by then is shown, and the page asks for the rest."""
_PATIENCE = timedelta(seconds=2)
"""So long each group of its checks may take: none is given up much later than the page that asked for it."""
_GOOD = 10.0
"""So long what it has found is shown to everybody who asks, in seconds."""


class Examination:
    """The doctor in a thread of its own, one at a time for all viewers: a page does not wait for a check that takes long."""

    def __init__(self, conninfo: Callable[[], str]) -> None:
        self._conninfo = conninfo
        self._looking: asyncio.Task[None] | None = None
        self._found: list[Finding] = []
        self._ended = float("-inf")
        self.runs = 0
        """How often it has looked."""

    async def look(self, wait: float = _WAIT) -> tuple[list[Finding], bool]:
        """What it finds, at most 10 s old, and whether that is all; after `wait` seconds what there is by then."""
        looking = self._looking
        if looking is None or (looking.done() and time.monotonic() - self._ended >= _GOOD):
            self._found = []
            self.runs += 1
            looking = self._looking = asyncio.create_task(asyncio.to_thread(self._run), name="tallybook doctor")
        await asyncio.wait((looking,), timeout=wait)
        return list(self._found), looking.done()

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
            self._ended = time.monotonic()


_EXAMINATIONS: WeakKeyDictionary[Database, Examination] = WeakKeyDictionary()


def examination(database: Database) -> Examination:
    if database not in _EXAMINATIONS:
        # Not the database itself: it would never be forgotten.
        _EXAMINATIONS[database] = Examination(database.finder())
    return _EXAMINATIONS[database]


@pages.page("/maintenance")
async def maintenance(view: View) -> Response:
    """The page; the doctor looks meanwhile, on a connection of its own."""
    looking = asyncio.create_task(_findings(view))
    try:
        async with view.read() as conn:
            services = await view.app.services.list().on(conn)
            retentions = await view.app.history.list().on(conn)
            held = await view.app.history.held().on(conn)
            schema = (await rows(conn, _SCHEMA))[0]
    finally:
        found = await looking
    folded = next((one.last_run_at for one in services if one.name == "fold"), None)
    return view.render(
        "maintenance.html", services=services, retentions=retentions, held=held[:100], more_held=max(0, len(held) - 100),
        schema=schema, folded=folded, first=True, **found,
    )  # fmt: skip


@pages.page("/maintenance/findings")
async def findings(view: View) -> Response:
    """What the doctor has found by now: the page asks until that is all."""
    return view.render("maintenance_findings.html", first=False, **await _findings(view))


async def _findings(view: View) -> dict[str, Any]:
    found, complete = await examination((await view.at()).database).look()
    found = sorted(found, key=lambda one: -LEVELS.index(one.level))
    return {
        "bad": [one for one in found if not one.good or one.level == "note"],
        "good": [one for one in found if one.level == "ok"], "complete": complete,
        "roles": next((one for one in found if one.name == "roles"), None),
    }  # fmt: skip


@pages.action("/maintenance/service")
async def service(act: Act) -> str:
    name, every = act.form("name"), act.form("every")
    done = await act.app.services.set(name, every).on(act.conn)
    await act.audit("service.every", {"service": name, "every": every}, {"changed": done}, changed=done)
    return f"Service {name} is looked after every {every} now." if done else f"Service {name} was so already."


@pages.action("/maintenance/retention")
async def retention(act: Act) -> str:
    name, keep = act.form("name"), act.form("keep")
    done = await act.app.history.set(name, keep).on(act.conn)
    await act.audit("retention.set", {"retention": name, "keep": keep}, {"changed": done}, changed=done)
    return f"What is of class {name} is kept for {keep} now." if done else f"Class {name} was so already."
