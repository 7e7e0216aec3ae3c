"""Run a verb once on one of the app's own connections, even if the connection is lost.

An enqueue runs in a transaction whose number is known before its COMMIT is sent. If the connection is lost earlier,
nothing happened, and the enqueue is sent again. If it is lost at COMMIT, the outcome is unknown. Then a new connection
waits for that transaction to end and checks whether its jobs exist. After a crash of the server, a number or a job's id
can be assigned again, so the job must also not be younger than that transaction. Verbs that may run twice are sent
again; all others raise CommitUnknown.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Generic

import psycopg
from psycopg.rows import tuple_row

from tallybook._db.declared import Call, Declared, T
from tallybook._db.policy import Action, action_for, backoff, first_line
from tallybook._db.sync import got, refusal, run_on
from tallybook._model.job import Job
from tallybook.errors import CommitUnknown, QueueUnavailable

PATIENCE = 10.0  # seconds for which a verb is retried before its caller gets an error
_CONTENTIONS = 3
_ENQUEUES = ("enqueue", "enqueue_many")
_TWICE = (
    "cancel", "dead_letters", "get", "pause", "provider", "provider_set", "provider_resolve", "provider_rotate",
    "provider_secret_set", "providers", "result", "resume", "route_set", "state",
)  # fmt: skip
# The statement, whose row also has the transaction's number and the time. The subquery is volatile, so it runs first:
# the time is not before that of its jobs.
_MARKED = "select r.said, cast(pg_current_xact_id() as text), cast(clock_timestamp() as text) from ({}) as r(said)"
_THERE = Declared("_enqueued(p_job_ids bigint[], p_before timestamptz) -> bigint")


class _Saying(Generic[T]):
    """One verb, from the first try to its result."""

    def __init__(self, call: Call[T], server: str) -> None:
        self.call = call
        self.server = server
        self.enqueues = call.verb in _ENQUEUES
        self.mark: list[str] | None = None  # transaction number and time, set before the COMMIT is sent
        self.said: Any = None
        self.committing = False
        self.sent = False
        self._until = time.monotonic() + PATIENCE
        self._failures = 0

    @property
    def ids(self) -> list[int]:
        """The jobs that this transaction created; empty if each met its unique key and may have changed another."""
        listed: list[Job] = self.said if isinstance(self.said, list) else [self.said]
        return [job.id for job in listed if job.created]

    def failed(self, error: psycopg.Error | OSError | QueueUnavailable) -> float:
        """Return the seconds to wait before the next try, or raise the error for the caller."""
        if isinstance(error, QueueUnavailable):  # no connection: without an earlier one, the caller gets the error
            action = Action.RECONNECT if self.sent else Action.CALLER
        else:
            action = action_for(error)
        lost = action in (Action.RECONNECT, Action.WAIT)
        over = time.monotonic() > self._until or (action is Action.AGAIN and self._failures >= _CONTENTIONS)
        unsafe = lost and self.sent and not self.enqueues and self.call.verb not in _TWICE
        if unsafe or (self.committing and (over or action is Action.CALLER)):
            raise CommitUnknown(self.call.verb, self.server) from error
        if lost and over and not isinstance(error, QueueUnavailable):
            raise QueueUnavailable(self.server, first_line(error)) from error
        if over or not (lost or action is Action.AGAIN):
            raise error
        self._failures += 1
        return min(backoff(self._failures - 1), 1.0)


async def run(
    connection: Callable[[], AbstractAsyncContextManager[Any]], call: Call[T], server: str, *, sync: bool = False
) -> T:
    """Return the result of `call`, run once; `sync`: without waiting. Raises QueueUnavailable or CommitUnknown."""
    saying = _Saying(call, server)
    while True:
        try:
            async with connection() as conn:
                if not (saying.committing and await _is_there(conn, saying)):
                    saying.mark, saying.committing, saying.sent = None, False, True
                    await _say(conn, saying, sync=sync)
                return saying.said  # type: ignore[no-any-return]
        except (psycopg.Error, OSError, QueueUnavailable) as error:
            pause = saying.failed(error)
        await got((time.sleep if sync else asyncio.sleep)(pause))


async def _say(conn: Any, saying: _Saying[T], *, sync: bool) -> None:
    if not saying.enqueues:
        saying.said = await run_on(conn, saying.call, sync=sync)
        return
    try:
        async with AsyncExitStack() as stack:  # in a pipeline: one round trip to the row, one for the commit
            await got((stack.enter_context if sync else stack.enter_async_context)(conn.pipeline()))
            await got(conn.execute("begin isolation level read committed"))
            cursor = conn.cursor(row_factory=tuple_row)
            await got(cursor.execute(_MARKED.format(saying.call.sql), saying.call.params))
            said, *mark = await got(cursor.fetchone())
            saying.said, saying.mark, saying.committing = saying.call.row(said), mark, True
            await got(cursor.execute("commit"))
    except BaseException as error:
        # A synchronous connection is not used again.
        if not sync and not conn.closed and conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            await conn.rollback()
        if ours := refusal(error, saying.call):
            raise ours from error
        raise


async def _is_there(conn: Any, saying: _Saying[Any]) -> bool:
    assert saying.mark is not None
    try:
        status = await _row(conn, "select pg_xact_status(%s::text::xid8)", saying.mark[0])
    except psycopg.errors.InvalidParameterValue:  # a number of no transaction here: a standby without it
        return False
    if status == ("in progress",):  # the server has not noticed the loss of its client, or waits for a standby
        raise psycopg.OperationalError("the transaction has not ended yet")
    if not saying.ids:
        return bool(status == ("committed",))
    return bool(await _row(conn, _THERE.worker, saying.ids, saying.mark[1]) == (len(saying.ids),))


async def _row(conn: Any, sql: str, *params: object) -> Any:
    return await got((await got(conn.execute(sql, params))).fetchone())
