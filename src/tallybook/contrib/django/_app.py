"""An App in a Django project: it uses the database of the settings, and no job gets a connection that is too old."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from weakref import WeakSet

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import close_old_connections, connections

import tallybook
from tallybook import Context
from tallybook._model.at_node import at_node
from tallybook.contrib.django import _settings


class App(tallybook.App):
    """An App that uses the database of settings.TALLYBOOK and closes Django's old connections around its jobs.

    Django closes a connection that is broken, or older than CONN_MAX_AGE, at the start and end of a request. Here a job
    takes the place of a request. The ORM's calls of an async job share no thread and no connection with another job
    that runs. A `dsn` passed here, or to a command by --dsn, overrides the settings; TALLYBOOK_DSN does not.

        app = App("shop")
    """

    def __init__(
        self, name: str, *, dsn: str | None = None, session: Callable[[], Any] | tuple[Callable[[], Any], ...] = ()
    ) -> None:
        super().__init__(name, dsn=dsn, session=session)
        self._used: WeakSet[Any] = WeakSet()
        # Those of async jobs that have ended; each has a thread, and connections that the next job uses.
        self._spare: list[ThreadSensitiveContext] = []
        self.lifespan(self._closed_at_the_end)
        self.around_job(self._fresh_in_thread)
        self.around_job(self._fresh_on_loop)

    def conninfo(self, dsn: str | None = None) -> str:
        """Return the effective connection string: `dsn`, the App's own, or that of the database in the settings.

        In a handler of a job on one of several nodes, that node's DSN precedes the App's own and the settings.
        """
        if at_node.get() is None:
            dsn = dsn or self.dsn or _settings.dsn(_settings.read().database)
        return super().conninfo(dsn)

    def _fresh_in_thread(self, ctx: Context) -> Iterator[None]:
        close_old_connections()  # Django keeps connections per thread, and this is the handler's thread
        try:
            yield
        finally:
            self._after()

    async def _fresh_on_loop(self, ctx: Context) -> AsyncIterator[None]:
        if not ctx.app._names[ctx.task].is_async:
            yield
            return
        # As with requests under ASGI: the ORM's calls of a job share a thread, in which no other running job has calls.
        own = self._spare.pop() if self._spare else ThreadSensitiveContext()
        token = SyncToAsync.thread_sensitive_context.set(own)
        try:
            await sync_to_async(close_old_connections)()
            yield
        finally:
            if not isinstance(sys.exception(), GeneratorExit):  # then the job is abandoned, and nothing can be awaited
                await sync_to_async(self._after)()
                SyncToAsync.thread_sensitive_context.reset(token)
                self._spare.append(own)

    def _after(self) -> None:
        """In the thread of a job: close old connections, and note those that remain."""
        close_old_connections()
        self._used.update(connections.all(initialized_only=True))

    async def _closed_at_the_end(self, ctx: Context) -> AsyncIterator[None]:
        """Close connections at the end of a worker or a drain; otherwise a test database could not be dropped."""
        yield
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for conn in tuple(self._used):
            if not conn.in_atomic_block:  # a test's own connection, in async code
                conn.inc_thread_sharing()  # its thread runs no more jobs
                conn.close()
                conn.dec_thread_sharing()
        self._used.clear()
        self._spare.clear()  # their threads end
