"""A TCP proxy between clients and a PostgreSQL server that causes the faults of bad networks on demand.

    async with Proxy(lambda: "/run/server/.s.PGSQL.5432") as proxy:
        psycopg.connect(f"host=127.0.0.1 port={proxy.port} user=postgres")
        proxy.blackhole(to_server=True, to_client=False)
        proxy.heal()

Faults apply to existing and new connections until `heal`:

delay      every chunk is delayed by a number of seconds, in order.
blackhole  nothing gets through in one direction or both. Data sent meanwhile is delivered after `heal`, as TCP's
           retransmission would do. The end of one side does not reach the other side either.
half_open  sockets stay open, data is dropped. A stream with a hole cannot continue, so a connection that was half
           open stays dead after `heal`; the server sees its end then.
cut_after  the connection is reset after a number of further bytes in one direction.
cut_at     the connection is reset at a statement (COMMIT, ...): before the server gets it, or after the server has
           run it and before the client gets the answer.
reset      every connection is reset now (RST).

The proxy's kernel acknowledges the client's data, so the client's own kernel never notices that the peer is gone. The
proxy resets the connection when the client's kernel would do it in a real network: after `unacked` seconds with
undelivered data (tcp_user_timeout), or after `keepalive` seconds without data (keepalives). With None it never does,
like a middlebox that keeps a dead connection for ever.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Self

from chaos.wire import Requests, is_ready

__all__ = ["Proxy"]

Direction = Literal["to_server", "to_client"]
Upstream = str | tuple[str, int]
DIRECTIONS: tuple[Direction, Direction] = ("to_server", "to_client")
_CHUNK = 65536
_LOOK = 0.1


class _Cut:
    """A rule of cut_at."""

    def __init__(self, matches: Callable[[str], bool], when: Literal["before", "after"]) -> None:
        self.matches = matches
        self.when = when


class _Link:
    """One client's connection and the proxy's connection to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.requests = Requests()
        self.half_open_since: float | None = None
        self.unacked_since: float | None = None
        self.bytes_left: dict[Direction, int] = {}
        self.swallows = False
        self.given_up = False
        self.closed = False

    def writer(self, direction: Direction) -> asyncio.StreamWriter:
        return self.server if direction == "to_server" else self.client

    def reset(self, *, server: bool = True) -> None:
        """Send RST to the client, and with `server` to the server."""
        _abort(self.client)
        if server:
            _abort(self.server)
            self.closed = True


class Proxy:
    """Listens on 127.0.0.1:`port` or `listener`, and connects each client to `upstream()`.

    `upstream` returns a socket's path or (host, port).
    """

    def __init__(
        self,
        upstream: Callable[[], Upstream],
        *,
        port: int = 0,
        listener: socket.socket | None = None,
        unacked: float | None = 15.0,
        keepalive: float | None = 25.0,
    ) -> None:
        self._upstream = upstream
        self._unacked = unacked
        self._keepalive = keepalive
        self._socket = listener
        self._listener: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._flows: dict[Direction, asyncio.Event] = {direction: asyncio.Event() for direction in DIRECTIONS}
        self._whole = asyncio.Event()
        self._half_open = False
        self._delay = 0.0
        self._draw: dict[Direction, Callable[[], int]] = {}
        self._cuts: list[_Cut] = []
        self.port = port
        self.counts: Counter[str] = Counter()
        """Events of connections so far, by kind."""
        self.heal()

    async def __aenter__(self) -> Self:
        where: dict[str, Any] = {"sock": self._socket} if self._socket else {"host": "127.0.0.1", "port": self.port}
        self._listener = await asyncio.start_server(self._accept, **where)
        self.port = self._listener.sockets[0].getsockname()[1]
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None and self._watcher is not None
        self._listener.close()
        self._watcher.cancel()
        for link in tuple(self._links):
            link.reset()
        for serving in tuple(self._serving):
            serving.cancel()
        await asyncio.gather(self._watcher, *self._serving, return_exceptions=True)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._links)

    def delay(self, seconds: float) -> None:
        """Delay every chunk by `seconds`."""
        self._delay = seconds

    def blackhole(self, *, to_server: bool = True, to_client: bool = True) -> None:
        """Hold back all data in these directions until `heal`."""
        self._whole.clear()
        for direction, wanted in zip(DIRECTIONS, (to_server, to_client), strict=True):
            if wanted:
                self._flows[direction].clear()

    def half_open(self) -> None:
        """Keep all sockets open and drop all data."""
        self._whole.clear()
        self._half_open = True
        for link in self._links:
            self._kill_silently(link)

    def cut_after(self, draw: Callable[[], int], direction: Direction = "to_client") -> None:
        """Reset each connection, also later ones, after `draw()` further bytes in this direction."""
        self._draw[direction] = draw
        for link in self._links:
            link.bytes_left[direction] = draw()

    def cut_at(self, matches: Callable[[str], bool], when: Literal["before", "after"]) -> None:
        """Reset a connection at a statement whose text `matches`, before or after the server has run it."""
        self._cuts.append(_Cut(matches, when))

    def reset(self) -> None:
        """Send RST on every connection now."""
        for link in tuple(self._links):
            self.counts["reset"] += 1
            link.reset()

    def heal(self) -> None:
        """End all faults. Data that a blackhole held back arrives; half-open connections stay dead."""
        self._half_open = False
        self._delay = 0.0
        self._draw.clear()
        self._cuts.clear()
        for link in self._links:
            link.bytes_left.clear()
            if link.half_open_since is None:
                link.unacked_since = None
        for flow in self._flows.values():
            flow.set()
        self._whole.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        try:
            to = self._upstream()
            if isinstance(to, str):
                from_server, server = await asyncio.open_unix_connection(to)
            else:
                from_server, server = await asyncio.open_connection(*to)
        except OSError:
            self.counts["refused"] += 1
            _abort(writer)
            return
        link = _Link(writer, server)
        link.bytes_left = {direction: draw() for direction, draw in self._draw.items()}
        self._links.add(link)
        self.counts["connected"] += 1
        if self._half_open:
            self._kill_silently(link)
        try:
            await asyncio.gather(self._pump(link, "to_server", reader), self._pump(link, "to_client", from_server))
        finally:
            self._links.discard(link)
            link.reset()

    async def _pump(self, link: _Link, direction: Direction, reader: asyncio.StreamReader) -> None:
        """Forward data from one end until it closes, then close the other end."""
        try:
            while not link.closed and (chunk := await reader.read(_CHUNK)):
                if not await self._pass(link, direction, chunk):
                    break
        except OSError:
            pass
        await self._whole.wait()  # during a fault not even a close gets through
        if link.half_open_since is not None and direction == "to_client":
            return  # the client of a dead connection never sees a close: its own kernel ends it, see _watch
        with suppress(OSError):
            link.writer(direction).close()

    async def _pass(self, link: _Link, direction: Direction, chunk: bytes) -> bool:
        """Apply the current faults to one chunk; return False if the connection has ended."""
        if self._delay:
            await asyncio.sleep(self._delay)
        if direction == "to_server" and not self._whole.is_set() and link.unacked_since is None:
            link.unacked_since = time.monotonic()  # the data or its acknowledgement is lost
        await self._flows[direction].wait()
        if link.given_up:
            return False  # after the reset nothing retransmits it
        if link.half_open_since is not None:
            return True
        if link.swallows:
            return direction == "to_server" or self._swallowed(link, chunk)
        if direction == "to_server":
            chunk, cut = self._until_cut(link, chunk)
            if cut == "before":
                link.reset()
                return False
        elif len(chunk) == 1 and chunk in b"SG" and not link.requests.opaque:
            link.requests.encrypted()
        left = link.bytes_left.get(direction)
        if left is not None and len(chunk) >= left:
            await self._send(link, direction, chunk[:left])
            self.counts["cut after bytes"] += 1
            link.reset()
            return False
        if left is not None:
            link.bytes_left[direction] = left - len(chunk)
        return await self._send(link, direction, chunk)

    def _until_cut(self, link: _Link, chunk: bytes) -> tuple[bytes, str | None]:
        """Return the part of a chunk to forward to the server, and "before" if the connection ends there."""
        passed = bytearray()
        for message, text in link.requests.feed(chunk):
            if text is not None and not link.swallows:
                for cut in self._cuts:
                    if cut.matches(text):
                        self.counts[f"cut {cut.when} statement"] += 1
                        if cut.when == "before":
                            return b"", "before"
                        link.swallows = True
                        break
            passed += message
        return bytes(passed), None

    def _swallowed(self, link: _Link, answer: bytes) -> bool:
        """Drop the server's answer; reset the connection and return False once the answer is complete."""
        if is_ready(answer):
            link.reset()
            return False
        return True

    async def _send(self, link: _Link, direction: Direction, chunk: bytes) -> bool:
        if not chunk:
            return True
        writer = link.writer(direction)
        writer.write(chunk)
        await writer.drain()
        return True

    def _kill_silently(self, link: _Link) -> None:
        if link.half_open_since is None:
            self.counts["half open"] += 1
            link.half_open_since = time.monotonic()

    async def _watch(self) -> None:
        """Reset dead connections when the client's kernel would do so without the proxy."""
        while True:
            await asyncio.sleep(_LOOK)
            now = time.monotonic()
            for link in tuple(self._links):
                sent = link.unacked_since
                unacked = self._unacked is not None and sent is not None and now - sent > self._unacked
                since = link.half_open_since
                silent = self._keepalive is not None and since is not None and now - since > self._keepalive
                if (unacked or silent) and not link.client.transport.is_closing():
                    self.counts["given up"] += 1
                    link.given_up = True
                    link.reset(server=self._whole.is_set())


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close a writer, with RST instead of FIN for a TCP socket."""
    if writer.transport.is_closing():
        return
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
