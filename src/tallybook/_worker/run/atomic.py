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
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tallybook._db import aio, ends, sync, transactions
from tallybook._db.declared import Call
from tallybook._db.kinds import chain
from tallybook._db.link import backoff, dsn_for_people
from tallybook._db.transactions import AsyncLibrary, Begun, Library, conflicts, gone, interrupted
from tallybook._model.failure import safe_text
from tallybook._model.outcome import Cancel, Dead, Outcome, Snooze
from tallybook._model.subject_outcome import Reject, SubjectOutcome
from tallybook._worker.deadline import Leavable
from tallybook._worker.jobs import Running
from tallybook._worker.run.retrying import LONGEST_REASON, after_rejection, given_up, put_off
from tallybook._worker.run.served import ServedApp
from tallybook._worker.run.served_task import ServedTask
from tallybook._worker.run.subjects import end_of, rejection
from tallybook.errors import LeaseLost, QueueUnavailable, SignatureError, TransactionError

log = logging.getLogger("tallybook.worker")

# A handler whose transaction lost against another one (40001, 40P01) reruns at once; this many runs per attempt.
_RUNS = 4
_ROLLBACK_S = 5.0
_DRIVERS: dict[str, Callable[[str, str], Any]] = {
    "async psycopg": transactions.AsyncPsycopg, "psycopg": transactions.Psycopg, "async asyncpg": transactions.Asyncpg,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of an atomic handler's run for the runner: its end is in the database."""

    verb: str
    said: str
    wake_in: timedelta | None = None


class Atomic:
    """Runs the handlers of atomic tasks. Connections are opened when the first job needs them."""

    def __init__(self, app: ServedApp, dsn: str, name: str) -> None:
        self._app = app
        self._dsn = dsn
        self._name = f"tallybook {name}"[:63]
        self._libraries: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def wrap(self, job: Running, known: ServedTask) -> Callable[..., Any]:
        """Return the function that the runner calls instead of the task's; it takes the args after the connection."""
        kind = known.transaction
        if kind.startswith("async"):

            async def run(*positional: Any, **named: Any) -> Ended:
                return await self._again(job, known, kind, positional, named)

            return run

        def run_sync(*positional: Any, **named: Any) -> Ended:
            return self._again_sync(job, known, kind, positional, named)

        return run_sync

    async def close(self) -> None:
        """Close idle connections; one in use is closed when its job has ended."""
        self._closing.set()
        for library in list(self._libraries.values()):
            with suppress(Exception):
                closed = library.close()
                if inspect.isawaitable(closed):
                    await closed

    # Asynchronous

    async def _again(self, job: Running, known: ServedTask, kind: str, positional: Any, named: Any) -> Ended:
        args = json.dumps(job.args)  # the handler may change its args
        library: AsyncLibrary = self._library(kind, known)
        for run in range(1, _RUNS + 1):
            try:
                return await self._run(library, job, known, positional, named)
            except Exception as error:
                if run == _RUNS or not self._may_run_again(job, known, error):
                    raise
            await asyncio.sleep(_pause(run))
            positional, named = _reloaded(known, args, positional)
        raise AssertionError("not reached")

    async def _run(self, library: AsyncLibrary, job: Running, known: ServedTask, positional: Any, named: Any) -> Ended:
        begun = await self._begin(library)
        well = False
        try:
            handler = known.fn(begun.given, *positional, **named)
            value = await (handler if job.guard is None else Leavable(handler, job))
            verb, call, wake_in = _end(job, known, value)
            await library.flush(begun)
            job.in_doubt = True
            said = _checked(await aio.run(begun.given, call), job, known)
            await library.commit(begun)
            job.in_doubt, well = False, True
        except BaseException:
            well = not job.in_doubt and await self._rolled_back(library, begun)
            raise
        finally:
            await self._give_back(library, begun, well=well)
        return Ended(verb, said, wake_in)

    async def _begin(self, library: AsyncLibrary) -> Begun:
        failures = 0
        while True:
            try:
                return await library.begin()
            except Exception as error:
                if not gone(error):
                    raise
                failures += 1
                self._not_reached(failures, error)
            await asyncio.sleep(backoff(failures))

    async def _rolled_back(self, library: AsyncLibrary, begun: Begun) -> bool:
        with suppress(Exception):
            async with asyncio.timeout(_ROLLBACK_S):
                await library.rollback(begun)
                return True
        return False

    async def _give_back(self, library: AsyncLibrary, begun: Begun, *, well: bool) -> None:
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

    # In a thread

    def _again_sync(self, job: Running, known: ServedTask, kind: str, positional: Any, named: Any) -> Ended:
        args = json.dumps(job.args)
        library: Library = self._library(kind, known)
        for run in range(1, _RUNS + 1):
            try:
                return self._run_sync(library, job, known, positional, named)
            except Exception as error:
                if run == _RUNS or not self._may_run_again(job, known, error):
                    raise
            self._closing.wait(_pause(run))
            positional, named = _reloaded(known, args, positional)
        raise AssertionError("not reached")

    def _run_sync(self, library: Library, job: Running, known: ServedTask, positional: Any, named: Any) -> Ended:
        begun = self._begin_sync(library)
        interrupt = job.interrupt = _Interrupt(begun.driver)
        well = False
        try:
            value = _no_coroutine(known, known.fn(begun.given, *positional, **named))
            verb, call, wake_in = _end(job, known, value)
            library.flush(begun)
            job.in_doubt = True
            said = _checked(sync.run(begun.given, call), job, known)
            library.commit(begun)
            job.in_doubt, well = False, True
        except BaseException as error:
            well = not job.in_doubt and _rolled_back_sync(library, begun)
            if interrupt.used and interrupted(error):
                raise asyncio.CancelledError from error
            raise
        finally:
            job.interrupt = None
            # A cancel can arrive late, and would then hit the next job.
            _give_back_sync(library, begun, well=interrupt.over() and well)
        return Ended(verb, said, wake_in)

    def _begin_sync(self, library: Library) -> Begun:
        failures = 0
        while True:
            try:
                return library.begin()
            except Exception as error:
                if not gone(error):
                    raise
                failures += 1
                self._not_reached(failures, error)
                if self._closing.wait(backoff(failures)):
                    raise QueueUnavailable(dsn_for_people(self._dsn), "the worker stops") from error

    # Both

    def _not_reached(self, failures: int, error: Exception) -> None:
        if failures in (2, 10):  # the first is silent: a restarted server answers the second try
            said = (str(chain(error)[-1]).strip() or type(error).__name__).splitlines()[0]
            log.warning("no transaction for atomic tasks: cannot reach %s: %s", dsn_for_people(self._dsn), said)

    def _may_run_again(self, job: Running, known: ServedTask, error: Exception) -> bool:
        if job.in_doubt and not conflicts(error):
            return False
        if not conflicts(error) or job.cancel_reason is not None or self._closing.is_set():
            return False
        job.in_doubt = False  # the server reported that it rolled back
        log.info("%s %s: its transaction conflicted with another one; retrying at once", known.name, job.job_id)
        return True

    def _library(self, kind: str, known: ServedTask) -> Any:
        alias = known.atomic if isinstance(known.atomic, str) else "default"
        key = f"django {alias}" if kind == "django" else kind
        with self._lock:
            if key not in self._libraries:
                self._libraries[key] = self._made(kind, alias)
            return self._libraries[key]

    def _made(self, kind: str, alias: str) -> Any:
        dsn, name = self._dsn, self._name
        if kind in _DRIVERS:
            return _DRIVERS[kind](dsn, name)
        if kind == "django":
            return transactions.Django(alias)
        from tallybook._db.sqlalchemy_sessions import AsyncSessions, Sessions

        library = AsyncSessions if kind.startswith("async") else Sessions
        return library(dsn, name, self._app._sessions, connection=kind.endswith("connection"))


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


def _rolled_back_sync(library: Library, begun: Begun) -> bool:
    with suppress(Exception):
        library.rollback(begun)
        return True
    return False


def _give_back_sync(library: Library, begun: Begun, *, well: bool) -> None:
    with suppress(Exception):
        if well:
            library.keep(begun)
            return
    with suppress(Exception):
        library.drop(begun)


def _no_coroutine(known: ServedTask, value: Any) -> Any:
    if inspect.iscoroutine(value):
        value.close()
        raise SignatureError(known.name, "an async function behind a plain decorator cannot run in a plain transaction")
    return value


def _end(job: Running, known: ServedTask, value: Any) -> tuple[str, Call[str], timedelta | None]:
    """Return the end of this attempt, as the last statement of its transaction."""
    attempt = (job.lease.lease, job.job_id, job.attempt)
    if not isinstance(value, Outcome):
        result = None if value is None else known.result_text(value)
        return "complete", ends.atomic_complete(attempt, result), None
    match value:
        case Snooze():
            delay = put_off(value)
            return "snooze", ends.atomic_snooze(attempt, delay.total_seconds()), delay
        case Cancel():
            return "cancel", ends.atomic_cancelled(attempt, safe_text(value.reason, LONGEST_REASON) or None), None
        case Dead():
            return "fail", ends.atomic_dead(attempt, json.dumps(given_up(value, job.worker_name))), None
        case SubjectOutcome():
            return _end_of_subject(job, known, value)
        case _:
            raise TypeError(f"{type(value).__name__} is not Snooze, Cancel or Dead")


def _end_of_subject(
    job: Running, known: ServedTask, outcome: SubjectOutcome
) -> tuple[str, Call[str], timedelta | None]:
    attempt = (job.lease.lease, job.job_id, job.attempt)
    if isinstance(outcome, Reject):
        then = after_rejection(job, known, outcome)
        error = json.dumps(rejection(job, known, outcome))
        return "fail", ends.atomic_fail(attempt, error, then.delay, known.max_attempts, final=then.final), then.delay
    end = end_of(job, known, outcome)
    if end is None or isinstance(end, Dead):
        return _end(job, known, end)
    return end.verb, end.atomic(attempt), end.wake_in


def _checked(said: str, job: Running, known: ServedTask) -> str:
    if said == "refused":
        raise LeaseLost(job.job_id, job.attempt)
    if said == "left":
        job.in_doubt = False
        raise TransactionError(
            f"the handler of the atomic task {known.name!r} has ended the transaction that it was given",
            detail="What it committed stays; the job's end can no longer be committed with it",
            hint="Leave COMMIT and ROLLBACK to the worker; use savepoints, or a task that is not atomic",
        )
    return said


def _reloaded(known: ServedTask, args: str, positional: Any) -> tuple[list[Any], dict[str, Any]]:
    fresh, named = known.args.load(json.loads(args))
    return [*positional[: int(known.wants_context)], *fresh], named


def _pause(run: int) -> float:
    return float(random.uniform(0.005, 0.02) * 2**run)
