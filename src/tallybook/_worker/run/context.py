"""The Context: what a handler, a lifespan and an around_job hook can read and do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, MutableMapping
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from tallybook._db import sync
from tallybook._db.declared import Call
from tallybook._db.ends import SubjectEnd, complete
from tallybook._db.source import in_loop
from tallybook._db.texts import instant
from tallybook._db.verb import AsyncConn, SyncConn
from tallybook._model.at_node import at_node
from tallybook._model.outcome import Complete, Drop, Kill, Reschedule, SubjectOutcome
from tallybook._model.payload import encode
from tallybook._model.provider import Provider
from tallybook._model.subject import Subject, subject_of
from tallybook._worker.run.ending import end_of
from tallybook._worker.run.verbs import Lock, Turn, Verbs
from tallybook.errors import LeaseLost, NotASubject, NotSupported

if TYPE_CHECKING:
    from tallybook._app import App
    from tallybook._worker.jobs import Running
    from tallybook.extra.providers import Providers

T = TypeVar("T")

_log = logging.getLogger("tallybook.job")


class JobLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines name their job in the text, and carry job, task_name, queue and attempt."""

    def __init__(self, running: Running) -> None:
        job, task = running.job_id, running.task_name
        marks = {"job": job, "task_name": task, "queue": running.queue, "attempt": running.attempt}
        super().__init__(_log, {**marks, "job_line": f"[{task} {job}] "})

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {**(kwargs.get("extra") or {}), **(self.extra or {})}}


def _name_job(record: logging.LogRecord) -> bool:
    """Put the job in front of the text, for programs with their own logging setup (logs.py removes it again)."""
    prefix = getattr(record, "job_line", "")
    record.msg = (prefix.replace("%", "%%") if record.args else prefix) + str(record.msg)
    return True


_log.addFilter(_name_job)


class Context:
    """A handler's access to its job. Annotate the first parameter with it to receive it.

    `state` is shared by all jobs of the process; lifespans fill it.
    """

    __slots__ = ("_app", "_atomic", "_log", "_running", "_verbs", "state")

    def __init__(
        self,
        state: SimpleNamespace,
        running: Running | None = None,
        verbs: Verbs | None = None,
        *,
        app: App | None = None,
        atomic: bool = False,
    ) -> None:
        self._app = app
        self._verbs = verbs
        self.state = state
        self._atomic = atomic
        self._running = running
        self._log: JobLogger | None = None

    def _job(self) -> Running:
        if self._running is None:
            raise RuntimeError("a lifespan runs before any job: use only ctx.state, ctx.app and ctx.providers")
        return self._running

    @property
    def app(self) -> App:
        """The App whose worker runs the job, for modules that cannot import it. Not available with process=True."""
        if self._app is None:
            self._said()
            raise RuntimeError("ctx.app is not available in a process of its own: import the app")
        return self._app

    @property
    def job_id(self) -> int:
        """The job's id, the same for all its attempts: an idempotency key for other services."""
        return self._job().job_id

    @property
    def task(self) -> str:
        """The task's name."""
        return self._job().task_name

    @property
    def queue(self) -> str:
        """The queue that the job was claimed from."""
        return self._job().queue

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._job().attempt

    @property
    def failures(self) -> int:
        """The number of failed attempts before this one, since a person's retry or the subject's last reschedule."""
        return self._job().failures

    @property
    def crashes(self) -> int:
        """The number of attempts that ended with the death of their worker or process."""
        return self._job().crashes

    @property
    def args(self) -> dict[str, Any]:
        """The stored args: plain JSON values by parameter name."""
        return self._job().args

    @property
    def headers(self) -> dict[str, Any]:
        """The headers of the job, such as trace and tags."""
        return self._job().headers or {}

    @property
    def schedule(self) -> str | None:
        """The name of the schedule that enqueued the job; None for other jobs."""
        return (self._job().options or {}).get("schedule")

    @property
    def tick(self) -> datetime | None:
        """The tick of its schedule, in UTC; None for other jobs. It can be long before the start."""
        return instant((self._job().options or {}).get("tick"))

    @property
    def worker(self) -> str:
        """The name of the worker that runs the job."""
        return self._job().worker_name

    @property
    def node(self) -> str | None:
        """The name of the job's node; None if the worker serves one database only."""
        at = at_node.get()
        return None if at is None else at.name

    @property
    def subject(self) -> Subject | None:
        """The name of the job's subject, and its iterations so far; None for an ordinary job."""
        return subject_of(self._job().options)

    @property
    def cancelled(self) -> bool:
        """Whether the job must stop, because of a person's cancel or its deadline.

        A plain handler checks this; an async one is cancelled.
        """
        return self._job().cancel_reason is not None or self.timed_out

    @property
    def timed_out(self) -> bool:
        """Whether this attempt's deadline has passed; only the grace is left."""
        guard = self._job().guard
        return guard is not None and guard.timed_out

    @property
    def deadline(self) -> datetime | None:
        """The deadline of this attempt, by the worker's clock; None for a task without a timeout."""
        guard = self._job().guard
        return None if guard is None else guard.deadline

    @property
    def log(self) -> JobLogger:
        """A logger whose lines have the job's id and task."""
        if self._log is None:
            self._log = JobLogger(self._job())
        return self._log

    @property
    def providers(self) -> Providers:
        """The providers of the App, with their secrets. Lifespans have it, too.

        acme = await ctx.providers.get("acme")
        """
        if self._app is None:
            hint = "Use `app.providers`; a task with process=True needs env=('TALLYBOOK_DSN', 'TALLYBOOK_KEYS')"
            raise NotSupported("ctx.providers here", hint=hint)
        return self._app.providers

    def provider(self, provider: str | Provider) -> Turn:
        """Take a turn at a provider, by name or as read, at the rate limits of its setting `limits`.

        Use it with `async with`, or `with` in a plain handler. Enter it before anything that must not happen twice:
        like `limit`, it ends the attempt without a failure if the turn is not near. A 429 in the block, of any HTTP
        library, does the same, after it has pushed the limits back by its Retry-After, or by a minute. Raises
        UnknownProvider, ConfigError.

            async with ctx.provider("acme") as acme:
                answer = await http.get(acme.settings["url"])
                answer.raise_for_status()
        """
        return Turn(self, provider)

    async def complete(self, conn: AsyncConn, *, result: object = None) -> None:
        """End this attempt as completed in `conn`'s transaction, together with your other changes in it.

        For a handler that is not atomic and chooses the moment; commit soon, and before the handler returns. `conn` is
        as in Task.enqueue, except the App. Raises LeaseLost and writes nothing if another worker has taken the job
        over: roll back. A handler that raises after the commit has completed; one that returns without the commit has
        failed. `result` is stored for `app.result` instead of the return value. Raises PayloadError if it is not JSON.

            async with conn.transaction():
                await conn.execute("insert into payment values (%s)", [ctx.args["order_id"]])
                await ctx.complete(conn)
        """
        job, call = self._completing(result)
        if not await sync.run_on(conn, call, sync=False):
            raise LeaseLost(job.job_id, job.attempt)

    def complete_sync(self, conn: SyncConn, *, result: object = None) -> None:
        """End this attempt as completed in `conn`'s transaction; complete for plain handlers."""
        job, call = self._completing(result)
        if not sync.run(conn, call):
            raise LeaseLost(job.job_id, job.attempt)

    async def end(self, conn: AsyncConn, outcome: SubjectOutcome) -> None:
        """End this iteration of a subject in `conn`'s transaction: Reschedule, Complete, Drop or Kill.

        See https://github.com/tallybook/tallybook/blob/main/docs/subjects.md.
        The rules are those of `complete`: commit soon, and before the handler returns; LeaseLost if another worker has
        taken the job over. Return a Reject instead, because a failure is recorded separately. Raises NotASubject for an
        ordinary job, SignatureError and PayloadError for new args that do not fit the task.

            async with conn.transaction():
                await app.subjects.push_many([crawl.subject(url).job(url) for url in links]).on(conn)
                await ctx.end(conn, Reschedule("+1 week"))
        """
        job, call = self._ending(outcome)
        if await sync.run_on(conn, call, sync=False) == "refused":
            raise LeaseLost(job.job_id, job.attempt)

    def end_sync(self, conn: SyncConn, outcome: SubjectOutcome) -> None:
        """End this iteration of a subject in `conn`'s transaction; end for plain handlers."""
        job, call = self._ending(outcome)
        if sync.run(conn, call) == "refused":
            raise LeaseLost(job.job_id, job.attempt)

    def _completing(self, result: object) -> tuple[Running, Call[bool]]:
        job = self._own_end("ctx.complete")
        text = None if result is None else encode(result, task=job.task_name, what="result")
        job.in_doubt = True
        return job, complete((job.lease.lease, job.job_id, job.attempt), text)

    def _ending(self, outcome: SubjectOutcome) -> tuple[Running, Call[str]]:
        job, name = self._own_end("ctx.end"), type(outcome).__name__
        if not isinstance(outcome, Reschedule | Complete | Drop | Kill):
            hint = "Pass Reschedule, Complete, Drop or Kill; return the others"
            raise NotSupported(f"ctx.end with {name}", hint=hint)
        if self.subject is None:
            raise NotASubject(job.job_id, name)
        end = end_of(job, self.app._names[job.task_name], outcome)
        if not isinstance(end, SubjectEnd):
            end = SubjectEnd("complete", {})
        job.in_doubt, job.own_end = True, end
        return job, end.call((job.lease.lease, job.job_id, job.attempt))

    def _own_end(self, verb: str) -> Running:
        job = self._job()
        if self._atomic:
            hint = "Return instead: the end commits with the task's transaction"
            raise NotSupported(f"{verb} in an atomic task", hint=hint)
        if not job.lease.lease:
            raise NotSupported(f"{verb} in a process of its own", hint="Return instead: the worker stores the end")
        return job

    async def progress(self, done: float | None = None, message: str | None = None) -> None:
        """Report the progress of this attempt: `done` from 0 to 1 (None: unknown), `message` one line for people.

        Shown in the dashboard, by `tallybook job show` and in tallybook.job. Each call is one statement, so call it
        only when a person would see a difference. Raises LeaseLost if another worker has taken the job over: then stop.

            await ctx.progress(0.4, "page 4 of 10")
        """
        await self._said().progress(self._job(), done, message)

    def progress_sync(self, done: float | None = None, message: str | None = None) -> None:
        """Report the progress of this attempt; progress for plain handlers."""
        self._wait(self._said().progress(self._job(), done, message))

    async def get_checkpoint(self) -> Any:
        """Return the job's last checkpoint, of any attempt, or None.

        page = (await ctx.get_checkpoint() or {"page": 0})["page"]
        """
        return await self._said().get_checkpoint(self._job())

    def get_checkpoint_sync(self) -> Any:
        """Return the job's last checkpoint; get_checkpoint for plain handlers."""
        return self._wait(self._said().get_checkpoint(self._job()))

    async def set_checkpoint(self, value: object) -> None:
        """Store one JSON value of at most 1 MB, from which the next attempt can continue.

        It is durable when the call returns. Raises PayloadError; LeaseLost if another worker has taken the job over.

            await ctx.set_checkpoint({"page": 4})
        """
        await self._said().set_checkpoint(self._job(), value)

    def set_checkpoint_sync(self, value: object) -> None:
        """Store a checkpoint; set_checkpoint for plain handlers."""
        self._wait(self._said().set_checkpoint(self._job(), value))

    async def limit(self, *keys: str) -> None:
        """Take a turn at each of these limits before the call, for keys that only the handler knows.

        Returns when the call may start. If that is more than 150 ms away (400 ms for a job that has waited already), it
        raises, which ends the attempt without a failure: the job runs again from its beginning when its turn comes. Do
        not catch that exception, and call `limit` before anything that must not happen twice. Raises ConfigError for an
        unknown limit.

            await ctx.limit("provider:acme")
        """
        await self._said().limit(self._job(), keys)

    def limit_sync(self, *keys: str) -> None:
        """Take a turn at each of these limits; limit for plain handlers."""
        self._wait(self._said().limit(self._job(), keys))

    async def push_back(self, key: str, retry_after: timedelta) -> None:
        """Close a limit for a time, over all workers, for example after a 429 with Retry-After.

        if answer.status_code == 429:
            await ctx.push_back("provider:acme", timedelta(seconds=int(answer.headers["Retry-After"])))
            return Snooze(timedelta(0))
        """
        await self._said().push(self._job(), key, retry_after)

    def push_back_sync(self, key: str, retry_after: timedelta) -> None:
        """Close a limit for a time; push_back for plain handlers."""
        self._wait(self._said().push(self._job(), key, retry_after))

    def lock(self, name: str, *, wait: timedelta | str | None = None) -> Lock:
        """Hold a lock with this name: one handler at a time has it, over all processes of this database.

        `wait` is the longest wait; None: until it is free; "0 s": one try. After that it raises LockNotAvailable, an
        ordinary error: catch it, or let the retry policy set the delay. The lock has a connection of its own and is
        free when that ends, also if its process dies. Raises NotSupported in an atomic task, with process=True, and
        behind a pooler without a direct DSN.

            async with ctx.lock("ledger", wait="30 s"):  # in a plain handler: with ctx.lock("ledger", wait="30 s"):
                await post()
        """
        dsn = self._said().session_dsn
        if self._atomic:
            hint = "Call pg_advisory_xact_lock in its transaction: it is held until the commit"
            raise NotSupported("ctx.lock in an atomic task", hint=hint)
        if dsn is None:
            raise NotSupported("ctx.lock in a process of its own", hint="Give the task exclusive=True")
        return Lock(self, name, wait, dsn)

    def _said(self) -> Verbs:
        if self._verbs is None:
            raise RuntimeError("only available in the handler of a running job")
        return self._verbs

    def _wait(self, said: Coroutine[Any, Any, T]) -> T:
        loop = self._said().loop
        if in_loop():  # it would wait for itself
            said.close()
            raise RuntimeError("in an async handler, use `await` and the form without _sync")
        assert loop is not None
        return asyncio.run_coroutine_threadsafe(said, loop).result()

    def __repr__(self) -> str:
        running = self._running
        return f"<Context {running.task_name} {running.job_id}>" if running else "<Context>"
