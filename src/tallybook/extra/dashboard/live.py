"""The poller that feeds every viewer. It reads the database once a second, and only while there are viewers."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from tallybook._db.link import end
from tallybook.errors import QueueUnavailable, TallybookError
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.dashboard.nodes import At, Nodes

log = logging.getLogger("tallybook.web")

Ask = Callable[[Conn, str], Awaitable[str | None]]
"""Reads the text of a topic, or None for no text. The argument is the part of its name after the colon ("job:42")."""
AskAll = Callable[[str], Awaitable[str | None]]
"""Reads the text of a topic from all nodes, or from the node whose name follows the colon."""
Place = Callable[[str], Awaitable[At]]
"""Returns the node of a topic from the part of its name after the colon."""

MOST_VIEWERS = 1000
MOST_TOPICS = 500  # different topics of all viewers: each is read once a second
_BEAT = 15.0
_HEALTH = "live"  # the event of every viewer: "ok" once its topics are read, "stale" while one of them cannot be
_BREATH = 0.1  # minimum seconds between two readings, regardless of new viewers
_SNAPSHOT = 1.0  # seconds after which a reading continues in a new transaction: many topics must not delay vacuum
_AGE = 600.0  # seconds after which a viewer must reconnect, so that a user who has lost access stops seeing updates
_BREAK = re.compile(r"\r\n|\r|\n")


class TooManyViewers(Exception):
    """This process has reached its maximum number of viewers or topics."""


@dataclass(slots=True)
class _Topic:
    """A topic with viewers, and its newest text. A later viewer must not get an outdated text, so both go together."""

    topic: str
    name: str
    rest: str  # what follows the name and a colon
    viewers: int = 0
    asked: bool = False
    failing: bool = False
    text: str | None = None
    event: bytes = b""

    def tells(self, text: str | None) -> None:
        if self.failing:
            log.info("the live view reads %s again", self.name)
        self.asked, self.failing = True, False
        if text is not None and self.text != text:
            self.text, self.event = text, _event(self.topic, text)

    def fails(self, error: Exception) -> None:
        """Mark the topic as failing; log that once, not every second."""
        if not self.failing:
            log.warning("the live view cannot read %s: %s", self.name, type(error).__name__)
        self.asked = self.failing = True


class Live:
    """The topics, their viewers, and the one task that reads."""

    def __init__(self, nodes: Nodes, *, every: float = 1.0) -> None:
        self._nodes, self._every = nodes, every
        self._asks: dict[str, tuple[Ask, Place]] = {}
        self._over: dict[str, tuple[AskAll, bool]] = {}  # with whether a text may follow the name
        self._watched: dict[str, _Topic] = {}
        self._news = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self.viewers = self.polls = 0

    def topic(self, name: str, ask: Ask, place: Place | None = None) -> None:
        """Register a topic that reads one database: the only one, or the node that `place` returns."""
        self._asks[name] = ask, place or (lambda _: self._nodes.named(""))

    def over(self, name: str, ask: AskAll, *, each: bool = False) -> None:
        """Register a topic that reads all nodes, or the one after the colon. With `each`, any text may follow that."""
        self._over[name] = ask, each or self._nodes.many

    def knows(self, topic: str) -> bool:
        name, colon, _ = topic.partition(":")
        is_one = name in self._asks or (name in self._over and (not colon or self._over[name][1]))
        return is_one and len(topic) <= 200 and topic.isprintable()

    async def watch(self, topics: Iterable[str]) -> AsyncIterator[bytes]:
        """Return the stream of one viewer, as server-sent events. Raises TooManyViewers before the first event."""
        wanted = [topic for topic in dict.fromkeys(topics) if self.knows(topic)]
        new = sum(topic not in self._watched for topic in wanted)
        if self.viewers >= MOST_VIEWERS or len(self._watched) + new > MOST_TOPICS:
            raise TooManyViewers
        return self._stream(wanted)

    async def _stream(self, topics: list[str]) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        until = loop.time() + _AGE
        self.viewers += 1
        new = {topic: _Topic(topic, *topic.partition(":")[::2]) for topic in topics}
        watched = [self._watched.setdefault(topic, one) for topic, one in new.items()]
        for one in watched:
            one.viewers += 1
        self._wanted.set()
        if topics and (self._poller is None or self._poller.done()):
            self._poller = asyncio.create_task(self._poll(), name="tallybook live")
        seen: dict[str, bytes] = {}
        health = ""
        try:
            yield b"retry: 3000\n\n"
            while loop.time() < until:
                news = self._news  # read before the topics, so that any later text wakes this stream
                for one in watched:
                    if one.event != seen.get(one.topic, b""):
                        seen[one.topic] = one.event
                        yield one.event
                failing = any(one.failing for one in watched)
                now = "stale" if failing else "ok"
                if now != health and (failing or all(one.asked for one in watched)):
                    health = now
                    yield _event(_HEALTH, health)
                try:
                    async with asyncio.timeout(_BEAT):
                        await news.wait()
                except TimeoutError:
                    yield b": still here\n\n"
            yield b"retry: 100\n\n"
        finally:
            self.viewers -= 1
            for one in watched:
                one.viewers -= 1
                if not one.viewers:
                    del self._watched[one.topic]

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        while self._watched:
            began = loop.time()
            await self._ask_all()
            news, self._news = self._news, asyncio.Event()
            news.set()
            await asyncio.sleep(min(self._every / 10, _BREATH))
            # A new topic is read without waiting for the end of the second.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._every - (loop.time() - began))):
                    while self._watched and all(one.asked for one in self._watched.values()):
                        self._wanted.clear()
                        await self._wanted.wait()

    async def _ask_all(self) -> None:
        self.polls += 1
        over, places = list[_Topic](), dict[str, tuple[At, list[_Topic]]]()
        for topic in list(self._watched.values()):
            if topic.name in self._over:
                over.append(topic)
                continue
            try:
                at = await self._asks[topic.name][1](topic.rest)
            except TallybookError as error:
                topic.fails(error)
            else:
                places.setdefault(at.name, (at, []))[1].append(topic)
        if self._nodes.many:
            await asyncio.gather(self._ask_over(over), *(self._ask_at(at, these) for at, these in places.values()))
            return
        await self._ask_over(over)  # one after the other, so that all viewers share one session
        for at, these in places.values():
            await self._ask_at(at, these)

    async def _ask_over(self, topics: list[_Topic]) -> None:
        """Read these topics one after another, because they share readings."""
        for topic in topics:
            try:
                topic.tells(await self._over[topic.name][0](topic.rest))
            except Exception as error:
                topic.fails(error)

    async def _ask_at(self, at: At, left: list[_Topic]) -> None:
        """Read the topics of one node, without waiting for a node that is away. A failure begins a new transaction."""
        if not self._nodes.answers(at):
            for one in left:
                one.fails(QueueUnavailable(f"node {at.name}", at.away or ""))
            return
        loop = asyncio.get_running_loop()
        while left:
            topic = None
            try:
                async with at.database.read() as conn:
                    until = loop.time() + _SNAPSHOT
                    while left and (topic is None or loop.time() < until):
                        topic = left.pop(0)
                        topic.tells(await self._asks[topic.name][0](conn, topic.rest))
            except Exception as error:
                if topic is not None:
                    topic.fails(error)
                if topic is None or isinstance(error, QueueUnavailable):
                    for one in left:  # without a connection none of them can be read
                        one.fails(error)
                    left.clear()
                if isinstance(error, QueueUnavailable):
                    self._nodes.lost(at, error)

    async def close(self) -> None:
        if self._poller is not None:
            await end([self._poller])


def _event(topic: str, text: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in _BREAK.split(text))  # a bare CR also ends a line
    return f"event: {topic}\n{lines}\n".encode()
