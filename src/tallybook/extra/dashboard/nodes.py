"""The databases that a dashboard or an operator API is about: one, or one for each node of the app.

A node that does not answer is remembered as away: pages say so at once, and it is asked again beside them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from tallybook._db import nodes as finding
from tallybook._db.driver import Error
from tallybook._db.nodes import Node, named, of_job
from tallybook._db.policy import first_line
from tallybook._db.source import Source
from tallybook.errors import ConfigError, QueueUnavailable
from tallybook.extra.dashboard.database import Conn, Database

T = TypeVar("T")

ANSWER = 2.0
"""Seconds that a node has for its answer, and between two looks at one that is away."""
_GOOD = 30.0
"""Seconds for which the list of nodes is good."""
_NO_ANSWER = f"no answer within {ANSWER:g} s"


@dataclass(slots=True)
class At:
    """A node and its connections."""

    node: Node
    database: Database
    away: str | None = None
    """Why it does not answer; None: it does, as far as is known."""
    looked_at: float = 0.0

    @property
    def name(self) -> str:
        return self.node.name


@dataclass(frozen=True, slots=True)
class Said(Generic[T]):
    """What one node has answered, or why it has not."""

    name: str
    value: T | None
    error: str | None = None


class Nodes:
    """All of them. Without `which` there is one, without a name, and its errors are raised as they are."""

    def __init__(
        self,
        app: Source,
        *,
        dsn: str | None = None,
        read_dsn: str | None = None,
        which: str | None = None,
        max_size: int = 4,
    ) -> None:
        """ConfigError for a standby beside several nodes."""
        if read_dsn is not None and which is not None:
            reason = "is a standby of one database, not of several nodes"
            raise ConfigError("read_dsn", "(not shown)", reason, hint="Give one of the two")
        self.many = which is not None
        self.first = Database(app, dsn=dsn, read_dsn=read_dsn, max_size=max_size)
        """The database of the DSN: the only one, or where the nodes are written down."""
        self._app, self._which, self._max_size = app, which or "all", max_size
        self._at: dict[str, At] = {}
        self._read_at = float("-inf")
        self._beside: set[asyncio.Task[None]] = set()

    @property
    def read(self) -> list[At]:
        """The nodes, as far as they have been read; none where there is one database."""
        return list(self._at.values())

    async def known(self) -> list[At]:
        """The nodes, read anew now and then: the first time before the answer, later beside it."""
        if not self.many:
            return [At(Node("", None, self.first.conninfo, home=True), self.first)]
        if not self._at:
            await self._read()
        elif time.monotonic() - self._read_at > _GOOD:
            self._read_at = time.monotonic()
            self._start(self._read())
        return list(self._at.values())

    async def _read(self) -> None:
        def found() -> tuple[Node, ...]:
            return finding.numbered(finding.nodes(self.first.conninfo, self._which))

        try:
            listed = await asyncio.to_thread(found)
        except QueueUnavailable:
            if not self._at:
                raise
            return
        before, self._at = self._at, {}
        for node in listed:
            old = before.pop(node.name, None)
            if old is not None and old.node.dsn == node.dsn:
                old.node = node if node.number is not None else replace(node, number=old.node.number)
            else:
                database = Database(self._app, dsn=node.dsn, max_size=self._max_size, wait=ANSWER, answer=ANSWER)
                old = At(node, database)
            self._at[node.name] = old
        self._read_at = time.monotonic()
        for gone in before.values():
            await gone.database.close()

    async def named(self, name: str) -> At:
        """The node of this name, the home without one. UnknownNode."""
        found = {at.name: at for at in await self.known()}
        return found[named([at.node for at in found.values()], name or "home").name]

    async def of_job(self, job: int) -> At:
        """The node of a job, by its id. UnknownNode where there is none of its number."""
        found = await self.known()
        if not self.many:
            return found[0]
        node = of_job([at.node for at in found], job)
        return next(at for at in found if at.node is node)

    async def ask(self, question: Callable[[Conn, str], Awaitable[T]], only: str = "") -> list[Said[T]]:
        """Put a question, with the name of the node, to all nodes side by side, or to one; the answers in their order.

        A node that does not answer has an error instead of a value. What Tallybook refuses is raised.
        """
        return await asyncio.gather(*(self.ask_one(at, question) for at in await self.chosen(only)))

    async def answered(
        self, question: Callable[[Conn, str], Awaitable[T]], only: str = ""
    ) -> tuple[dict[str, T], list[Said[T]]]:
        """What the nodes answer, by name, and those that do not. QueueUnavailable where none answers."""
        said = await self.ask(question, only)
        away = [one for one in said if one.error is not None]
        if len(away) == len(said):
            raise QueueUnavailable(f"node {said[0].name}", said[0].error or "")
        return {one.name: cast(T, one.value) for one in said if one.error is None}, away

    async def chosen(self, only: str = "") -> list[At]:
        """All nodes, or the one of this name. UnknownNode."""
        return [await self.named(only)] if only else await self.known()

    async def ask_one(self, at: At, question: Callable[[Conn, str], Awaitable[T]]) -> Said[T]:
        """The same of one node."""

        async def read() -> T:
            async with at.database.read() as conn:
                return await question(conn, at.name)

        return await self.tried(at, read)

    async def tried(self, at: At, what: Callable[[], Awaitable[T]]) -> Said[T]:
        """What it returns, in time; one database is neither hurried nor remembered as away."""
        if not self.many:
            return Said(at.name, await what())
        if not self.answers(at):
            return Said(at.name, None, at.away)
        try:
            async with asyncio.timeout(ANSWER):
                return Said(at.name, await what())
        except (QueueUnavailable, TimeoutError) as error:
            self.lost(at, error)
            return Said(at.name, None, at.away)
        except Error as error:
            return Said(at.name, None, first_line(error))

    def answers(self, at: At) -> bool:
        """Whether it may be asked; one that is away is looked at beside it, from time to time."""
        if at.away is not None and time.monotonic() - at.looked_at > ANSWER:
            at.looked_at = time.monotonic()
            self._start(self._look_again(at))
        return at.away is None

    def lost(self, at: At, error: Exception) -> None:
        """Remember that a node is away."""
        reason = error.reason if isinstance(error, QueueUnavailable) else None  # it is named beside it
        at.away = _NO_ANSWER if isinstance(error, TimeoutError) else reason or first_line(error)
        at.looked_at = time.monotonic()

    async def _look_again(self, at: At) -> None:
        await at.database.close()  # its pool would try again later and later
        try:
            async with asyncio.timeout(ANSWER), at.database.read() as conn:
                await conn.execute("select 1")
        except (QueueUnavailable, TimeoutError, Error) as error:
            self.lost(at, error)
        else:
            at.away = None

    def _start(self, what: Awaitable[None]) -> None:
        task = asyncio.ensure_future(what)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def close(self) -> None:
        """Close all connections."""
        for task in list(self._beside):
            task.cancel()
        for database in (self.first, *(at.database for at in self._at.values())):
            await database.close()
