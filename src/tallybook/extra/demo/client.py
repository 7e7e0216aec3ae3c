"""Just enough of an HTTP client for the demo, which has no dependencies; your application has httpx or aiohttp."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

_SECONDS = 10.0


class Refused(Exception):
    """The receiver answered with something other than 2xx."""


class Client:
    """POST to one URL over HTTP/1.1 connections that are kept open, as many as there are posts at once."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port or 80, parts.path or "/"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for _, writer in self._idle:
            writer.close()

    async def post(self, body: str, headers: Mapping[str, object]) -> None:
        """Send a JSON text; returns once it is taken. Raises Refused, OSError, TimeoutError."""
        async with asyncio.timeout(_SECONDS):
            status = await self._send(body.encode(), headers)
        if not 200 <= status < 300:
            raise Refused(f"the webhook answered {status}")

    async def _send(self, body: bytes, headers: Mapping[str, object]) -> int:
        reader, writer = await self._connection()
        try:
            lines = [f"POST {self._path} HTTP/1.1", f"Host: {self._host}:{self._port}"]
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
            status = await _answer(reader)
        except BaseException:  # cancelled too: an answer that was not read must not meet the next request
            writer.close()
            raise
        self._idle.append((reader, writer))
        return status

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port)


async def _answer(reader: asyncio.StreamReader) -> int:
    head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    length = 0
    for line in head[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    await reader.readexactly(length)
    return int(head[0].split()[1])
