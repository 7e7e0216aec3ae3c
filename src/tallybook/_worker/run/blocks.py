"""Blocks that a handler enters when its turn comes.

`ctx.lock`: one holder of a name among all processes, while the lock's own session lives. `ctx.provider`: the limits of
a provider set when the call may start, and a 429 pushes them back.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from tallybook._db.driver import AsyncConnection, Error
from tallybook._db.link import Link
from tallybook._db.pooler import make_fit
from tallybook._model.durations import parse_duration
from tallybook._model.options import check_name
from tallybook._model.provider import Provider
from tallybook._model.retry_after import retry_after
from tallybook.errors import ConfigError, LockNotAvailable, NotSupported

log = logging.getLogger("tallybook.worker")

# Try instead of waiting: a waiting statement holds a snapshot, for which vacuum and prune would have to wait.
_TAKE = "select pg_try_advisory_lock(1413565450, hashtext(%s))"
_GIVE_BACK = "select pg_advisory_unlock(1413565450, hashtext(%s))"
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.5
_UNSAID = timedelta(minutes=1)
"""How long the limits are closed after a 429 without a Retry-After."""


class Lock:
    """A lock over all processes: `async with ctx.lock("ledger"):`, in a plain handler `with ctx.lock("ledger"):`."""

    def __init__(
        self,
        name: str,
        wait: timedelta | str | None,
        dsn: str,
        *,
        told: Callable[[], bool],
        here: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        check_name("name", name, 200)
        self._name = name
        self._seconds = None if wait is None else parse_duration(wait, option="wait").total_seconds()
        self._link = Link(dsn, "lock", on_connect=make_fit)
        self._told, self._here = told, here

    async def __aenter__(self) -> None:
        loop, pause = asyncio.get_running_loop(), _FIRST_WAIT
        until = None if self._seconds is None else loop.time() + self._seconds
        try:
            while not await self._link.run(self._take):
                left = _LONGEST_WAIT if until is None else until - loop.time()
                if left <= 0 or self._told():
                    raise LockNotAvailable(self._name, self._seconds)
                await asyncio.sleep(min(pause, left))
                pause = min(pause * 1.5, _LONGEST_WAIT)
        except BaseException:
            await self._link.close()
            raise

    async def _take(self, conn: AsyncConnection) -> bool:
        if self._link.pooled:
            hint = "Start the worker with --direct-dsn to bypass the pooler, or give the task exclusive=True"
            raise NotSupported("ctx.lock behind a pooler in transaction mode", hint=hint)
        row = await (await conn.execute(_TAKE, (self._name,))).fetchone()
        return row is not None and bool(row[0])

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            if self._link.conn is not None and kind is not GeneratorExit:  # a GeneratorExit allows no await
                await self._link.conn.execute(_GIVE_BACK, (self._name,))
        except (Error, OSError) as error:
            log.warning("lock %r was lost with its session: %s", self._name, str(error).strip())
        finally:
            await self._link.close()

    def __enter__(self) -> None:
        self._here(self.__aenter__())

    def __exit__(self, kind: object, *_: object) -> None:
        self._here(self.__aexit__(kind))


class Turn:
    """Returned by `ctx.provider`: enters when a call may start; for `async with`, or `with` in a plain handler."""

    def __init__(self, ctx: Any, provider: str | Provider) -> None:
        self._ctx = ctx  # a Context, which makes this
        self._provider = provider
        self._limits: tuple[str, ...] = ()

    async def __aenter__(self) -> Provider:
        asked = self._provider
        found = asked if isinstance(asked, Provider) else await self._ctx.providers.get(asked)
        self._limits = _limits_of(found)
        if self._limits:
            await self._ctx.limit(*self._limits)
        return found

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._limits and (wait := _refused_for(error)) is not None:
            for key in self._limits:
                await self._ctx.push_back(key, wait)
            await self._ctx.limit(*self._limits)  # the next turn is not near: the attempt ends here, without a failure

    def __enter__(self) -> Provider:
        asked = self._provider
        found = asked if isinstance(asked, Provider) else self._ctx.providers.get_sync(asked)
        self._limits = _limits_of(found)
        if self._limits:
            self._ctx.limit_sync(*self._limits)
        return found

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._limits and (wait := _refused_for(error)) is not None:
            for key in self._limits:
                self._ctx.push_back_sync(key, wait)
            self._ctx.limit_sync(*self._limits)


def _limits_of(provider: Provider) -> tuple[str, ...]:
    """Return the setting `limits`, a list of names of rate limits. Raises ConfigError for anything else."""
    found = provider.settings.get("limits", [])
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        hint = 'Write ["provider:acme"]'
        raise ConfigError(f"limits of provider {provider.name!r}", found, "not a list of names", hint=hint)
    return tuple(found)


def _refused_for(error: BaseException | None) -> timedelta | None:
    """Return the wait that a 429 error of any HTTP library asks for; None: the error is no 429."""
    with suppress(Exception):  # a property of a foreign exception may raise
        for one in (error, getattr(error, "response", None)):
            if 429 in (getattr(one, name, None) for name in ("status", "status_code", "code")):
                assert error is not None
                wait = retry_after(error, datetime.now(UTC))
                return _UNSAID if wait is None else wait
    return None
