"""The nodes for an app's own verbs: those on schedules use the home, those on a job the node of its id."""

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psycopg

from tallybook._db.declared import Call, T
from tallybook._db.link import CONNECT
from tallybook._db.nodes import VARIABLE, Node, at, node_of, nodes, number, numbered, of_job, written
from tallybook._db.policy import first_line
from tallybook._db.source import Source
from tallybook._model.at_node import at_node
from tallybook._model.job_info import JobDone
from tallybook.errors import CommitUnknown, QueueUnavailable, TallybookError, UnknownJob

_HOME: Call[str | None] = Call(
    "home", "select (select n.address from tallybook.nodes as n where n.home)", {}, lambda address: address
)


class At(Source):
    """A node, for every caller: also for a handler, whose own calls otherwise use the node of its job."""

    def conninfo(self, dsn: str | None = None) -> str:
        return super().conninfo(dsn or self.dsn)


def listing(app: Source) -> Source:
    """Return the source for the list of nodes. It is the app's own database, also in a handler on another node."""
    node = at_node.get()
    return At(app.name, node.list_dsn) if node is not None and node.list_dsn else app


def _lists_elsewhere(app: Source) -> bool:
    """Return whether the list of nodes can be read without the app's own database."""
    return bool(os.environ.get(VARIABLE)) or listing(app) is not app


async def _on(source: Source, call: Call[T], *, sync: bool) -> T:
    return source._run_sync(call) if sync else await source._run(call)


async def _aside(look: Callable[..., T], *args: Any, sync: bool) -> T:
    return look(*args) if sync else await asyncio.to_thread(look, *args)


class AtHome(Source):
    """The home node, which has an app's schedules; with its own connection unless it is the app's database."""

    def __init__(self, app: Source) -> None:
        super().__init__(app.name, app.dsn)
        self._app = app

    async def _once(self, call: Call[Any], *, sync: bool) -> Any:
        home = listing(self._app)
        if os.environ.get(VARIABLE):
            home = At(self.name, written("")[0].dsn)
        elif address := await _on(home, _HOME, sync=sync):
            home = At(self.name, at(home.conninfo(), address))
        return await _on(home, call, sync=sync)


class AtJob(Source):
    """The node of one job: if the app's own database does not know it, the node that the id names is asked.

    The same if that database does not answer, but the list of nodes is elsewhere.
    """

    def __init__(self, app: Source, job_id: int, no_job: Callable[[Any], bool] | None = None) -> None:
        """`no_job` recognizes the answer for an unknown job if it is not UnknownJob."""
        super().__init__(app.name, app.dsn)
        self._at, self._job_id, self._looked, self._no_job = app, job_id, False, no_job

    async def _once(self, call: Call[Any], *, sync: bool) -> Any:
        try:
            found = await _on(self._at, call, sync=sync)
        except UnknownJob:
            if not await _aside(self._leads_on, sync=sync):
                raise
        except QueueUnavailable:
            if not _lists_elsewhere(self._at) or not await _aside(self._may_lead_on, sync=sync):
                raise
        else:
            if self._no_job is None or not self._no_job(found) or not await _aside(self._may_lead_on, sync=sync):
                return found
        return await _on(self._at, call, sync=sync)

    def _may_lead_on(self) -> bool:
        """Return `_leads_on`, or False for an id without a node."""
        try:
            return self._leads_on()
        except UnknownJob:
            return False

    def _leads_on(self) -> bool:
        """Whether another node than the app's own database has the job; if so, that node is used from now on."""
        node = None if self._looked else elsewhere(self._at.conninfo(), self._job_id, listing(self._at).conninfo())
        self._looked = True
        if node is not None:
            self._at = At(self.name, node.dsn)
        return node is not None


class AtJobs(Source):
    """The nodes of many jobs: unknown jobs of the app's own database are looked up on their nodes, one after the other.

    The jobs of a node that does not answer or fails are refused, with its name.
    """

    def __init__(self, app: Source, ids: list[int], verb: Callable[[Iterable[int]], Call[list[JobDone]]]) -> None:
        """`verb` makes the call for the jobs of one node."""
        super().__init__(app.name, app.dsn)
        self._app, self._ids, self._verb = app, ids, verb

    async def _once(self, call: Call[Any], *, sync: bool) -> Any:
        nowhere: list[JobDone] = []
        try:
            done = await _on(self._app, call, sync=sync)
        except QueueUnavailable as error:
            if not _lists_elsewhere(self._app):
                raise
            by_node, _ = await _aside(self._elsewhere, self._ids, sync=sync)
            if not by_node:
                raise
            done = [JobDone(job, "refused", error.reason) for job in self._ids]
        else:
            unknown = [one.job for one in done if one.done == "unknown"]
            by_node, nowhere = await _aside(self._elsewhere, unknown, sync=sync)
        for node, ids in by_node:
            try:
                done += await _on(At(self.name, node.dsn), self._verb(ids), sync=sync)
            except QueueUnavailable as error:
                reason = f"node {node.name} does not answer: {error.reason}"
                done += [JobDone(job, "refused", reason) for job in ids]
            except CommitUnknown:  # they may have changed
                raise
            except (TallybookError, psycopg.Error) as error:
                done += [JobDone(job, "refused", f"node {node.name}: {first_line(error)}") for job in ids]
        found = {one.job: one for one in [*done, *nowhere]}  # the last result for each job
        return [found[job] for job in sorted(found)]

    def _elsewhere(self, unknown: list[int]) -> tuple[list[tuple[Node, list[int]]], list[JobDone]]:
        """Return the nodes of the jobs still unknown, with their ids; and the results for ids without a node."""
        own = _number(self._app.conninfo()) if unknown else None
        unknown = [job for job in unknown if node_of(job) != own]
        known = numbered(nodes(listing(self._app).conninfo())) if unknown else ()
        by_node: dict[str, tuple[Node, list[int]]] = {}
        nowhere: list[JobDone] = []
        for job in unknown:
            try:
                node = of_job(known, job)
            except UnknownJob as error:
                nowhere.append(JobDone(job, "unknown", str(error)))
            else:
                by_node.setdefault(node.name, (node, []))[1].append(job)
        return list(by_node.values()), nowhere


def _number(dsn: str) -> int | None:
    """Return the number of the database itself; None if it has none or does not answer."""
    with suppress(psycopg.OperationalError), psycopg.connect(dsn, **CONNECT) as conn:
        return number(conn)
    return None


def elsewhere(dsn: str, job_id: int, list_dsn: str) -> Node | None:
    """Return the node of a job unknown to the database at `dsn`, or None if its id is of that database. UnknownJob."""
    return None if _number(dsn) == node_of(job_id) else of_job(numbered(nodes(list_dsn)), job_id)


def unknown(dsn: str, job_id: int) -> UnknownJob:
    """Return the error for a job unknown to the database at `dsn`, with the node that has it, if any."""
    try:
        node = elsewhere(dsn, job_id, dsn)
    except UnknownJob as error:
        return error
    if node is None:
        return UnknownJob(job_id)
    return UnknownJob(job_id, hint=f"Its id is of node {node.name!r}: pass --dsn of that node, or --nodes {node.name}")
