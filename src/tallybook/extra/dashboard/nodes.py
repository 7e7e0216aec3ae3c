"""The databases of a dashboard or an operator API: one, or one for each node of the app.

A node that does not answer is marked as away. Pages then show this at once, and the node is checked in the background.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from tallybook._db import nodes as finding
from tallybook._db.driver import Error
from tallybook._db.nodes import Answer
from tallybook._db.policy import first_line
from tallybook._db.source import Source
from tallybook.errors import ConfigError, QueueUnavailable
from tallybook.extra.dashboard.database import Conn, Database

T = TypeVar("T")
Question = Callable[[Conn, str], Awaitable[T]]
"""Reads something on a connection to a node with this name."""
log = logging.getLogger("tallybook.web")

ANSWER = 2.0  # seconds that a node has for its answer, and between two checks of a node that is away
_GOOD = 30.0  # seconds for which the list of nodes is cached


@dataclass(slots=True)
class At:
    node: finding.Node
    database: Database
    away: str | None = None  # why the node does not answer; None if it does, as far as is known
    looked_at: float = 0.0

    @property
    def name(self) -> str:
        return self.node.name


def sorted_out(said: Sequence[Answer[T]]) -> tuple[dict[str, T], list[Answer[T]]]:
    """Return the answers by name of node, and the nodes without one. QueueUnavailable if no node answers."""
    away = [one for one in said if one.error is not None]
    if len(away) == len(said):
        raise QueueUnavailable(f"node {said[0].name}", said[0].error or "")
    return {one.name: cast(T, one.value) for one in said if one.error is None}, away


class Nodes:
    """All nodes. Without `which` there is one without a name, and its errors are raised unchanged."""

    def __init__(
        self, app: Source, dsn: str | None = None, read_dsn: str | None = None, which: str | None = None, most: int = 4
    ) -> None:
        """Each node gets at most `most` connections. ConfigError for a standby together with several nodes."""
        if read_dsn is not None and which is not None:
            reason = "is a standby of one database, not of several nodes"
            raise ConfigError("read_dsn", "(not shown)", reason, hint="Pass only one of the two")
        self.many = which is not None
        self.first = Database(app, dsn, most)
        """The database of the DSN: the only one, or the one that has the list of nodes."""
        if read_dsn is not None:
            self.first.reads = Database(app, read_dsn, most, is_standby=True)
        self._app, self._which, self._most = app, which or "all", most
        self._at: dict[str, At] = {}
        self._read_at = float("-inf")
        self._beside: set[asyncio.Future[Any]] = set()

    @property
    def read(self) -> list[At]:
        """The nodes that have been read; none if there is one database."""
        return list(self._at.values())

    async def known(self) -> list[At]:
        """Return the nodes. The first call reads them; later calls refresh them in the background after 30 s."""
        if not self.many:
            return [At(finding.Node("", None, self.first.conninfo, home=True), self.first)]
        if not self._at:
            await self._read()
        elif time.monotonic() - self._read_at > _GOOD:
            self._read_at = time.monotonic()
            self._start(self._read())
        return list(self._at.values())

    async def _read(self) -> None:
        try:
            every = await asyncio.to_thread(finding.nodes, self.first.conninfo)
            listed = await asyncio.to_thread(finding.numbered, finding.chosen(every, self._which, again=bool(self._at)))
        except Exception as error:  # the database that has the list is away, or the list is wrong now
            if not self._at:
                raise
            log.warning("the list of nodes cannot be read, so the former one stays: %s", first_line(error))
            return
        before, self._at = self._at, {}
        for node in listed:
            old = before.pop(node.name, None)
            if old is not None and old.node.dsn == node.dsn:
                old.node = node if node.number is not None else replace(node, number=old.node.number)
            else:
                old = At(node, Database(self._app, node.dsn, self._most, within=ANSWER))
            self._at[node.name] = old
        self._read_at = time.monotonic()
        for gone in before.values():
            log.info("node %s is not shown any more: it is not in the list", gone.name)
            await gone.database.close()

    async def named(self, name: str) -> At:
        """Return the node of this name, or the home node for an empty name. Raises UnknownNode."""
        found = {at.name: at for at in await self.known()}
        return found[finding.named([at.node for at in found.values()], name or "home").name]

    async def of_job(self, job: int) -> At:
        """Return the node of a job, by its id. Raises UnknownJob if no node has its number."""
        found = await self.known()
        if not self.many:
            return found[0]
        node = finding.of_job([at.node for at in found], job)
        return next(at for at in found if at.node is node)

    async def ask(self, question: Question[T], only: str = "") -> list[Answer[T]]:
        """Call `question` with a connection and a name for all nodes at the same time, or for one. Return the answers.

        A node that does not answer has an error instead of a value. Other errors of Tallybook are raised.
        """
        return await asyncio.gather(*(self.ask_one(at, question) for at in await self.chosen(only)))

    async def answered(self, question: Question[T], only: str = "") -> tuple[dict[str, T], list[Answer[T]]]:
        """Ask as above. Return the answers by name of node, and the nodes without one, as `sorted_out` does."""
        return sorted_out(await self.ask(question, only))

    async def chosen(self, only: str = "") -> list[At]:
        """Return all nodes, or the node of this name. Raises UnknownNode."""
        return [await self.named(only)] if only else await self.known()

    async def ask_one(self, at: At, question: Question[T]) -> Answer[T]:
        async def read() -> T:
            async with at.database.read() as conn:
                return await question(conn, at.name)

        return await self.tried(at, read)

    async def tried(self, at: At, what: Callable[[], Coroutine[Any, Any, T]]) -> Answer[T]:
        """Return the result of `what` within 2 s. A single database has no time limit here and is never away."""
        if not self.many:
            return Answer(at.node, await what())
        if not self.answers(at):
            return Answer(at.node, None, at.away)
        asking = asyncio.ensure_future(what())
        try:
            await asyncio.wait((asking,), timeout=ANSWER)
        finally:
            if not asking.done():
                asking.cancel()  # not awaited: psycopg asks the server over a new connection to cancel, for up to 10 s
                self._start(asyncio.gather(asking, return_exceptions=True))
        try:
            if not asking.done():
                raise TimeoutError
            return Answer(at.node, asking.result())
        except (QueueUnavailable, TimeoutError) as error:
            self.lost(at, error)
            return Answer(at.node, None, at.away)
        except Error as error:
            return Answer(at.node, None, first_line(error))

    def answers(self, at: At) -> bool:
        """Return whether the node answers. A node that is away is checked in the background from time to time."""
        if at.away is not None and time.monotonic() - at.looked_at > ANSWER:
            at.looked_at = time.monotonic()
            self._start(self._look_again(at))
        return at.away is None

    def lost(self, at: At, error: Exception) -> None:
        reason = error.reason if isinstance(error, QueueUnavailable) else None  # pages name the node, not the server
        if isinstance(error, TimeoutError):
            reason = f"no answer within {ANSWER:g} s"
        at.away = reason or first_line(error)
        at.looked_at = time.monotonic()

    async def _look_again(self, at: At) -> None:
        await at.database.close()  # its pool would retry at growing intervals
        try:
            async with asyncio.timeout(ANSWER), at.database.read() as conn:
                await conn.execute("select 1")
        except (QueueUnavailable, TimeoutError, Error) as error:
            self.lost(at, error)
        else:
            at.away = None

    def _start(self, what: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(what)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def close(self) -> None:
        for task in list(self._beside):
            task.cancel()
        for database in (self.first, *(at.database for at in self._at.values())):
            await database.close()
