"""Verbs of a running handler for its attempt, over a connection that the first verb opens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from tallybook._db.declared import Call, Declared
from tallybook._db.ends import AS_ARRAYS, ATTEMPT
from tallybook._db.link import Link
from tallybook._db.rates import PUSH
from tallybook._db.sync import run_on
from tallybook._model.failure import safe_text
from tallybook._model.options import check_limits
from tallybook._model.outcome import Outcome
from tallybook._model.payload import encode
from tallybook._worker.jobs import Running
from tallybook._worker.settings import FAR_AHEAD
from tallybook.errors import ConfigError, LeaseLost

T = TypeVar("T")

_PROGRESS = Declared(f"progress({ATTEMPT}, done real, message text) -> boolean")
_CHECKPOINT = Declared(f"checkpoint({ATTEMPT}, value jsonb) -> boolean")
_CHECKPOINT_OF = Declared("checkpoint_of(job_id bigint) -> jsonb")
_LIMIT_TAKE = Declared("""
  limit_take(leases uuid[], job_ids bigint[], attempts int[], names text[], ahead interval, missed boolean)
  -> rows (starts_in float8, unknown text, late float8, permits boolean)""")
_IN_SECONDS = "make_interval(secs => {seconds:float8})"
_LIMIT = f"""\
select starts_in, unknown, late, permits
  from {_LIMIT_TAKE.called("order", **AS_ARRAYS, ahead=_IN_SECONDS)}"""  # noqa: S608
_PUSH = "select " + PUSH.called("order", until="clock_timestamp() + {by:interval}")


class Postponed(Outcome):
    """This job's turn at a limit is not near: the job is scheduled for it, and the attempt has ended."""


class Verbs:
    """The verbs behind Context.progress and the like. They raise LeaseLost if this worker no longer has the attempt."""

    session_dsn: str | None = None
    """The DSN for the session of a handler's lock; None: locks are not available here."""

    def __init__(self, link: Link, session_dsn: str | None = None) -> None:
        self._link = link
        self.session_dsn = session_dsn
        self.loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, call: Call[T]) -> T:
        """Run a verb of the App on this connection; return its result."""
        return await self._link.run(lambda conn: run_on(conn, call, sync=False))

    async def progress(self, job: Running, done: float | None, message: str | None) -> None:
        if done is not None and (isinstance(done, bool) or not isinstance(done, int | float) or not 0 <= done <= 1):
            raise ConfigError("done", done, "must be from 0 to 1, or None if unknown")
        text = None if message is None else safe_text(message, 1000)
        await self._say(job, _PROGRESS.worker, None if done is None else float(done), text)

    async def set_checkpoint(self, job: Running, value: object) -> None:
        await self._say(job, _CHECKPOINT.worker, encode(value, task=job.task_name, what="checkpoint"))

    async def get_checkpoint(self, job: Running) -> Any:
        """Return the last checkpoint of any attempt; None: there is none."""
        ((text,),) = await self._link.rows(f"{_CHECKPOINT_OF.worker}::text", job.job_id)
        return None if text is None else json.loads(text)

    async def limit(self, job: Running, keys: Sequence[str]) -> None:
        """Take a turn at each key and return at its time; if that is not near, raise Postponed to end the attempt."""
        loop = asyncio.get_running_loop()
        asked, missed, ahead = loop.time(), False, 0.0

        async def ask(conn: Any) -> Any:
            nonlocal asked
            asked = loop.time()  # not before the connection is open
            cursor = await conn.execute(_LIMIT, (job.lease.lease, job.job_id, job.attempt, list(keys), ahead, missed))
            return await cursor.fetchone()

        check_limits(tuple(keys))
        while True:
            found = await self._link.run(ask)
            if found is None:
                raise Postponed(keys)
            starts_in, unknown, late, permits = found
            if unknown is None and starts_in is None:  # the limit skips jobs that find its permits taken
                raise Postponed(keys)
            ahead = min(1.5 * (loop.time() - asked), FAR_AHEAD)  # with slow answers, the start may be as late
            if permits:
                job.holds(keys)
            if unknown is not None:
                hint = "Declare it with app.rate_limit, app.concurrency_limit or app.breaker"
                raise ConfigError("limit", unknown, "there is no limit of that name", hint=hint)
            if starts_in > 0:
                await asyncio.sleep(starts_in)
            if loop.time() - asked - starts_in <= late:
                return
            missed = True

    async def push(self, job: Running, key: str, by: timedelta) -> None:
        """Allow no call of a key within this time."""
        await self._link.rows(_PUSH, key, checked_push(by))

    async def _say(self, job: Running, sql: str, *values: object) -> None:
        ((held,),) = await self._link.rows(sql, job.lease.lease, job.job_id, job.attempt, *values)
        if not held:
            raise LeaseLost(job.job_id, job.attempt)


def checked_push(by: timedelta) -> timedelta:
    """Return the duration; raise ConfigError if a limit cannot be pushed back by it."""
    if not isinstance(by, timedelta) or by < timedelta(0):
        raise ConfigError("retry_after", by, "must be a timedelta of at least 0", hint="Write timedelta(seconds=30)")
    return by
