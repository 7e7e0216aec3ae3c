"""The App: the tasks of one program, its hooks, the common verbs, and the nouns with all other verbs.

Creating an App and declaring tasks opens no connection, reads no setting and resolves no annotation.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from tallybook._app import declaring
from tallybook._db import calls
from tallybook._db.declared import Call
from tallybook._db.verb import AsyncConn, SyncConn, Verb, on_job, run, run_sync, traced
from tallybook._model.backoff import Backoff, Retry, as_policy
from tallybook._model.durations import parse_duration
from tallybook._model.job import Job, JobCall, checked_reason, job_id, with_follow_up
from tallybook._model.options import OF_APP, check_name
from tallybook._task import BoundTask
from tallybook._task import Task as _Task
from tallybook._task.task import Owner
from tallybook.errors import ConfigError, DuplicateTask

if TYPE_CHECKING:
    from tallybook._app.counts import Counts, Events
    from tallybook._app.declaring import AtomicOptions, PlainOptions
    from tallybook._app.history import Audit, Doctor, History, Services
    from tallybook._app.jobs import Dead, Jobs
    from tallybook._app.limits import Breakers, ConcurrencyLimits, RateLimits
    from tallybook._app.nodes import Nodes
    from tallybook._app.queues import Queues
    from tallybook._app.schedules import InCode, Schedules
    from tallybook._app.subjects import Subjects
    from tallybook._model.job_info import JobInfo
    from tallybook._worker.life.drain import DrainReport
    from tallybook._worker.life.stopping import WorkerReport
    from tallybook._worker.run.context import Context
    from tallybook.extra.providers import Providers

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Tx = TypeVar("Tx")
Hook = TypeVar("Hook", bound=Callable[[Any], AsyncIterator[Any]])
Around = TypeVar("Around", bound=Callable[[Any], AsyncIterator[Any] | Iterator[Any]])

if TYPE_CHECKING:

    class Task(_Task[P, R_co]):
        """A Task made by an App; a type checker sees the App's nouns through it."""

        app: App

    class ContextTask(Task[P, R_co]):
        """A Task whose function takes a Context first: pass one to a direct call, not to an enqueue."""

        def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R_co:  # type: ignore[override]
            """Call the function directly, with a Context."""

    class AtomicTask(Task[P, R_co], Generic[Tx, P, R_co]):
        """A Task whose function takes its transaction first: pass one to a direct call, not to an enqueue."""

        def __call__(self, tx: Tx, /, *args: P.args, **kwargs: P.kwargs) -> R_co:  # type: ignore[override]
            """Call the function directly, in a transaction of yours."""

    class AtomicContextTask(Task[P, R_co], Generic[Tx, P, R_co]):
        """A Task whose function takes its transaction and a Context."""

        def __call__(self, tx: Tx, ctx: Context, /, *args: P.args, **kw: P.kwargs) -> R_co:  # type: ignore[override]
            """Call the function directly, in a transaction of yours and with a Context."""

else:
    Task = ContextTask = AtomicTask = AtomicContextTask = _Task


def _noun(module: str, cls: str) -> Any:
    """Make a noun of an App. Its module is imported on first access, since no program needs all of them."""

    def made(app: object) -> Any:
        return getattr(import_module(f"tallybook.{module}"), cls)(app)

    return cached_property(made)


class _Decorator(Protocol):
    """The decorator that `app.task(queue="mail")` returns: it makes a Task from a function."""

    @overload
    def __call__(self, fn: Callable[Concatenate[Context, P], R], /) -> ContextTask[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Task[P, R]: ...


class _AtomicDecorator(Protocol):
    """The decorator of `app.task(atomic=True)`: the first parameter is the transaction, not an argument of the job."""

    @overload
    def __call__(self, fn: Callable[Concatenate[Tx, Context, P], R], /) -> AtomicContextTask[Tx, P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Tx, P], R], /) -> AtomicTask[Tx, P, R]: ...


class App(Owner):
    """The tasks of one program under one name. It opens no connection at import.

    `dsn` is used for calls without a connection; None: TALLYBOOK_DSN, then libpq's PG* variables, read when needed.
    `session` makes the SQLAlchemy sessions of atomic tasks: a `sessionmaker`, an `async_sessionmaker`, or both in a
    tuple. Without it the worker makes a separate engine for them.

        app = App("shop")

        @app.task(queue="mail")
        async def send_welcome(user_id: int) -> None: ...
    """

    audit: Audit = _noun("_app.history", "Audit")
    breakers: Breakers = _noun("_app.limits", "Breakers")
    concurrency_limits: ConcurrencyLimits = _noun("_app.limits", "ConcurrencyLimits")
    counts: Counts = _noun("_app.counts", "Counts")
    dead: Dead = _noun("_app.jobs", "Dead")
    doctor: Doctor = _noun("_app.history", "Doctor")
    events: Events = _noun("_app.counts", "Events")
    history: History = _noun("_app.history", "History")
    jobs: Jobs = _noun("_app.jobs", "Jobs")
    nodes: Nodes = _noun("_app.nodes", "Nodes")
    providers: Providers = _noun("extra.providers", "Providers")
    queues: Queues = _noun("_app.queues", "Queues")
    rate_limits: RateLimits = _noun("_app.limits", "RateLimits")
    schedules: Schedules = _noun("_app.schedules", "Schedules")
    services: Services = _noun("_app.history", "Services")
    subjects: Subjects = _noun("_app.subjects", "Subjects")

    def __init__(
        self, name: str, *, dsn: str | None = None, session: Callable[[], Any] | tuple[Callable[[], Any], ...] = ()
    ) -> None:
        check_name("name", name, 200)
        super().__init__(name, dsn, session if isinstance(session, tuple) else (session,))
        for maker in self._sessions:
            if not callable(maker):
                raise ConfigError("session", maker, "not a sessionmaker", hint="Write session=sessionmaker(engine)")
        self.tasks: dict[str, Task[..., Any]] = {}
        self._names: dict[str, Task[..., Any]] = {}
        self._declared: dict[str, InCode] = {}
        """The schedules in code, by name."""
        self._included: list[Owner] = []
        """The other apps whose tasks it serves; enqueues of these tasks are traced as its own."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = ". A task enqueues: send_welcome.enqueue(conn, ...)" if name in OF_APP else ""
            raise AttributeError(f"{type(self).__name__!r} has no {name!r}{hint}", name=name, obj=self)

    @overload
    def task(self, fn: Callable[Concatenate[Context, P], R], /) -> ContextTask[P, R]: ...
    @overload
    def task(self, fn: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, /, **options: Unpack[PlainOptions]) -> _Decorator: ...
    @overload
    def task(self, /, **options: Unpack[AtomicOptions]) -> _AtomicDecorator: ...

    def task(self, fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Make a task from a function, async or plain. The function stays callable.

        `name` is the task name in its jobs, by default the function's name without its module. `queue` and `priority`
        (0 to 32767, lower runs first) are the defaults of its jobs. After `max_attempts` failures (1 to 32767, by
        default that of the queue, or 5) a job is dead. `unique` allows one live job per value of all args (True) or of
        the named args (a tuple). The return value is stored, up to 1 MB of JSON, for `app.result`, unless
        `store_result` is False. `atomic` runs the function in a transaction that also ends the attempt; the function
        takes it first, and the annotation selects the library (a string: a Django alias): see
        https://github.com/tallybook/tallybook/blob/main/docs/atomic.md. `limits` are the keys of the limits that hold
        each job ("provider:{provider}", where `{name}` is replaced by an argument). `fair_key` is as in `with_`, which
        changes queue, priority, retry, max_attempts, unique, limits and fair_key for one job. With `exclusive=True` one
        job of the task runs at a time; with a string ("{tenant}", as in `limits`) one per key. Another job waits, or is
        cancelled with `on_busy="skip"`. Raises DuplicateTask, ConfigError, SignatureError.

        `retry` sets the backoff after a failure, by default exponential from 5 s with jitter, at most 6 h. Pass a
        policy, the name of one declared by `retry_policy`, or a function of (failures) or (failures, error) that
        returns a timedelta, or None for no other attempt. An exception of a class in `no_retry` makes the job dead at
        once.

        `version` (1 to 999) is the version of the args: raise it when their names or meaning change, and declare an
        `upgrade`. `aliases` are old names of a renamed task. `summary` is a line for job lists, like "Welcome mail to
        {user_id}". `on_dead` is a task of this app (or its name): when a job dies, the same transaction enqueues one
        job of it, with the args job, task, args, failures and error. A starting worker checks upgrades, `summary` and
        `on_dead`.

        `timeout` (a timedelta, or text like "30 s") is the deadline of one attempt. An async handler is cancelled
        then; a plain one can check `ctx.timed_out`. If it has not ended 5 s later, it is abandoned and the attempt has
        failed. With `process=True` a plain function runs in a child process of the worker and is killed at its
        deadline; `memory` ("512 MB") limits its address space, and `env` names variables with database credentials
        that the child keeps.

        `schedule` is a cron expression, in the zone `tz`, or an interval (a timedelta): each tick enqueues a job
        without args. `jitter`, `missed`, `catch_up` and `overlap` are those of `app.schedule`, which also declares
        schedules with args, or several per task.

            @app.task(queue="mail", retry=Exponential(timedelta(minutes=5)))
            async def send_welcome(user_id: int, *, lang: str = "en") -> None: ...
        """
        return declaring.task(self, fn, **options)

    def include(self, *tasks: Task[..., Any]) -> None:
        """Serve tasks of another App, such as the ready-made tasks, under their names and with their options.

        Their jobs run here with this app as `ctx.app`; lifespans and hooks of the other App do not apply. Raises
        DuplicateTask, ConfigError.

            app.include(webhook, email, http)
        """
        for task in tasks:
            if not isinstance(task, Task):
                hint = "from tallybook.extra.tasks import webhook; app.include(webhook)"
                raise ConfigError("include", task, "not a task", hint=hint)
            self._declare(task.of_app(self))
            if task.app not in self._included:
                self._included.append(task.app)
            task.app._tracing = task.app._tracing or self._tracing

    def _declare(self, declared: Task[..., Any]) -> None:
        names = (declared.name, *declared.contract.aliases)
        if declared.name in names[1:]:
            raise ConfigError("aliases", declared.contract.aliases, f"{declared.name!r} is the task's own name")
        for name in names:
            if name in self._names:
                raise DuplicateTask(name, _place(self._names[name].fn), _place(declared.fn))
        if declared.exclusive is not None:
            for rule in map(declared.exclusive.rule, names[: len(names) if declared.exclusive.key is None else 1]):
                _add("exclusive", self._concurrency_rules, rule.name, rule)
        self.tasks[declared.name] = declared
        self._names.update(dict.fromkeys(names, declared))

    def retry_policy(self, name: str, policy: Retry) -> Backoff:
        """Declare a named retry policy, for `retry="patient"` of tasks and jobs. Returns the policy.

        A task may use the name before it is declared; a starting worker checks all names. Raises ConfigError for a name
        that already has a policy, and for an invalid policy (see `task`).

            app.retry_policy("patient", Exponential(timedelta(minutes=5)))
        """
        check_name("retry_policy", name, 64)
        return _add("retry_policy", self._retry_policies, name, as_policy(policy, option=f"retry_policy {name!r}"))

    def lifespan(self, fn: Hook) -> Hook:
        """Open shared resources once per worker process or drain: an async generator function that yields once.

        Handlers find the attributes that it sets on `ctx.state`. The code after its yield runs at the end.

            @app.lifespan
            async def clients(ctx):
                async with httpx.AsyncClient() as ctx.state.http:
                    yield
        """
        self._lifespans.append(_hook("lifespan", fn))
        return fn

    def around_job(self, fn: Around) -> Around:
        """Run code around every job: an async generator function that yields once, while the job runs.

        Several nest in the order of their declaration. The handler's exception is raised at the yield. A plain
        generator function surrounds plain handlers only, inside the async ones and in the handler's thread; use it for
        resources of a thread, such as Django's connections. Neither runs in the child process of a task with
        process=True.

            @app.around_job
            async def tenant(ctx):
                with tenant_of(ctx.args):
                    yield
        """
        if inspect.isgeneratorfunction(fn):
            self._thread_arounds.append(_takes_context("around_job", fn))
        else:
            self._arounds.append(_hook("around_job", fn))
        return fn

    def schedule(
        self,
        name: str,
        job: JobCall | Task[..., Any] | BoundTask[..., Any],
        *,
        cron: str | None = None,
        every: timedelta | str | None = None,
        query: str | None = None,
        tz: str | None = None,
        jitter: timedelta | str | None = None,
        missed: str = "once",
        catch_up: int = 100,
        overlap: bool = False,
    ) -> None:
        """Declare a schedule in code. `@app.task(schedule=...)` is the short form for one schedule without args.

        A starting worker stores it, updates it, and removes it once it is no longer in the code. `cron` has 5 fields,
        or 6 with seconds first, and allows names (MON, JAN, @daily), in the zone `tz` ("UTC" by default). `every` is an
        interval; its ticks are the multiples of its length since 1970 (UTC). `jitter` delays each tick by up to this
        length; the delay depends on the schedule's name and the tick. `missed` decides about ticks that are found more
        than 60 s late: "once" fires the latest, "skip" none, "all" the latest `catch_up` (1 to 1000), one after the
        other. While the job of a tick is open, the next tick is skipped, unless `overlap` is True. Raises
        ExpressionError and ConfigError, and InvalidArgument if `job` is not of the right kind.

            app.schedule("report-de", report.job("de"), cron="0 6 * * MON-FRI", tz="Europe/Berlin")

        With a `query`, pass the task or `task.with_(...)` instead of a job. Each tick enqueues one job per row, except
        for rows whose key an open job has. The query is one SELECT with a column `args` (jsonb), and optionally `key`,
        `run_at` and `priority`. Workers run it with their rights; its error is stored with the tick.

            app.schedule("stale", refresh.with_(priority=3), query="select id as key, ...", cron="* * * * *")
        """
        from tallybook._app.schedules import InCode, scheduled_job
        from tallybook._model.schedule import Timing, check_query, described

        if query is not None:
            query = check_query(query)
        job = scheduled_job(job, query)
        timing = Timing.checked(
            cron=cron, every=every, tz=tz, jitter=jitter, missed=missed, catch_up=catch_up, overlap=overlap
        )
        described(name, job)
        self._declare_schedule(name, InCode(timing, lambda: job, query))

    def _declare_schedule(self, name: str, declared: InCode) -> None:
        check_name("schedule", name, 200)
        _add("schedule", self._declared, name, declared)

    def _declared_schedules(self) -> list[dict[str, Any]]:
        """Describe each schedule in code, as workers store it. Raises ConfigError if its job cannot be described."""
        from tallybook._app.schedules import definition

        found = sorted(self._declared.items())
        return [definition(name, one.job(), one.timing, one.query) for name, one in found]

    def rate_limit(
        self, name: str, calls: int, *, per: timedelta | str, burst: int = 1, per_node: bool = False
    ) -> None:
        """Declare a rate limit: at most `calls` in any window of `per`, over all workers and restarts.

        It holds jobs that name it (`limits=("provider:acme",)`) or whose handlers call `ctx.limit("provider:acme")`,
        each key `NAME:...` separately. The name "queue:mail" holds all jobs of a queue, "task:send_welcome" all jobs of
        a task. Without a `burst`, jobs start `per / calls` apart; with one, up to that number start at once after a
        pause. A starting worker stores it, updates it, and removes it once it is no longer in the code. Several nodes
        divide it, unless `per_node` is True: then each node has the whole limit, for keys that belong to one node.
        Raises ConfigError.

            app.rate_limit("provider", 8, per="1 min")
        """
        from tallybook._model.rate import RateRule

        rule = RateRule(name, calls, parse_duration(per, option="per"), burst, per_node)
        _add("rate_limit", self._rate_rules, name, rule)

    def concurrency_limit(self, name: str, most: int, *, per_node: bool = False) -> None:
        """Declare a concurrency limit: at most `most` jobs of a key run at once, over all workers.

        Names are those of `rate_limit`; a name may have both kinds of limit. Further jobs wait (state waiting) and
        start, by priority and then in order of arrival, when a running job has ended or its worker has died.
        `per_node` as in `rate_limit`. Raises ConfigError.

            app.concurrency_limit("customer", 2)
        """
        from tallybook._model.rate import ConcurrencyRule

        _add("concurrency_limit", self._concurrency_rules, name, ConcurrencyRule(name, most, per_node))

    def breaker(self, name: str, failures: int, *, per: timedelta | str, open_for: timedelta | str) -> None:
        """Declare a circuit breaker: after `failures` failures of a key within `per`, its jobs wait for `open_for`.

        Then one job runs as a probe: if it completes, the others start; if it fails, they wait again. Names are those
        of `rate_limit`; a name may have rules of all kinds. Raises ConfigError.

            app.breaker("provider", 5, per="1 min", open_for="30 s")
        """
        from tallybook._model.rate import BreakerRule

        length, opened = parse_duration(per, option="per"), parse_duration(open_for, option="open_for")
        _add("breaker", self._breaker_rules, name, BreakerRule(name, failures, length, opened))

    def get(self, job: int | Job) -> Verb[JobInfo]:
        """Read one job as it is now. Raises UnknownJob.

        (await app.get(job)).state
        """
        return on_job(self, job_id(job), calls.get(job_id(job)))

    def cancel(self, job: int | Job, reason: str | None = None) -> Verb[str]:
        """Cancel a job; return "cancelled", "cancelling" if it runs, or the state in which it had ended.

        A dead letter becomes cancelled, keeps its errors, and leaves the dead letters. Raises UnknownJob.

            state = await app.cancel(job.id, "the order was withdrawn").on(conn)
        """
        return on_job(self, job_id(job), calls.cancel(job_id(job), checked_reason(reason)))

    def retry(self, job: int | Job) -> Verb[int]:
        """Retry a dead or cancelled job at once; return the number of its next attempt.

        A job that was cancelled while it was scheduled or waiting keeps that state. Raises UnknownJob, and
        InvalidArgument if the job has another state or another job has its unique key.

            attempt = await app.retry(4711)
        """
        return on_job(self, job_id(job), calls.retry(job_id(job)))

    @overload
    def result(
        self, job: Job[Coroutine[Any, Any, R]], *, timeout: timedelta | str | None = timedelta(seconds=10)
    ) -> Verb[R]: ...
    @overload
    def result(self, job: Job[R], *, timeout: timedelta | str | None = timedelta(seconds=10)) -> Verb[R]: ...
    @overload
    def result(self, job: int, *, timeout: timedelta | str | None = timedelta(seconds=10)) -> Verb[Any]: ...

    def result(self, job: int | Job, *, timeout: timedelta | str | None = timedelta(seconds=10)) -> Verb[Any]:
        """Wait until a job has ended and return its handler's return value. A `timeout` of None waits without a limit.

        The value has the type of the handler's return annotation if this App has the task, else a plain JSON type.
        Polls every 10 ms at first, then less often, on one of the App's own connections, or on `.on(conn)` outside a
        transaction. Raises UnknownJob (also if the enqueue is not committed), ResultTimeout (the job continues),
        JobDied, JobCancelled, ResultMissing if the job completed but its result could not be stored, and PayloadError
        if the result does not fit the annotation.

            text = await app.result(job, timeout=timedelta(seconds=10))
        """
        from tallybook._app.jobs import wait

        patience = float("inf") if timeout is None else parse_duration(timeout, option="timeout").total_seconds()
        return on_job(self, job_id(job), partial(wait, job_id(job), patience, self._names), "result")

    async def enqueue_many(
        self, conn: AsyncConn | App, jobs: Iterable[JobCall], *, then: JobCall | None = None
    ) -> list[Job]:
        """Enqueue many jobs of any tasks by one statement in `conn`'s transaction; return their Jobs in the same order.

        All jobs are checked before anything is sent. `conn` is as in Task.enqueue, or the App itself. `then` is a
        follow-up that runs when all of them have ended, in any state unless its own `on_parent` is "completed"; its Job
        is the last one. A parameter `failed` of its task receives the list of jobs that did not complete: see
        https://github.com/tallybook/tallybook/blob/main/docs/fan-out.md.

            report = await app.enqueue_many(conn, [send_welcome.job(1), charge.job(7)])
        """
        listed = with_follow_up(jobs, then)
        return await run(conn, traced(self._tracing, listed, self._putting_many)) if listed else []

    def enqueue_many_sync(
        self, conn: SyncConn | App, jobs: Iterable[JobCall], *, then: JobCall | None = None
    ) -> list[Job]:
        """Enqueue many jobs; `enqueue_many` without an event loop."""
        listed = with_follow_up(jobs, then)
        return run_sync(conn, traced(self._tracing, listed, self._putting_many)) if listed else []

    def _putting(self, job: JobCall) -> Call[Job]:
        return calls.put(job, self._takes_failed)

    def _putting_many(self, jobs: list[JobCall]) -> Call[list[Job]]:
        return calls.put_many(jobs, self._takes_failed)

    def _takes_failed(self, task: str) -> bool:
        """Whether this task has a parameter `failed`, for the jobs it waited for that did not complete."""
        known = self._names.get(task)
        return known is not None and calls.FAILED in known.args.names

    async def run_worker(
        self, *, queues: Mapping[str, int] | Iterable[str] | None = None, nodes: str | None = None, **options: Any
    ) -> WorkerReport:
        """Run jobs of these queues until stopped.

        `options` are those of a worker, by their names in Python, and `install_signals`: see
        https://github.com/tallybook/tallybook/blob/main/docs/configuration.md#worker.

        `nodes` is "all", or names like "north,south": one process serves these databases of the app,
        see https://github.com/tallybook/tallybook/blob/main/docs/nodes.md.

            await app.run_worker(queues={"mail": 10, "default": 20})
        """
        from tallybook._worker import entry

        return await entry.run_worker(self, queues=queues, nodes=nodes, **options)

    async def drain(
        self,
        *,
        queues: Mapping[str, int] | Iterable[str] | None = None,
        max_jobs: int | None = None,
        max_seconds: float | timedelta | None = None,
        dsn: str | None = None,
        nodes: str | None = None,
        raise_on_failure: bool = False,
    ) -> DrainReport:
        """Run all due jobs, for at most `max_jobs` jobs and `max_seconds` seconds, and return the counts; never waits.

        `nodes` as in `run_worker`, one after the other; the report lists those that do not answer as `unreachable`.
        `raise_on_failure` is for tests: at the end, raise JobFailed for the first failed attempt, with the handler's
        exception as its cause.

            done = await app.drain(max_jobs=10, max_seconds=25)
        """
        from tallybook._worker import entry

        seconds = max_seconds.total_seconds() if isinstance(max_seconds, timedelta) else max_seconds
        limits = {"max_jobs": max_jobs, "max_seconds": seconds, "raise_on_failure": raise_on_failure}
        return await entry.drain(self, dsn, queues, nodes, **limits)

    def __repr__(self) -> str:
        return f"<App {self.name}, {len(self.tasks)} tasks>"


# `help` and other readers find the options with their defaults.
App.task.__signature__ = inspect.signature(declaring.task)  # type: ignore[attr-defined]


def _add(option: str, declared: dict[str, R], name: str, one: R) -> R:
    if name in declared:
        raise ConfigError(option, name, "declared twice", hint="Give one of them another name")
    declared[name] = one
    return one


def _hook(option: str, fn: Any) -> Any:
    if not inspect.isasyncgenfunction(fn):
        hint = f"Write `async def {getattr(fn, '__name__', option)}(ctx)` with one yield, and no other decorator"
        raise ConfigError(option, fn, "not an async generator function", hint=hint)
    return _takes_context(option, fn)


def _takes_context(option: str, fn: Any) -> Any:
    try:
        inspect.signature(fn).bind(object())
    except TypeError:
        raise ConfigError(option, fn, "it is called with one argument, the context") from None
    return fn


def _place(fn: Callable[..., Any]) -> str:
    code = inspect.unwrap(fn).__code__
    return f"{fn.__module__}.{fn.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
