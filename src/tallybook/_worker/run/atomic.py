"""Atomic tasks: the handler runs in a transaction that also stores the end of its attempt, just before COMMIT.

So its writes, the jobs that it enqueues there and the end are committed together or not at all. An end is accepted
once, from the lease that holds the attempt. A worker that has lost its job can therefore commit nothing.

    begin -> handler -> end (refused: roll back) -> commit

From sending the end until the server's answer to COMMIT, the attempt is in doubt. Any error in that time, or a cancel,
drops the connection. Then DoubtfulEnds finds out how the attempt ended before anything else is stored.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from tallybook._db import ends, sync, transactions
from tallybook._db.both import done
from tallybook._db.declared import Call
from tallybook._db.kinds import chain
from tallybook._db.link import dsn_for_people
from tallybook._db.policy import backoff, first_line
from tallybook._db.transactions import Begun, Library, conflicts, gone, interrupted
from tallybook._model.failure import safe_text
from tallybook._model.outcome import Cancel, Dead, Outcome, Snooze
from tallybook._model.subject_outcome import Reject, SubjectOutcome
from tallybook._worker.deadline import leavable
from tallybook._worker.jobs import AnyTask, Running
from tallybook._worker.run.ending import LONGEST_REASON, Ended, end_of, given_up, put_off, rejected
from tallybook._worker.run.served import ServedApp
from tallybook.errors import LeaseLost, QueueUnavailable, SignatureError, TransactionError

log = logging.getLogger("tallybook.worker")

# A handler whose transaction lost against another one (40001, 40P01) reruns at once; this many runs per attempt.
_RUNS = 4
_ROLLBACK_S = 5.0
_DRIVERS: dict[str, Callable[[str, str], Library]] = {
    "async psycopg": partial(transactions.Psycopg, transactions.GivenAsync),
    "psycopg": partial(transactions.Psycopg, transactions.Given),
    "async asyncpg": transactions.Asyncpg,
}


class Atomic:
    """Runs the handlers of atomic tasks. Connections are opened when the first job needs them."""

    def __init__(self, app: ServedApp, dsn: str, name: str) -> None:
        self._app = app
        self._dsn = dsn
        self._name = f"tallybook {name}"[:63]
        self._libraries: dict[str, Library] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def wrap(self, job: Running, known: AnyTask) -> Callable[..., Any]:
        """Return the function that the runner calls instead of the task's; it takes the args after the connection."""

        async def run(*positional: Any, **named: Any) -> Ended:
            return await self._again(job, known, positional, named)

        return run if known.is_async else lambda *positional, **named: done(run(*positional, **named))

    async def close(self) -> None:
        """Close idle connections; one in use is closed when its job has ended."""
        self._closing.set()
        for library in list(self._libraries.values()):
            with suppress(Exception):
                await library.close()

    async def _again(self, job: Running, known: AnyTask, positional: Any, named: Any) -> Ended:
        args = json.dumps(job.args)  # the handler may change its args
        library = self._library(known)
        for run in range(1, _RUNS + 1):
            try:
                return await self._run(library, job, known, positional, named)
            except Exception as error:
                if run == _RUNS or not conflicts(error) or job.cancel_reason is not None or self._closing.is_set():
                    raise
                job.in_doubt = False  # the server reported that it rolled back
                log.info("%s %s: its transaction conflicted with another one; retrying at once", known.name, job.job_id)
            await self._wait(known, random.uniform(0.005, 0.02) * 2**run)
            fresh, named = known.args.load(json.loads(args))
            positional = [*positional[: int(known.wants_context)], *fresh]
        raise AssertionError("not reached")

    async def _run(self, library: Library, job: Running, known: AnyTask, positional: Any, named: Any) -> Ended:
        begun = await self._begin(library, job, known)
        interrupt = _Interrupt(begun.driver)
        if not known.is_async:
            job.interrupt = interrupt
        well = False
        try:
            if not known.is_async and _stopped(job):
                raise asyncio.CancelledError
            value = known.fn(begun.given, *positional, **named)
            if known.is_async:
                value = await (value if job.guard is None else leavable(value, job))
            elif inspect.iscoroutine(value):
                value.close()
                reason = "an async function behind a plain decorator cannot run in a plain transaction"
                raise SignatureError(known.name, reason)
            verb, call, wake_in = _end(job, known, value)
            await library.flush(begun)
            job.in_doubt = True
            said = await sync.run_on(begun.given, call, sync=not known.is_async)
            _check(said, job, known)
            await library.commit(begun)
            job.in_doubt, well = False, True
        except BaseException as error:
            well = not job.in_doubt and await _rolled_back(library, begun, known)
            if isinstance(error, StopIteration):  # it would end the coroutine, with a text about coroutines
                raise RuntimeError("the handler raised StopIteration") from error
            if interrupt.used and interrupted(error):
                raise asyncio.CancelledError from error
            raise
        finally:
            job.interrupt = None
            # A cancel can arrive late, and would then hit the next job.
            await _give_back(library, begun, well=interrupt.over() and well)
        return Ended(verb, said, wake_in)

    async def _begin(self, library: Library, job: Running, known: AnyTask) -> Begun:
        failures = 0
        while True:
            try:
                return await library.begin()
            except Exception as error:
                if not gone(error):
                    raise
                failures += 1
                lost = error
            if failures in (2, 10):  # the first is silent: a restarted server answers the second try
                message = "no transaction for atomic tasks: cannot reach %s: %s"
                log.warning(message, dsn_for_people(self._dsn), first_line(chain(lost)[-1]))
            if await self._wait(known, backoff(failures)):
                raise QueueUnavailable(dsn_for_people(self._dsn), "the worker stops") from lost
            if not known.is_async and _stopped(job):
                raise asyncio.CancelledError from lost

    async def _wait(self, known: AnyTask, seconds: float) -> bool:
        """Wait; return whether the worker stops meanwhile, which cancels an async handler."""
        if not known.is_async:
            return self._closing.wait(seconds)
        await asyncio.sleep(seconds)
        return False

    def _library(self, known: AnyTask) -> Library:
        kind, alias = known.transaction, known.atomic if isinstance(known.atomic, str) else "default"
        key = f"django {alias}" if kind == "django" else kind
        with self._lock:
            if key not in self._libraries:
                self._libraries[key] = self._made(kind, alias)
            return self._libraries[key]

    def _made(self, kind: str, alias: str) -> Library:
        if kind in _DRIVERS:
            return _DRIVERS[kind](self._dsn, self._name)
        if kind == "django":
            return transactions.Django(alias)
        from tallybook._db.sqlalchemy_sessions import Sessions

        return Sessions(self._dsn, self._name, self._app._sessions, kind)


class _Interrupt:
    """Cancels, from another thread, the database statement that a job waits for, while the connection is that job's."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._over = False
        self.used = False

    def __call__(self) -> None:
        with self._lock:
            if self._over:
                return
            self.used = True
            with suppress(Exception):
                self._driver.cancel()

    def over(self) -> bool:
        """Stop interrupts, before another job gets the connection; return whether it was never interrupted."""
        with self._lock:
            self._over = True
            return not self.used


def _stopped(job: Running) -> bool:
    """Whether a plain handler must not start any more: no cancel reaches its thread while it waits for a connection."""
    return job.cancel_reason is not None or (job.guard is not None and (job.guard.timed_out or job.guard.left))


async def _rolled_back(library: Library, begun: Begun, known: AnyTask) -> bool:
    with suppress(Exception):
        async with asyncio.timeout(_ROLLBACK_S) if known.is_async else nullcontext():
            await library.rollback(begun)
            return True
    return False


async def _give_back(library: Library, begun: Begun, *, well: bool) -> None:
    try:
        if well:
            await library.keep(begun)
    except BaseException as error:
        well = False
        if not isinstance(error, Exception):
            raise
    finally:
        if not well:
            with suppress(Exception):
                await library.drop(begun)


def _end(job: Running, known: AnyTask, value: Any) -> tuple[str, Call[str], timedelta | None]:
    """Return the end of this attempt, as the last statement of its transaction."""
    attempt = (job.lease.lease, job.job_id, job.attempt)
    if isinstance(value, SubjectOutcome) and not isinstance(value, Reject):
        end = end_of(job, known, value)
        if isinstance(end, ends.SubjectEnd):
            return end.verb, end.atomic(attempt), end.wake_in
        value = end  # None: completed, or Dead
    if not isinstance(value, Outcome):
        result = None if value is None else known.result_text(value)
        return "complete", ends.atomic_complete(attempt, result), None
    match value:
        case Snooze():
            delay = put_off(value)
            return "snooze", ends.atomic(ends.SNOOZE, attempt, delay=_seconds(delay)), delay
        case Cancel():
            reason = safe_text(value.reason, LONGEST_REASON) or None
            return "cancel", ends.atomic(ends.CANCEL_RUNNING, attempt, reason=reason), None
        case Dead():
            return "fail", _fail(attempt, given_up(value, job.worker_name), None, None, final=True), None
        case Reject():
            error, then = rejected(job, known, value)
            return "fail", _fail(attempt, error, then.delay, known.max_attempts, final=then.final), then.delay
        case _:
            raise TypeError(f"{type(value).__name__} is not Snooze, Cancel or Dead")


def _fail(
    attempt: ends.Attempt, error: dict[str, Any], delay: timedelta | None, limit: int | None, *, final: bool
) -> Call[str]:
    values = {"retry_in": None if delay is None else _seconds(delay), "max_attempts": limit, "final": final}
    return ends.atomic(ends.FAIL, attempt, error=json.dumps(error), **values)


def _seconds(delay: timedelta) -> str:
    return f"{delay.total_seconds():.6f} s"


def _check(said: str, job: Running, known: AnyTask) -> None:
    if said == "refused":
        raise LeaseLost(job.job_id, job.attempt)
    if said == "left":
        job.in_doubt = False
        raise TransactionError(
            f"the handler of the atomic task {known.name!r} has ended the transaction that it was given",
            detail="What it committed stays; the job's end can no longer be committed with it",
            hint="Leave COMMIT and ROLLBACK to the worker; use savepoints, or a task that is not atomic",
        )
