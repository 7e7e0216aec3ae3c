"""What a handler does through its Context: verbs for its attempt, and blocks that it enters when its turn comes.

The verbs use a connection that the first of them opens. `ctx.lock`: one holder of a name among all processes, while the
lock's own session lives. `ctx.provider`: the limits of a provider set when the call may start, and a 429 pushes them
back.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from tallybook._db.calls import PUSH
from tallybook._db.declared import Call, Declared
from tallybook._db.driver import AsyncConnection, Error
from tallybook._db.ends import AS_ARRAYS, ATTEMPT
from tallybook._db.link import Link
from tallybook._db.pooler import make_fit
from tallybook._db.sync import run_on
from tallybook._model.durations import parse_duration
from tallybook._model.failure import safe_text
from tallybook._model.options import check_limits, check_name
from tallybook._model.outcome import Outcome
from tallybook._model.payload import encode
from tallybook._model.provider import Provider
from tallybook._model.retry_after import retry_after
from tallybook._worker.jobs import Running
from tallybook._worker.settings import FAR_AHEAD
from tallybook.errors import ConfigError, LeaseLost, LockNotAvailable, NotSupported

log = logging.getLogger("tallybook.worker")
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
# Try instead of waiting: a waiting statement holds a snapshot, for which vacuum and prune would have to wait.
_TAKE = "select pg_try_advisory_lock(1413565450, hashtext(%s))"
_GIVE_BACK = "select pg_advisory_unlock(1413565450, hashtext(%s))"
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.5
_UNSAID = timedelta(minutes=1)
"""How long the limits are closed after a 429 without a Retry-After."""


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


class Lock:
    """A lock over all processes: `async with ctx.lock("ledger"):`, in a plain handler `with ctx.lock("ledger"):`."""

    def __init__(self, ctx: Any, name: str, wait: timedelta | str | None, dsn: str) -> None:
        check_name("name", name, 200)
        self._name = name
        self._seconds = None if wait is None else parse_duration(wait, option="wait").total_seconds()
        self._link = Link(dsn, "lock", on_connect=make_fit)
        self._ctx = ctx  # a Context, which makes this

    async def __aenter__(self) -> None:
        loop, pause = asyncio.get_running_loop(), _FIRST_WAIT
        until = None if self._seconds is None else loop.time() + self._seconds
        try:
            while not await self._link.run(self._take):
                left = _LONGEST_WAIT if until is None else until - loop.time()
                if left <= 0 or self._ctx.cancelled:
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
        self._ctx._wait(self.__aenter__())

    def __exit__(self, kind: object, *_: object) -> None:
        self._ctx._wait(self.__aexit__(kind))


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
        found: Provider = self._ctx._wait(self.__aenter__())
        return found

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ctx._wait(self.__aexit__(kind, error, trace))


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
