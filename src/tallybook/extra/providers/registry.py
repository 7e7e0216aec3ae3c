"""The registry of providers: whom jobs call, with secrets that are decrypted in memory only. It is `app.providers`.

What is read is kept for `fresh_for`, 5 s, so that handlers may ask for each job, and a changed row reaches running workers
within that time. In a worker it is read on the worker's own connection for handlers, elsewhere on one of the App's own. A
handler reads the node of its job, whose answers are kept apart from those of other nodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from tallybook._db import providers as calls
from tallybook._db.declared import Call
from tallybook._db.source import Source
from tallybook._db.verb import run, run_sync
from tallybook._model.at_node import at_node
from tallybook._model.provider import Provider
from tallybook._model.secret import Secret
from tallybook.errors import InvalidArgument
from tallybook.extra.providers import steps
from tallybook.extra.providers.keys import KeySource
from tallybook.extra.providers.steps import Rotation, Steps, Tested

__all__ = ["Provider", "Providers", "Rotation", "Secret", "Tested"]

T = TypeVar("T")
Say = Callable[[Call[Any]], Awaitable[Any]]

_MOST = 1000
"""Answers that are kept."""


class Providers:
    """The providers of the App's database. Verbs that read keep what they read for `fresh_for`."""

    def __init__(self, app: Source, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        self._keys = KeySource()
        self._kept: dict[Hashable, tuple[float, Provider | None]] = {}
        self._flights: dict[tuple[Hashable, ...], asyncio.Task[Provider | None]] = {}
        self._generation = 0
        self._ways: list[tuple[asyncio.AbstractEventLoop, Say]] = []
        self.fresh_for = timedelta(seconds=5)
        """How long what was read is used; zero: every call reads."""

    async def get(self, name: str) -> Provider:
        """The active provider of this name, its secrets decrypted. UnknownProvider, also if it is not active; SecretError.

        acme = await app.providers.get("acme")
        headers = {"Authorization": f"Bearer {acme.secrets['api_key'].reveal()}"}
        """
        found = await self._read(("get", name), partial(steps.get, name, self._keys))
        assert found is not None
        return found

    def get_sync(self, name: str) -> Provider:
        """The active provider of this name; get without an event loop, for plain handlers."""
        found = self._read_sync(("get", name), partial(steps.get, name, self._keys))
        assert found is not None
        return found

    async def resolve(self, data_type: str, symbol: str | None = None) -> Provider | None:
        """The provider that serves this kind of data, for this symbol; None: no active route leads to an active provider.

        A route for the symbol goes before the one for all. SecretError.

            provider = await app.providers.resolve("equity", "RELIANCE")
        """
        key = ("resolve", data_type, symbol)
        return await self._read(key, partial(steps.resolve, data_type, symbol, self._keys))

    def resolve_sync(self, data_type: str, symbol: str | None = None) -> Provider | None:
        """The provider that serves this kind of data; resolve without an event loop, for plain handlers."""
        key = ("resolve", data_type, symbol)
        return self._read_sync(key, partial(steps.resolve, data_type, symbol, self._keys))

    async def load(self) -> dict[str, Provider]:
        """All active providers by name, read anew: in a lifespan, a program without the right keys fails when it starts."""
        since, generation = self._clock(), self._generation
        found = await steps.drive(steps.load(self._keys), self._say)
        for name, provider in found.items():
            self._keep(("get", name), provider, since, generation)
        return {name: _own(provider) for name, provider in found.items()}

    async def set(
        self,
        name: str,
        *,
        kind: str | None = None,
        settings: Mapping[str, Any] | None = None,
        active: bool | None = None,
        conn: object | None = None,
    ) -> str:
        """Create or change a provider: "created", "changed" or "unchanged". What is None stays as it is; a new one needs a kind.

        Here and below: on `conn`, in its transaction, or on a connection of the App's own. InvalidArgument.

            await app.providers.set("acme", kind="market-data", settings={"base_url": "https://api.acme.example"})
        """
        return await self._change(_set(name, kind, settings, active), conn)

    async def drop(self, name: str, *, conn: object | None = None) -> bool:
        """Remove a provider with its secrets; False: there is none. InvalidArgument while routes lead to it."""
        return await self._change(calls.drop(name), conn)

    async def set_secret(
        self, name: str, field: str, secret: str | Secret, *, keep_previous: bool = True, conn: object | None = None
    ) -> str:
        """Set one secret, encrypted with the current key: "created", "changed" or "unchanged".

        What it was stays as `secret.previous` until drop_secret, unless `keep_previous` is False. UnknownProvider; SecretError,
        also where the former one does not open and is to be kept.
        """
        wanted = secret if isinstance(secret, Secret) else Secret(secret)
        del secret  # no frame of a traceback shows it
        made = steps.set_secret(name, field, wanted, self._keys, keep_previous=keep_previous)
        return await self._change(made, conn)

    async def drop_secret(
        self, name: str, field: str, *, previous_only: bool = False, conn: object | None = None
    ) -> bool:
        """Forget a secret, or only what it was before its last change; False: there was nothing. UnknownProvider."""
        return await self._change(steps.drop_secret(name, field, previous_only=previous_only), conn)

    async def route(
        self,
        data_type: str,
        provider: str,
        *,
        symbol: str | None = None,
        active: bool | None = None,
        conn: object | None = None,
    ) -> str:
        """Let a provider serve a kind of data, for one symbol or for all that have no route: "created", "changed", "unchanged".

        UnknownProvider, InvalidArgument.

            await app.providers.route("equity", "acme", symbol="RELIANCE")
        """
        return await self._change(calls.route_set(data_type, provider, symbol, active), conn)

    async def drop_route(self, data_type: str, *, symbol: str | None = None, conn: object | None = None) -> bool:
        """Remove the route for one symbol, or the one for all; False: there is none."""
        return await self._change(calls.route_drop(data_type, symbol), conn)

    async def test(self, name: str) -> list[Tested]:
        """Decrypt every secret of a provider, active or not; which of them open, and why the others do not."""
        return await steps.drive(steps.test(name, self._keys), self._say)

    async def rotate(self) -> Rotation:
        """Encrypt all secrets with the current key, one by one, while workers run; it can be broken off and said again."""
        return await self._change(steps.rotate(self._keys), None)

    def forget(self) -> None:
        """Read anew what is asked for next."""
        self._generation += 1
        self._kept.clear()

    @contextmanager
    def through(self, say: Say) -> Iterator[None]:
        """Read by `say` in the running event loop while the block runs: a worker's way to the database."""
        way = (asyncio.get_running_loop(), say)
        self._ways.append(way)
        try:
            yield
        finally:
            self._ways.remove(way)

    async def _read(self, key: Hashable, make: Callable[[], Steps[Any]]) -> Provider | None:
        key = (at_node.get(), key)
        kept = self._kept.get(key)
        if kept is not None and self._clock() < kept[0]:
            return kept[1] and _own(kept[1])
        # Not one that set off before this program changed something.
        flights, flight_key = self._flights, (asyncio.get_running_loop(), key, self._generation)
        flight = flights.get(flight_key)
        if flight is None:  # a hundred jobs that ask at one moment are one statement
            flight = flights[flight_key] = asyncio.create_task(self._fly(key, make()))
            flight.add_done_callback(lambda done: (flights.pop(flight_key), done.cancelled() or done.exception()))
        found = await asyncio.shield(flight)
        return found and _own(found)

    async def _fly(self, key: Hashable, made: Steps[Any]) -> Provider | None:
        since, generation = self._clock(), self._generation
        found: Provider | None = await steps.drive(made, self._say)
        self._keep(key, found, since, generation)
        return found

    def _read_sync(self, key: Hashable, make: Callable[[], Steps[Any]]) -> Provider | None:
        key = (at_node.get(), key)
        kept = self._kept.get(key)
        if kept is not None and self._clock() < kept[0]:
            return kept[1] and _own(kept[1])
        since, generation = self._clock(), self._generation
        found: Provider | None = steps.drive_sync(make(), self._say_sync)
        self._keep(key, found, since, generation)
        return found and _own(found)

    def _keep(self, key: Hashable, found: Provider | None, since: float, generation: int) -> None:
        if generation != self._generation:  # changed from here while it was read
            return
        self._kept.pop(key, None)
        while len(self._kept) >= _MOST:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[key] = (since + self.fresh_for.total_seconds(), found)

    async def _change(self, made: Call[T] | Steps[T], conn: object | None) -> T:
        say: Say = self._say if conn is None else partial(run, conn)
        try:
            return await (say(made) if isinstance(made, Call) else steps.drive(made, say))
        finally:
            self.forget()

    async def _say(self, call: Call[Any]) -> Any:
        loop = asyncio.get_running_loop()
        for of, say in reversed(self._ways):
            if of is loop:
                return await say(call)
        return await run(self._app, call)

    def _say_sync(self, call: Call[Any]) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            for loop, say in reversed(self._ways):
                if loop.is_running():
                    return asyncio.run_coroutine_threadsafe(_said(say, call), loop).result()
        return run_sync(self._app, call)

    def __repr__(self) -> str:
        return f"<Providers of {self._app.name}>"


async def _said(say: Say, call: Call[Any]) -> Any:
    return await say(call)


def _own(found: Provider) -> Provider:
    """A copy for one caller: what it does to the settings nobody else sees."""
    return replace(found, settings=deepcopy(found.settings), secrets=dict(found.secrets))


def _set(name: str, kind: str | None, settings: Mapping[str, Any] | None, active: bool | None) -> Call[str]:
    try:
        return calls.set_(name, kind, settings, active)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"settings of provider {name!r} are no JSON: {error}") from None
