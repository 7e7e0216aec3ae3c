"""The connection of one call, made to exactly the address that was checked. The only module that imports httpcore2.

A name is resolved once, every address that it has is checked, and one of these is connected to: a name that leads
elsewhere a moment later (DNS rebinding) changes nothing. TLS and the header Host keep the name. What could change the way
is not there at all: no redirects, no proxies out of the environment, no connection that is used again.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import httpcore2

from tallybook.errors import AddressRefused, CallFailed
from tallybook.extra.tasks._address import Allowed

_MOST_ADDRESSES = 4


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, in the order in which the system gives them."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connects by TCP to public addresses, and to those that are allowed. AddressRefused."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """The first address of the host that answers; refused if any of them is not to be called."""
        addresses = await self._checked(host, port)
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def _checked(self, host: str, port: int) -> list[str]:
        addresses = await resolve(host, port)
        if not addresses:
            raise CallFailed("the host has no address")
        for address in addresses:
            if (refusal := self._allowed.refusal(host, address)) is not None:
                raise AddressRefused(refusal)
        return addresses[:_MOST_ADDRESSES]

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore2.AsyncNetworkStream:
        """Never: a socket has no address to check."""
        raise AddressRefused("a unix socket")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def pool(allowed: Allowed, ca: str | None) -> httpcore2.AsyncConnectionPool:
    """For one call: HTTP/1.1, one connection, no attempts by itself."""
    return httpcore2.AsyncConnectionPool(
        ssl_context=tls(ca), max_connections=1, network_backend=CheckedBackend(allowed)
    )


@lru_cache(maxsize=32)
def tls(ca: str | None) -> ssl.SSLContext:
    """The system's certificate authorities, or only these (PEM). Made once: it reads some hundred certificates."""
    return httpcore2.default_ssl_context() if ca is None else ssl.create_default_context(cadata=ca)
