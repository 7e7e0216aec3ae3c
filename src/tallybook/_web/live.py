"""One poller feeds every viewer: it asks the database while somebody looks, once a second, and never otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from tallybook._web.database import Conn, Database

__all__ = ["MOST_VIEWERS", "Live", "TooManyViewers"]

log = logging.getLogger("tallybook.web")

Ask = Callable[[Conn, str], Awaitable[str | None]]
"""What a topic says now; the text is what follows the colon of its name ("job:42"), and is empty without one. None: nothing."""

MOST_VIEWERS = 1000
_BEAT = 15.0
_HEALTH = "live"
"""What every viewer gets besides: "ok", or "stale" while the database cannot be asked."""
_RETRY = 3000


class TooManyViewers(Exception):
    """This process feeds as many as it can."""


@dataclass
class _Said:
    text: str
    version: int


class Live:
    """Topics, their viewers, and the one task that asks."""

    def __init__(self, database: Database, *, every: float = 1.0) -> None:
        self._database = database
        self._every = every
        self._asks: dict[str, Ask] = {}
        self._watched: Counter[str] = Counter()
        self._said: dict[str, _Said] = {}
        self._news = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._version = 0
        self._wanted = asyncio.Event()
        self.viewers = 0
        self.polls = 0
        """How often it has asked."""

    def topic(self, name: str, ask: Ask) -> None:
        """Give a topic its question."""
        self._asks[name] = ask

    def knows(self, topic: str) -> bool:
        """Whether there is such a topic."""
        return topic.partition(":")[0] in self._asks and len(topic) <= 200

    async def watch(self, topics: Iterable[str]) -> AsyncIterator[bytes]:
        """The stream of one viewer, in the format of server-sent events. Raises TooManyViewers before the first one."""
        if self.viewers >= MOST_VIEWERS:
            raise TooManyViewers
        wanted = [topic for topic in dict.fromkeys(topics) if self.knows(topic)]
        return self._stream(wanted)

    async def _stream(self, topics: list[str]) -> AsyncIterator[bytes]:
        self.viewers += 1
        self._watched.update(topics)
        self._wanted.set()
        if topics and (self._poller is None or self._poller.done()):
            self._poller = asyncio.create_task(self._poll(), name="tallybook live")
        seen: dict[str, int] = {}
        try:
            yield f"retry: {_RETRY}\n\n".encode()
            while True:
                news = self._news  # before looking: what is said from here on wakes it
                for topic in (*topics, _HEALTH):
                    if (said := self._said.get(topic)) and said.version > seen.get(topic, 0):
                        seen[topic] = said.version
                        yield _event(topic, said.text)
                try:
                    async with asyncio.timeout(_BEAT):
                        await news.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.viewers -= 1
            self._watched.subtract(topics)
            for topic in topics:
                if self._watched[topic] <= 0:
                    del self._watched[topic]
                    self._said.pop(topic, None)  # who comes later shall not see how it was

    async def _poll(self) -> None:
        """Until nobody looks any more."""
        loop = asyncio.get_running_loop()
        while self._watched:
            began = loop.time()
            try:
                await self._ask_all()
                self._say(_HEALTH, "ok")
            except Exception as error:
                log.warning("the live view cannot read: %s", type(error).__name__)
                self._say(_HEALTH, "stale")
            news, self._news = self._news, asyncio.Event()
            news.set()
            await asyncio.sleep(self._every / 10)
            # A newcomer's topic is asked for without waiting for the second to end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._every - (loop.time() - began))):
                    while all(topic in self._said for topic in self._watched):
                        self._wanted.clear()
                        await self._wanted.wait()
        self._said.clear()

    async def _ask_all(self) -> None:
        self.polls += 1
        async with self._database.read() as conn:
            for topic in list(self._watched):
                name, _, rest = topic.partition(":")
                text = await self._asks[name](conn, rest)
                if text is not None:
                    self._say(topic, text)

    def _say(self, topic: str, text: str) -> None:
        held = self._said.get(topic)
        if held is None or held.text != text:
            self._version += 1
            self._said[topic] = _Said(text, self._version)

    async def close(self) -> None:
        """End the poller."""
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller


def _event(topic: str, text: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in text.splitlines() or [""])
    return f"event: {topic}\n{lines}\n".encode()
