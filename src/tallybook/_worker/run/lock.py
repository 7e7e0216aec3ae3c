"""`ctx.lock`: one holder of a name among all processes, while the lock's own session lives."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

from tallybook._db.driver import AsyncConnection, Error
from tallybook._db.link import Link
from tallybook._db.pooler import make_fit
from tallybook._model.durations import parse_duration
from tallybook._model.options import check_name
from tallybook.errors import LockNotAvailable, NotSupported

log = logging.getLogger("tallybook.worker")

# Try instead of waiting: a waiting statement holds a snapshot, for which vacuum and prune would have to wait.
_TAKE = "select pg_try_advisory_lock(1413565450, hashtext(%s))"
_GIVE_BACK = "select pg_advisory_unlock(1413565450, hashtext(%s))"
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.5


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
