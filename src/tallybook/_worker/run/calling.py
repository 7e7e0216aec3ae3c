"""Calls of handlers: on the loop, on a thread, in a process; inside the app's hooks, each in its own context."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

from tallybook._model.contract import LAST_VERSION
from tallybook._task.task import Owner
from tallybook._worker.jobs import AnyTask, Running, current_job
from tallybook._worker.run.atomic import Atomic
from tallybook._worker.run.children import Children, check
from tallybook._worker.run.context import Context
from tallybook._worker.run.verbs import Verbs
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import PayloadError


def is_newer(options: dict[str, Any], known: AnyTask) -> bool:
    """Return whether these options name a version of args that this task does not know yet."""
    version = options.get("version")
    return type(version) is int and known.contract.version < version <= LAST_VERSION


def _upgrade(job: Running, known: AnyTask) -> None:
    version = job.options.get("version", 1) if job.options else 1
    if version != known.contract.version or type(version) is not int:
        job.args = known.contract.upgraded(known.name, job.args, version)


def _surrounded(
    fn: Callable[..., Any], hooks: Sequence[Callable[[Any], Iterator[Any]]], ctx: Context
) -> Callable[..., Any]:
    def run(*positional: Any, **named: Any) -> Any:
        with ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(contextmanager(hook)(ctx))
            return fn(*positional, **named)

    return run


class DaemonThreads(Executor):
    """At most `most` daemon threads, besides abandoned ones; started on demand.

    Unlike those of ThreadPoolExecutor, they do not delay the process's exit. A plain handler cannot be killed. After an
    abort its job was given back, and the process must be able to end. After its deadline and the grace it is abandoned:
    it keeps its thread for as long as it runs, another thread takes its place, and its own thread ends with it.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._started = 0
        self._number = 0
        self._idle = threading.Semaphore(0)
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.abandoned: set[Future[Any]] = set()
        self._lock = threading.Lock()  # for abandoning a call and for the end of one; else no job waits for it

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call in one of the threads; call from the event loop only. Raises if a thread cannot be started."""
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._start()  # first: a call without a thread must not run later
        future: Future[Any] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _start(self) -> None:
        self._number += 1
        threading.Thread(target=self._run, name=f"{self._name}-{self._number}", daemon=True).start()
        self._started += 1

    def abandon(self, future: Future[Any]) -> bool:
        """Give up the thread that runs this; call from the event loop only. False: it had not begun, or has ended."""
        with self._lock:
            if future.cancel() or future.done():
                return False
            self.abandoned.add(future)
        # Always: the count of idle threads may be one too high, and a job with a slot must find a thread.
        self._started -= 1
        self._start()
        return True

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                result = raised = None
                try:
                    result = call()
                except BaseException as error:
                    raised = error
                with self._lock:  # in one step: `abandon` comes before the end, or sees that it has ended
                    future.set_exception(raised) if raised is not None else future.set_result(result)
                    if future in self.abandoned:
                        self.abandoned.discard(future)
                        return
                del result, raised
            del item, future, call  # else they live until the next job
            self._idle.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when no call is left; never wait. cancel_futures: cancel unstarted calls."""
        while cancel_futures and not self._work.empty():
            if item := self._work.get():
                item[0].cancel()
        for _ in range(self._started):
            self._work.put(None)


class Common:
    """What all handlers of one process share: threads, one per slot, children, and the state of the app's lifespans."""

    def __init__(self, app: Owner, settings: WorkerSettings) -> None:
        self._app = app
        self.threads = DaemonThreads(settings.slots, "tallybook-job")
        self.children = Children(settings.name, min(settings.children or settings.slots, settings.slots))
        self.state = SimpleNamespace()
        self._lifespan = AsyncExitStack()

    async def open(self, context: Context) -> None:
        await enter_lifespans(self._app, context, self._lifespan)

    async def close(self) -> None:
        """Close the children and the lifespans; leave running threads behind."""
        await self.children.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        await self._lifespan.aclose()


async def enter_lifespans(app: Owner, context: Context, stack: AsyncExitStack) -> None:
    """Enter the app's lifespans in the order of declaration; the stack closes them in reverse."""
    for hook in app._lifespans:
        await stack.enter_async_context(asynccontextmanager(hook)(context))


class Handlers:
    """The app's handlers for one node, or for the one database; the nodes share `common`."""

    def __init__(self, app: Owner, verbs: Verbs, atomic: Atomic, common: Common, *, owns: bool) -> None:
        self._app = app
        self._verbs = verbs
        self._atomic = atomic
        self.common = common
        self._owns = owns
        self._way = ExitStack()
        self._contexts = partial(Context, common.state, verbs=verbs, app=cast(Any, app))

    async def open(self) -> None:
        """Check that handlers can run; enter the app's lifespans, unless they are open for all nodes already."""
        for known in self._app.tasks.values():
            check(known)
        self._verbs.loop = asyncio.get_running_loop()
        if self._owns:
            self._way.enter_context(self._app.providers.through(self._verbs.ask))
            await self.common.open(self._contexts())

    async def close(self) -> None:
        if self._owns:
            await self.common.close()
        self._way.close()

    async def call(self, job: Running, known: AnyTask) -> Any:
        """Run the handler of this job; return or raise as it does. Raises PayloadError for args that cannot be read."""
        try:  # SQL may have stored what Python cannot read: 5000 digits, 1000 levels
            job.args = json.loads(job.args)  # type: ignore[arg-type]  # text until here
            job.headers = json.loads(job.headers) if job.headers else None  # type: ignore[arg-type]
        except (ValueError, RecursionError) as error:
            raise PayloadError("$", f"it cannot be read: {error}", task=known.name, verb="read") from error
        try:
            if job.options or known.contract.version != 1:
                _upgrade(job, known)
            positional, named = known.args.load(job.args)
        except GeneratorExit as error:  # for the runner this would be the closing of the loop
            raise RuntimeError("reading the args raised GeneratorExit") from error
        context = contextvars.copy_context()
        context.run(current_job.set, job)
        fn = self._atomic.wrap(job, known) if known.atomic else known.fn
        in_thread = not known.is_async and not known.execution.process
        arounds = self._app._arounds
        if known.wants_context or arounds or (in_thread and self._app._thread_arounds):
            ctx = self._contexts(job, atomic=bool(known.atomic))
            positional = [ctx, *positional] if known.wants_context else positional
            if in_thread and self._app._thread_arounds:
                fn = _surrounded(fn, self._app._thread_arounds, ctx)
        if arounds:
            coroutine = self._around(job, ctx, known, fn, positional, named)
        elif known.is_async:
            coroutine = fn(*positional, **named)
        elif known.execution.process:
            return await self._in_child(job, known)
        else:
            value = await self._in_thread(job, context, fn, positional, named)
            if not inspect.iscoroutine(value):
                return value
            coroutine = value  # an async function behind a plain decorator
        try:
            waits_for = context.run(coroutine.send, None)
        except StopIteration as end:
            return end.value
        except GeneratorExit as error:
            raise RuntimeError("the handler raised GeneratorExit") from error
        return await _in_context(coroutine, context, waits_for)

    async def _around(
        self, job: Running, ctx: Context, known: AnyTask, fn: Callable[..., Any], positional: Any, named: Any
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

    async def _in_child(self, job: Running, known: AnyTask) -> Any:
        children = self.common.children
        async with children.turn(job.queue):  # a cancel ends the wait
            # From here on the process's end is the attempt's end, so Guard handles a cancel.
            handle, job.handle = job.handle, None
            try:
                carried = None if self._app._tracing is None else self._app._tracing.carried()
                return await children.run(job, known, self._verbs, carried)
            finally:
                job.handle = handle

    async def _in_thread(
        self, job: Running, context: contextvars.Context, fn: Callable[..., Any], positional: Any, named: Any
    ) -> Any:
        def call() -> Any:
            try:
                return context.run(fn, *positional, **named)
            except (StopIteration, GeneratorExit) as raised:  # a Future accepts neither
                raise RuntimeError(f"the handler raised {type(raised).__name__}") from raised

        # A thread cannot be cancelled, and its job has not ended before its code has: it checks ctx.cancelled.
        handle, job.handle = job.handle, None
        try:
            future = self.common.threads.submit(call)
            if job.guard is not None:
                job.guard.thread = future
            return await asyncio.wrap_future(future)
        finally:
            job.handle = handle


@types.coroutine
def _in_context(
    coroutine: Coroutine[Any, Any, Any], context: contextvars.Context, waits_for: Any
) -> Generator[Any, Any, Any]:
    """Await a coroutine, running each step inside this context.

    The caller has run the first step, which came to a wait: most short handlers never do.
    """
    run = context.run
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            value = yield waits_for
        except GeneratorExit:
            run(coroutine.close)
            raise
        except BaseException as thrown:
            job = context.get(current_job)
            if job is not None and job.guard is not None and job.guard.left and not job.guard.inner:
                run(job.guard.close, coroutine)  # however it handles a cancel, it does not continue
                raise
            error = thrown
        try:
            waits_for = run(coroutine.send, value) if error is None else run(coroutine.throw, error)
        except StopIteration as end:
            return end.value
        except GeneratorExit as raised:  # raised by the handler; the closing of the loop raises at the yield
            raise RuntimeError("the handler raised GeneratorExit") from raised
        value = error = None
