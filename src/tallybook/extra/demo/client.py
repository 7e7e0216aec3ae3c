"""A minimal HTTP client for the demo, which has no dependencies. Your application would use httpx or aiohttp."""

import asyncio
from collections.abc import Mapping
from urllib.parse import urlsplit

_SECONDS = 10.0


class Refused(Exception):
    """The receiver answered with a status other than 2xx."""


class Client:
    """A client that sends each POST to one URL over a new connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port or 80, parts.path or "/"

    async def post(self, body: str, headers: Mapping[str, object]) -> None:
        """Send a JSON text; return when it is accepted. Raises Refused, OSError, EOFError, TimeoutError."""
        data = body.encode()
        lines = [f"POST {self._path} HTTP/1.1", f"Host: {self._host}:{self._port}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        async with asyncio.timeout(_SECONDS):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write("\r\n".join([*lines, "", ""]).encode() + data)
                await writer.drain()
                status = int((await reader.readuntil(b"\r\n")).split()[1])
            finally:
                writer.close()
        if not 200 <= status < 300:
            raise Refused(f"the webhook answered {status}")
