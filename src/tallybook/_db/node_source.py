"""Where an app's own verbs go if it has several nodes: those on schedules to the home, those on a job to the node of its id."""

from __future__ import annotations

import asyncio
import os
from typing import TypeVar

import psycopg

from tallybook._db.declared import Call
from tallybook._db.link import CONNECT
from tallybook._db.nodes import INSTALLED, VARIABLE, Node, at, node_of, nodes, numbered, of_job, written
from tallybook._db.source import Source
from tallybook.errors import UnknownJob

T = TypeVar("T")

_HOME: Call[str | None] = Call(
    "home", "select (select n.address from tallybook.nodes as n where n.home)", {}, lambda address: address
)


class AtHome(Source):
    """Where an app's schedules are: the home node, by a connection of its own unless that is the app's database."""

    def __init__(self, app: Source) -> None:
        super().__init__(app.name, app.dsn)
        self._app = app

    async def _run(self, call: Call[T]) -> T:
        address = None if os.environ.get(VARIABLE) else await self._app._run(_HOME)
        return await self._home(address)._run(call)

    def _run_sync(self, call: Call[T]) -> T:
        address = None if os.environ.get(VARIABLE) else self._app._run_sync(_HOME)
        return self._home(address)._run_sync(call)

    def _home(self, address: str | None) -> Source:
        if os.environ.get(VARIABLE):
            return Source(self.name, written("")[0].dsn)
        return Source(self.name, at(self._app.conninfo(), address)) if address else self._app


class AtJob(Source):
    """Where a job is: what an app's own database does not know is asked of the node that the id names."""

    def __init__(self, app: Source, job_id: int) -> None:
        super().__init__(app.name, app.dsn)
        self._at, self._job_id, self._looked = app, job_id, False

    async def _run(self, call: Call[T]) -> T:
        try:
            return await self._at._run(call)
        except UnknownJob:
            if not await asyncio.to_thread(self._leads_on):
                raise
        return await self._at._run(call)

    def _run_sync(self, call: Call[T]) -> T:
        try:
            return self._at._run_sync(call)
        except UnknownJob:
            if not self._leads_on():
                raise
        return self._at._run_sync(call)

    def _leads_on(self) -> bool:
        """Whether another node than the app's own database has the job; from then on that one is asked."""
        node = None if self._looked else elsewhere(self._at.conninfo(), self._job_id)
        self._looked = True
        if node is not None:
            self._at = Source(self.name, node.dsn)
        return node is not None


def elsewhere(dsn: str, job_id: int) -> Node | None:
    """The node of a job that the database at `dsn` does not know; None: its id is of that very database. UnknownJob."""
    with psycopg.connect(dsn, **CONNECT) as conn:
        if conn.execute(INSTALLED).fetchone() == (node_of(job_id),):
            return None
    return of_job(numbered(nodes(dsn)), job_id)


def unknown(dsn: str, job_id: int) -> UnknownJob:
    """The error for a job that the database at `dsn` does not know, with the node that has it, if there is one."""
    try:
        node = elsewhere(dsn, job_id)
    except UnknownJob as error:
        return error
    if node is None:
        return UnknownJob(job_id)
    return UnknownJob(job_id, hint=f"Its id is of node {node.name!r}: say --dsn of that node, or --nodes {node.name}")
