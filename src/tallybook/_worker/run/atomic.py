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
from tallybook._db.declared import Call
from tallybook._db.link import dsn_for_people
from tallybook._db.policy import backoff, first_line
from tallybook._db.sync import chain, done
from tallybook._db.transactions import Begun, Library, conflicts, gone, interrupted
from tallybook._model.outcome import Outcome
from tallybook._task.task import Owner
from tallybook._worker.deadline import leavable
from tallybook._worker.jobs import AnyTask, Running
from tallybook._worker.run.ending import Ended, how_to_end
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

    def __init__(self, app: Owner, dsn: str, name: str) -> None:
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
            if key in self._libraries:
                pass
            elif kind in _DRIVERS:
                self._libraries[key] = _DRIVERS[kind](self._dsn, self._name)
            elif kind == "django":
                self._libraries[key] = transactions.Django(alias)
            else:
                from tallybook._db.sqlalchemy_sessions import Sessions

                self._libraries[key] = Sessions(self._dsn, self._name, self._app._sessions, kind)
            return self._libraries[key]


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
    how = how_to_end(job, known, value) if isinstance(value, Outcome) else None
    if how is None:
        result = None if value is None or isinstance(value, Outcome) else known.result_text(value)
        return "complete", ends.atomic_complete(attempt, result), None
    values = {
        name: f"{value.total_seconds():.6f} s" if isinstance(value, timedelta) else value
        for name, value in how.values.items()
    }
    return how.verb, ends.atomic(how.declared, attempt, **values), how.wake_in


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
