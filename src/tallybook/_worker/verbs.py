"""What a running handler may say about its attempt, over a connection that is opened when the first one does."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar

from tallybook._db import aio
from tallybook._db.calls import Call
from tallybook._db.link import Link
from tallybook._model.failure import safe_text
from tallybook._model.payload import encode
from tallybook._worker.jobs import Running
from tallybook.errors import ConfigError, LeaseLost

if TYPE_CHECKING:
    from tallybook._app import App
    from tallybook.providers import Providers

T = TypeVar("T")

_PROGRESS = "select tallybook.progress(%s::uuid, %s::bigint, %s::int, %s::real, %s::text)"
_CHECKPOINT = "select tallybook.checkpoint(%s::uuid, %s::bigint, %s::int, %s::jsonb)"
_CHECKPOINT_OF = "select tallybook.checkpoint_of(%s::bigint)::text"


class Verbs:
    """The verbs behind Context.progress and its like. LeaseLost where the attempt is not this worker's any more."""

    app: App | None = None

    def __init__(self, link: Link, app: App | None = None) -> None:
        self._link = link
        self.app = app
        self.loop: asyncio.AbstractEventLoop | None = None
        self.providers: Providers | None = None

    async def ask(self, call: Call[T]) -> T:
        """The result of a verb of the App's on this connection."""

        async def say(conn: Any) -> T:
            return await aio.run(conn, call)

        return await self._link.run(say)

    async def progress(self, job: Running, done: float | None, message: str | None) -> None:
        """How far it is."""
        if done is not None and (isinstance(done, bool) or not isinstance(done, int | float) or not 0 <= done <= 1):
            raise ConfigError("done", done, "goes from 0 to 1, or None where nobody knows")
        text = None if message is None else safe_text(message, 1000)
        await self._say(job, _PROGRESS, None if done is None else float(done), text)

    async def set_checkpoint(self, job: Running, value: object) -> None:
        """Where its next attempt can go on."""
        await self._say(job, _CHECKPOINT, encode(value, task=job.task_name, what="checkpoint"))

    async def get_checkpoint(self, job: Running) -> Any:
        """The last one of any attempt; None: none."""

        async def ask(conn: Any) -> Any:
            cursor = await conn.execute(_CHECKPOINT_OF, (job.job_id,))
            return (await cursor.fetchone())[0]

        text = await self._link.run(ask)
        return None if text is None else json.loads(text)

    async def _say(self, job: Running, sql: str, *values: object) -> None:
        async def say(conn: Any) -> bool:
            cursor = await conn.execute(sql, (job.lease.lease, job.job_id, job.attempt, *values))
            return bool((await cursor.fetchone())[0])

        if not await self._link.run(say):
            raise LeaseLost(job.job_id, job.attempt)
