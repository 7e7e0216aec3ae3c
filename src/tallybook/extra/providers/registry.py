"""The registry of providers, `app.providers`: the services that jobs call. Secrets are decrypted in memory only.

Answers are cached for `fresh_for`, 5 s, so handlers can read a provider in each job. A changed row reaches running
workers within that time. A worker reads on its own connection for handlers; other programs read on a connection of the
App. A handler reads from the node of its job, and each node has its own cache entries.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from tallybook._db.declared import Call
from tallybook._db.source import Source, in_loop
from tallybook._db.sync import done
from tallybook._db.verb import Steps, drive, run, run_sync
from tallybook._model.at_node import at_node
from tallybook._model.provider import Provider, Secret
from tallybook.errors import InvalidArgument
from tallybook.extra.providers import steps
from tallybook.extra.providers.steps import KeySource, Rotation, Tested

T = TypeVar("T")
Say = Callable[[Call[Any]], Coroutine[Any, Any, Any]]

_MOST = 1000  # cached answers


class Providers:
    """The providers of the App's database. Verbs that read cache their answers for `fresh_for`."""

    def __init__(self, app: Source, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock, self._keys = app, clock, KeySource()
        self._kept: dict[Hashable, tuple[float, Any]] = {}
        self._flights: dict[tuple[Hashable, ...], asyncio.Task[Any]] = {}
        self._generation = 0
        self._ways: list[tuple[int, asyncio.AbstractEventLoop, Say]] = []
        self.fresh_for = timedelta(seconds=5)
        """The time for which an answer is cached; with zero, every call reads."""

    async def get(self, name: str) -> Provider:
        """Return the active provider of this name with its secrets decrypted.

        Raises UnknownProvider, also for an inactive one, and SecretError.

        acme = await app.providers.get("acme")
        headers = {"Authorization": f"Bearer {acme.secrets['api_key'].reveal()}"}
        """
        return await self._read(("get", name), steps.get(name, self._keys))

    def get_sync(self, name: str) -> Provider:
        """Return the active provider of this name: `get` without an event loop, for plain handlers."""
        return done(self._read(("get", name), steps.get(name, self._keys), self._say_sync))

    async def resolve(self, data_type: str, symbol: str | None = None) -> Provider | None:
        """Return the provider for this kind of data and symbol, None if no active route leads to an active provider.

        A route for the symbol precedes the general one. Raises SecretError.

            provider = await app.providers.resolve("equity", "RELIANCE")
        """
        return await self._read(("resolve", data_type, symbol), steps.resolve(data_type, symbol, self._keys))

    def resolve_sync(self, data_type: str, symbol: str | None = None) -> Provider | None:
        """Return the provider for this kind of data: `resolve` without an event loop, for plain handlers."""
        made = steps.resolve(data_type, symbol, self._keys)
        return done(self._read(("resolve", data_type, symbol), made, self._say_sync))

    async def load(self) -> dict[str, Provider]:
        """Read all active providers again and return them by name.

        Call it in a lifespan: a program without the right keys then fails when it starts.
        """
        since, generation = self._clock(), self._generation
        found = await drive(steps.load(self._keys), self._say)
        for name, provider in found.items():
            self._keep((at_node.get(), ("get", name)), provider, since, generation)
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
        """Create or change a provider. Return "created", "changed" or "unchanged".

        An argument that is None changes nothing; a new provider needs a kind. Verbs with `conn` run on it, in its
        transaction, or else on a connection of the App. Raises InvalidArgument.

            await app.providers.set("acme", kind="market-data", settings={"base_url": "https://api.acme.example"})
        """
        try:
            call = steps.set_(name, kind, settings, active)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"settings of provider {name!r} are not JSON: {error}") from None
        return await self._change(call, conn)

    async def drop(self, name: str, *, conn: object | None = None) -> bool:
        """Delete a provider with its secrets. False if it does not exist. InvalidArgument while routes lead to it."""
        return await self._change(steps.DROP(name), conn)

    async def set_secret(
        self, name: str, field: str, secret: str | Secret, *, keep_previous: bool = True, conn: object | None = None
    ) -> str:
        """Encrypt one secret with the current key and store it. Return "created", "changed" or "unchanged".

        The former value stays as `secret.previous` until the next change or `drop_secret`, unless `keep_previous` is
        False. Raises UnknownProvider and SecretError, also if the former value has to be kept and cannot be decrypted.
        """
        wanted = secret if isinstance(secret, Secret) else Secret(secret)
        del secret  # no frame of a traceback shows it
        made = steps.set_secret(name, field, wanted, self._keys, keep_previous=keep_previous)
        return await self._change(made, conn)

    async def drop_secret(
        self, name: str, field: str, *, previous_only: bool = False, conn: object | None = None
    ) -> bool:
        """Delete a secret, or only its previous value. False if there was nothing to delete. Raises UnknownProvider."""
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
        """Route a kind of data to a provider, for one symbol or for all symbols without a route of their own.

        Returns "created", "changed" or "unchanged". Raises UnknownProvider and InvalidArgument.

            await app.providers.route("equity", "acme", symbol="RELIANCE")
        """
        return await self._change(steps.SET_ROUTE(data_type, provider, symbol, active), conn)

    async def drop_route(self, data_type: str, *, symbol: str | None = None, conn: object | None = None) -> bool:
        """Delete the route for one symbol, or the general one. False if it does not exist."""
        return await self._change(steps.DROP_ROUTE(data_type, symbol), conn)

    async def test(self, name: str) -> list[Tested]:
        """Decrypt every secret of a provider, active or not. Return for each whether it opens, or why not."""
        return await drive(steps.test(name, self._keys), self._say)

    async def rotate(self) -> Rotation:
        """Encrypt all secrets with the current key, one by one, while workers run. You can interrupt and repeat it."""
        return await self._change(steps.rotate(self._keys), None)

    def forget(self) -> None:
        """Clear the cache."""
        self._generation += 1
        self._kept.clear()

    @contextmanager
    def through(self, say: Say) -> Iterator[None]:
        """Read with `say` in the running event loop while the block runs: a worker's way to the database."""
        way = (os.getpid(), asyncio.get_running_loop(), say)
        self._ways.append(way)
        try:
            yield
        finally:
            self._ways.remove(way)

    async def _read(self, key: Hashable, made: Steps[T], say_sync: Callable[[Call[Any]], Any] | None = None) -> T:
        """Return a copy for the caller, of the answer in the cache or of a new one; with `say_sync` without waiting."""
        key = (at_node.get(), key)
        kept = self._kept.get(key)
        if kept is not None and self._clock() < kept[0]:
            found = kept[1]
        elif say_sync is not None:
            found = await self._fly(key, made, say_sync)
        else:
            # The generation excludes a read that started before this program changed something.
            flights, flight_key = self._flights, (asyncio.get_running_loop(), key, self._generation)
            flight = flights.get(flight_key)
            if flight is None:  # a hundred jobs that read at the same moment share one statement
                flight = flights[flight_key] = asyncio.create_task(self._fly(key, made, self._say))
                flight.add_done_callback(lambda done: (flights.pop(flight_key), done.cancelled() or done.exception()))
            found = await asyncio.shield(flight)
        own: T = _own(found)
        return own

    async def _fly(self, key: Hashable, made: Steps[T], say: Callable[[Call[Any]], Any]) -> T:
        since, generation = self._clock(), self._generation
        found = await drive(made, say)
        self._keep(key, found, since, generation)
        return found

    def _keep(self, key: Hashable, found: object, since: float, generation: int) -> None:
        if generation != self._generation:  # this program changed something during the read
            return
        self._kept.pop(key, None)
        while len(self._kept) >= _MOST:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[key] = (since + self.fresh_for.total_seconds(), found)

    async def _change(self, made: Call[T] | Steps[T], conn: object | None) -> T:
        say: Say = self._say if conn is None else partial(run, conn)
        try:
            return await (say(made) if isinstance(made, Call) else drive(made, say))
        finally:
            self.forget()

    async def _say(self, call: Call[Any]) -> Any:
        loop = asyncio.get_running_loop()
        for _, of, say in reversed(self._ways):
            if of is loop:
                return await say(call)
        return await run(self._app, call)

    def _say_sync(self, call: Call[Any]) -> Any:
        if not in_loop():
            for pid, loop, say in reversed(self._ways):
                if pid == os.getpid() and loop.is_running():  # a forked process has only a copy of it
                    return asyncio.run_coroutine_threadsafe(say(call), loop).result()
        return run_sync(self._app, call)

    def __repr__(self) -> str:
        return f"<Providers of {self._app.name}>"


def _own(found: Any) -> Any:
    """Return a copy of a provider, or None, for one caller, so that its changes to the settings stay its own."""
    return found and replace(found, settings=deepcopy(found.settings), secrets=dict(found.secrets))
