"""The connection of one call, to exactly the address that was checked. Only this module imports httpcore2.

It resolves a name once, checks all its addresses and connects to one of these. A name that changes a moment later (DNS
rebinding) has no effect. TLS and the header Host keep the name. Nothing else can change the destination: there are no
redirects, no proxies from the environment and no reused connections.
"""

import asyncio
import socket
import ssl
from functools import lru_cache
from typing import Any

import httpcore2

from tallybook.errors import AddressRefused, CallFailed
from tallybook.extra.tasks._address import Allowed

_MOST_ADDRESSES = 4


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in the system's order."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connects by TCP to public and to allowed addresses only. Raises AddressRefused for others."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address of the host that answers. AddressRefused if any of them must not be called."""
        addresses = await self._checked(host, port)
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, *args, **kwargs)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, *args, **kwargs)

    async def _checked(self, host: str, port: int) -> list[str]:
        addresses = await resolve(host, port)
        if not addresses:
            raise CallFailed("the host has no address")
        for address in addresses:
            if (refusal := self._allowed.refusal(host, address)) is not None:
                raise AddressRefused(refusal)
        return addresses[:_MOST_ADDRESSES]

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore2.AsyncNetworkStream:
        """Raise AddressRefused: a socket has no address to check."""
        raise AddressRefused("a unix socket")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def pool(allowed: Allowed, ca: str | None) -> httpcore2.AsyncConnectionPool:
    """Return a pool for one call: HTTP/1.1, one connection, no retries."""
    backend = CheckedBackend(allowed)
    return httpcore2.AsyncConnectionPool(ssl_context=tls(ca), max_connections=1, network_backend=backend)


@lru_cache(maxsize=32)  # it reads more than a hundred certificates
def tls(ca: str | None) -> ssl.SSLContext:
    """Return a context with the system's certificate authorities, or only with these (PEM)."""
    return httpcore2.default_ssl_context() if ca is None else ssl.create_default_context(cadata=ca)
