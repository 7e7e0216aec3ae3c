"""Running handlers: async ones on the loop, plain ones on threads, each in a context of its own.

A job does not always need an asyncio task of its own. A relay is one asyncio task that runs jobs one after the other for
as long as they end without waiting for anything; the first that waits keeps the relay for itself, and another relay goes
on with the rest. So each handler that waits has its own asyncio task (cancel, timeout and task groups work as everywhere),
and one that does not costs 1 us instead of 5.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tallybook._model.failure import describe, safe_text
from tallybook._model.outcome import Cancel, Dead, Outcome, Snooze
from tallybook._model.subject_outcome import Reject, SubjectOutcome
from tallybook._worker.finish.finisher import Finisher
from tallybook._worker.jobs import Book, Running
from tallybook._worker.run.atomic import Atomic, Ended
from tallybook._worker.run.children import Children, ChildResult, FailedInChild, ProcessDied, check
from tallybook._worker.run.context import Context, current_job
from tallybook._worker.run.deadline import Guard, deadline_passed
from tallybook._worker.run.retrying import after_failure, after_rejection
from tallybook._worker.run.subjects import end_of, rejection
from tallybook._worker.run.threads import DaemonThreads
from tallybook._worker.run.verbs import Postponed, Verbs
from tallybook._worker.run.versions import is_newer, upgraded
from tallybook.errors import PayloadError, TallybookError, TransactionError

if TYPE_CHECKING:
    from tallybook._app import App, Task

log = logging.getLogger("tallybook.worker")

# How long one relay may keep the loop with handlers that never wait, in seconds.
_TURN = 0.005
# "For ever" has to be an instant that PostgreSQL knows.
_LONGEST = timedelta(days=36_500)
_LONGEST_REASON = 4000
# What was abandoned and can be ended has ended by then, in seconds.
_A_MOMENT = 0.05


class _InContext:
    """Awaits a coroutine with every step of it inside one contextvars.Context.

    Its first step was made by who made this, and came to waiting for something: most handlers of the short kind never do.
    """

    __slots__ = ("_context", "_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context, waits_for: Any) -> None:
        self._coroutine = coroutine
        self._context = context
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        run, coroutine, waits_for = self._context.run, self._coroutine, self._waits_for
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                value = yield waits_for
            except GeneratorExit:
                run(coroutine.close)
                raise
            except BaseException as thrown:
                job = self._context.get(current_job)
                if job is not None and job.guard is not None and job.guard.left and not job.guard.inner:
                    run(job.guard.close, coroutine)  # whatever it makes of a cancel, it does not go on
                    raise
                error = thrown
            try:
                waits_for = run(coroutine.send, value) if error is None else run(coroutine.throw, error)
            except StopIteration as end:
                return end.value
            except GeneratorExit as raised:  # by the handler; the loop closing under us comes in at the yield
                raise RuntimeError("the handler raised GeneratorExit") from raised
            value = error = None


async def _stepped(coroutine: Coroutine[Any, Any, Any], context: contextvars.Context) -> Any:
    """What a coroutine returns whose every step is made inside this context."""
    try:
        waits_for = context.run(coroutine.send, None)
    except StopIteration as end:
        return end.value
    except GeneratorExit as raised:
        raise RuntimeError("the handler raised GeneratorExit") from raised
    return await _InContext(coroutine, context, waits_for)


def _surrounded(
    fn: Callable[..., Any], hooks: Sequence[Callable[[Any], Iterator[Any]]], ctx: Context
) -> Callable[..., Any]:
    def run(*positional: Any, **named: Any) -> Any:
        with ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(contextmanager(hook)(ctx))
            return fn(*positional, **named)

    return run


class Runner:
    """Starts what was claimed and hands each end to the finisher."""

    def __init__(
        self,
        app: App,
        book: Book,
        finisher: Finisher,
        verbs: Verbs,
        *,
        threads: int,
        worker_name: str,
        atomic: Atomic,
        grace: timedelta = timedelta(seconds=5),
        on_abandoned: Callable[[], object] = lambda: None,
        keeps_error: bool = False,
    ) -> None:
        self._verbs = verbs
        self._app = app
        self._book = book
        self._finisher = finisher
        self._worker_name = worker_name
        self._atomic = atomic
        self._threads = DaemonThreads(threads, "tallybook-job")
        self._ready: deque[tuple[Running, Task[Any, Any]]] = deque()
        self._relays: set[asyncio.Task[None]] = set()
        self._lifespan = AsyncExitStack()
        self._children = Children(worker_name, threads, verbs)
        self._grace = grace.total_seconds()
        self._on_abandoned = on_abandoned
        self.keeps_error = keeps_error
        """Whether the first exception of a handler is kept: for a drain, since it keeps all that its frames hold."""
        self.first_error: BaseException | None = None
        self._left: set[asyncio.Task[None]] = set()
        self._unclosed = 0
        self.on_missed: Callable[[Running], object] = lambda _: None
        """Called for a job that a limit has let through and that could not start in time."""
        self.abandoned = 0
        """How many handlers did not end after their deadline and the grace."""
        self.state = SimpleNamespace()
        self.aborting = False
        self.tracing = app._tracing
        self._run = self._one if self.tracing is None else self._traced

    async def open(self) -> None:
        """Enter the app's lifespans, in the order in which they were declared."""
        for known in self._app.tasks.values():
            check(known)
        self._verbs.loop = asyncio.get_running_loop()
        self._verbs.providers = self._app.providers
        self._lifespan.enter_context(self._app.providers.through(self._verbs.ask))
        context = Context(self.state, verbs=self._verbs)
        for hook in self._app._lifespans:
            await self._lifespan.enter_async_context(asynccontextmanager(hook)(context))

    async def close(self) -> None:
        """Leave the lifespans; threads that still run are left behind."""
        await self._children.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._lifespan.aclose()

    def start(self, jobs: list[Running]) -> None:
        """Start these jobs; each has its slot already."""
        for job in jobs:
            known = self._app._names.get(job.task_name)
            if known is None or (job.options and is_newer(job.options, known)):
                what = f"task {job.task_name!r}" if known is None else f"such version of the args of {job.task_name!r}"
                log.info("job %s: no %s here, put aside for a worker that knows it", job.job_id, what)
                self._finisher.move(job)
                self._book.freed(job)
                continue
            if (old := self._book.running.get(job.job_id)) is not None:  # its lease is not on record any more
                self._book.freed(old)
                self._book.ended(old.lease)
            self._book.running[job.job_id] = job
            self._ready.append((job, known))
        self._spawn()

    def cannot_start(self, job: Running, error: dict[str, Any]) -> None:
        """Fail an attempt that has not started, by its task's own limit of attempts."""
        known = self._app._names.get(job.task_name)
        limit = None if known is None else known.max_attempts
        self._finisher.fail(job, {**error, "worker": self._worker_name}, delay=None, limit=limit, final=False)

    def cancel(self, job_id: int, reason: str | None, attempt: int | None = None) -> None:
        """Tell one running job to stop; with `attempt` only if it is that one."""
        job = self._book.running.get(job_id)
        if job is not None and job.cancel_reason is None and attempt in (None, job.attempt):
            job.cancel_reason = reason or ""
            self._stop(job)
            if job.guard is not None:
                job.guard.told()

    def _stop(self, job: Running) -> None:
        if job.handle is not None and not job.handle.done():
            job.handle.cancel()
        elif job.interrupt is not None:  # a network round trip
            asyncio.get_running_loop().run_in_executor(None, job.interrupt)

    def abort(self) -> None:
        """Cancel every running handler; what ends by that is given back without a failure."""
        self.aborting = True
        for job in list(self._book.running.values()):
            self._stop(job)
            if job.guard is not None:
                job.guard.aborted()

    def isolated(self, job: Running) -> bool:
        """Whether what this job does to its process it does to no other job."""
        known = self._app._names.get(job.task_name)
        return known is not None and known.execution.process

    @property
    def still_abandoned(self) -> int:
        """How many abandoned handlers are still there: threads, coroutines that cannot be closed."""
        return self._threads.abandoned + len(self._left) + self._unclosed

    def leave(self, job: Running) -> None:
        """Wait no more for a handler whose attempt has its end: close its coroutine, replace its thread, kill its process."""
        guard = job.guard = job.guard or Guard(job)
        guard.left = True
        guard.clear()
        relay = guard.relay or job.handle
        if guard.child is not None:
            guard.child.kill()
        if guard.thread is not None and self._threads.abandon(guard.thread):
            guard.thread = None
        elif relay is not None and not relay.done():
            self._left.add(relay)
            relay.add_done_callback(partial(self._gone, guard))
        if relay is not None and not relay.done():
            relay.cancel()

    def _gone(self, guard: Guard, relay: asyncio.Task[None]) -> None:
        self._left.discard(relay)
        self._unclosed += guard.unclosed

    def _overdue(self, job: Running) -> None:
        """Neither the cancel nor the grace has ended this attempt: it is failed, and its handler abandoned."""
        known = self._app._names[job.task_name]
        if self._book.running.get(job.job_id) is not job or known.execution.timeout is None:
            return
        self.abandoned += 1
        log.warning(
            "%s %s did not end within %g s after its deadline: it is abandoned, whatever it still does does not count",
            known.name,
            job.job_id,
            self._grace,
            extra={"event": "abandoned", "job": job.job_id, "task_name": known.name},
        )
        self._raised(job, known, deadline_passed(known.execution.timeout))
        self._book.freed(job)
        self.leave(job)
        if self._threads.abandoned:
            self._on_abandoned()  # before the claimer takes a job for the free slot
        asyncio.get_running_loop().call_later(_A_MOMENT, self._on_abandoned)

    def lost(self) -> None:
        """All of this worker's jobs were given to others, or will be: stop them, and give back what nobody has taken yet."""
        for job in list(self._book.running.values()):
            job.lost = True
            self.cancel(job.job_id, "the worker was given up by the others")

    def _spawn(self) -> None:
        if self._ready:
            relay = asyncio.get_running_loop().create_task(self._relay())
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)

    async def _relay(self) -> None:
        loop = asyncio.get_running_loop()
        me = asyncio.current_task()
        handed_on = [False]

        def hand_on() -> None:  # the loop is free: this relay's job waits for something
            handed_on[0] = True
            self._spawn()

        loop.call_soon(hand_on)
        until = loop.time() + _TURN
        while self._ready:
            job, known = self._ready.popleft()
            if (
                job.cancel_reason is not None or job.lost or self.aborting or job.latest is not None
            ) and self._told_before_it_began(job):
                continue
            job.handle = me
            if known.guarded:
                await self._guarded(job, known, me)
            else:
                await self._run(job, known)
            if handed_on[0]:
                return
            if me is not None and me.cancelling():
                # The handler cancelled its own asyncio task and returned: what is next must not meet that.
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                return
            if loop.time() > until:
                await asyncio.sleep(0)
                return

    def _told_before_it_began(self, job: Running) -> bool:
        if self.aborting or job.lost:
            self._finisher.snooze(job, timedelta(0))
        elif job.cancel_reason is not None:
            self._finisher.cancelled(job, job.cancel_reason or None)
        elif job.latest is not None and asyncio.get_running_loop().time() > job.latest:
            del self._book.running[job.job_id]
            self.on_missed(job)
            return True
        else:
            return False
        self._book.freed(job)
        return True

    async def _guarded(self, job: Running, known: Task[Any, Any], me: asyncio.Task[None] | None) -> None:
        execution = known.execution
        job.guard = guard = Guard(job, execution.timeout, self._grace, self._stop, self._overdue)
        guard.relay = me
        guard.inner = bool(known.atomic) and known.is_async
        if not execution.process:  # a process has to start before its job does
            guard.start()
        try:
            await self._run(job, known)
        finally:
            guard.clear()

    async def _traced(self, job: Running, known: Task[Any, Any]) -> None:
        assert self.tracing is not None
        with self.tracing.processing(job):
            await self._one(job, known)

    async def _one(self, job: Running, known: Task[Any, Any]) -> None:
        value: Any = None
        raised: BaseException | None = None
        try:
            value = await self._call(job, known)
        except GeneratorExit:
            raise  # the loop is closing under us
        except Outcome as outcome:
            value = outcome
        except BaseException as error:
            raised = error if job.guard is None else job.guard.explained(error)
        if self._book.running.get(job.job_id) is not job:
            return  # given back at the stop: its end and its slot are dealt with
        if value is None and raised is None and job.guard is None and not job.in_doubt:  # nearly all of them
            self._finisher.complete(job)
            self._book.freed(job)
            return
        try:
            if raised is not None:
                self._raised(job, known, raised)
            elif isinstance(value, Outcome):
                self._outcome(job, known, value)
            elif isinstance(value, Ended):
                self._finisher.ended(job, value.verb, value.said, value.wake_in)
            elif job.in_doubt:
                self._completed_itself(job, known)
            else:
                if job.guard is not None and job.guard.timed_out:
                    log.warning("%s %s was told to stop at its deadline and completed after it", known.name, job.job_id)
                self._completed(job, known, value)
        except Exception as error:  # whatever it is, the attempt has an end and the slot is free
            described = describe(raised or error, attempt=job.attempt, worker=self._worker_name)
            self._finisher.fail(job, described, delay=None, limit=known.max_attempts, final=False)
        self._book.freed(job)

    def _completed_itself(self, job: Running, known: Task[Any, Any]) -> None:
        said = "ctx.complete" if job.own_end is None else "ctx.end"
        # It is a failure only where the settler finds that the transaction was not committed.
        error = TransactionError(
            f"the handler returned, but the transaction in which it called {said} is not committed",
            hint="Commit it before the handler returns",
        )
        error.no_retry = False  # nothing has stayed
        described = describe(error, attempt=job.attempt, worker=self._worker_name)
        then = after_failure(job, known, error)
        self._finisher.fail(job, described, delay=then.delay, limit=known.max_attempts, final=then.final)

    async def _call(self, job: Running, known: Task[Any, Any]) -> Any:
        try:  # what SQL put in may be more than Python reads: 5000 digits, 1000 levels
            job.args = json.loads(job.args)  # type: ignore[arg-type]  # text until here
            job.headers = json.loads(job.headers) if job.headers else None  # type: ignore[arg-type]
        except (ValueError, RecursionError) as error:
            raise PayloadError("$", f"it cannot be read: {error}", task=known.name, verb="read") from error
        if job.options or known.contract.version != 1:
            job.args = upgraded(job, known)
        positional, named = known.args.load(job.args)
        context = contextvars.copy_context()
        context.run(current_job.set, job)
        fn = self._atomic.wrap(job, known) if known.atomic else known.fn
        in_thread = not known.is_async and not known.execution.process
        if known.wants_context or self._app._arounds or (in_thread and self._app._thread_arounds):
            ctx = Context(self.state, job, self._verbs, atomic=bool(known.atomic))
            if known.wants_context:
                positional = [ctx, *positional]
            if in_thread and self._app._thread_arounds:
                fn = _surrounded(fn, self._app._thread_arounds, ctx)
            if self._app._arounds:
                return await _stepped(self._around(job, ctx, known, fn, positional, named), context)
        if known.is_async:
            coroutine = fn(*positional, **named)
            try:  # as _stepped, without one more coroutine
                waits_for = context.run(coroutine.send, None)
            except StopIteration as end:
                return end.value
            except GeneratorExit as error:
                raise RuntimeError("the handler raised GeneratorExit") from error
            return await _InContext(coroutine, context, waits_for)
        if known.execution.process:
            return await self._in_child(job, known)
        value = await self._in_thread(job, context, fn, positional, named)
        if inspect.iscoroutine(value):  # an async function behind a plain decorator
            value = await _stepped(value, context)
        return value

    async def _around(
        self,
        job: Running,
        ctx: Context,
        known: Task[Any, Any],
        fn: Callable[..., Any],
        positional: list[Any],
        named: dict[str, Any],
    ) -> Any:
        async with AsyncExitStack() as hooks:
            for hook in self._app._arounds:
                await hooks.enter_async_context(asynccontextmanager(hook)(ctx))
            if known.is_async:
                return await fn(*positional, **named)
            if known.execution.process:
                return await self._in_child(job, known)
            value = await self._in_thread(job, contextvars.copy_context(), fn, positional, named)
            return await value if inspect.iscoroutine(value) else value

    async def _in_child(self, job: Running, known: Task[Any, Any]) -> Any:
        # Its end is the process's end: a cancel is told to that, see Guard.
        handle, job.handle = job.handle, None
        try:
            carried = None if self.tracing is None else self.tracing.carried()
            return await self._children.run(job, known, carried)
        finally:
            job.handle = handle

    async def _in_thread(
        self,
        job: Running,
        context: contextvars.Context,
        fn: Callable[..., Any],
        positional: list[Any],
        named: dict[str, Any],
    ) -> Any:
        def call() -> Any:
            try:
                return context.run(fn, *positional, **named)
            except (StopIteration, GeneratorExit) as raised:  # a Future takes none of the two
                raise RuntimeError(f"the handler raised {type(raised).__name__}") from raised

        # A thread cannot be cancelled, and its job is not over before its code is: it is told by ctx.cancelled.
        handle, job.handle = job.handle, None
        try:
            future = self._threads.submit(call)
            if job.guard is not None:
                job.guard.thread = future
            return await asyncio.wrap_future(future)
        finally:
            job.handle = handle

    def _completed(self, job: Running, known: Task[Any, Any], value: Any) -> None:
        if isinstance(value, ChildResult):
            value = value.text if known.store_result else None
            if value is not None:
                self._finisher.complete_with(job, value)
                return
        if value is None:
            self._finisher.complete(job)
        elif (result := known.result_text(value)) is not None:
            self._finisher.complete_with(job, result)
        else:
            self._finisher.complete(job)

    def _outcome(self, job: Running, known: Task[Any, Any], outcome: Outcome) -> None:
        match outcome:
            case Snooze():
                until = outcome.until
                delay = outcome.delay if until is None else max(timedelta(0), until - datetime.now(UTC))
                self._finisher.snooze(job, min(delay or timedelta(0), _LONGEST))
            case Cancel():
                self._finisher.cancelled(job, safe_text(outcome.reason, _LONGEST_REASON) or None)
            case Dead():
                error = {
                    "type": "Dead",
                    "message": safe_text(outcome.reason, _LONGEST_REASON) or "its handler gave it up",
                    "worker": self._worker_name,
                }
                self._finisher.fail(job, error, delay=None, limit=None, final=True)
            case Reject():
                described, then = rejection(job, known, outcome), after_rejection(job, known, outcome)
                log.warning(
                    "%s %s: attempt %s was rejected: %s", known.name, job.job_id, job.attempt, described["message"]
                )
                self._finisher.fail(job, described, delay=then.delay, limit=known.max_attempts, final=then.final)
            case Postponed():
                if not job.lost:
                    self._finisher.ended(job, "limit_take", "scheduled", timedelta(0))
            case SubjectOutcome():
                self._iterated(job, known, outcome)
            case _:
                raise TypeError(f"{type(outcome).__name__} is none of Snooze, Cancel, Dead")

    def _iterated(self, job: Running, known: Task[Any, Any], outcome: SubjectOutcome) -> None:
        try:
            end = end_of(job, known, outcome)
        except TallybookError as error:
            self._raised(job, known, error)
            return
        if end is None:
            self._finisher.complete(job)
        elif isinstance(end, Dead):
            self._outcome(job, known, end)
        else:
            self._finisher.iterated(job, end)

    def _raised(self, job: Running, known: Task[Any, Any], error: BaseException) -> None:
        if issubclass(type(error), asyncio.CancelledError):  # isinstance asks the error, which may raise anything
            if job.handle is not None:
                job.handle.uncancel()
            if job.cancel_reason is not None and not job.lost:
                self._finisher.cancelled(job, job.cancel_reason or None)
                return
            if self.aborting or job.lost:
                self._finisher.snooze(job, timedelta(0))
                return
        if type(error) is ProcessDied:
            log.error("%s %s: %s", known.name, job.job_id, error, extra={"event": "crashed", "job": job.job_id})
            self._finisher.crash(job, error.described(job))
            return
        if type(error) is FailedInChild:
            described, then = error.described, error.then or after_failure(job, known, error)
        else:
            described = describe(error, attempt=job.attempt, worker=self._worker_name)
            then = after_failure(job, known, error)
        if then.problem is not None:
            described["note"] = then.problem
        if self.keeps_error and self._finisher.first_failure is None:
            self.first_error = error
        log.warning(
            "%s %s: attempt %s failed: %s: %s",
            known.name,
            job.job_id,
            job.attempt,
            described["type"],
            described["message"],
            extra={"job": job.job_id, "task_name": known.name, "queue": job.queue, "attempt": job.attempt},
        )
        self._finisher.fail(job, described, delay=then.delay, limit=known.max_attempts, final=then.final)
