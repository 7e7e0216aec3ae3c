"""The App: the tasks of one program, what surrounds their jobs, the daily verbs, and the nouns that have the others.

Making one and declaring tasks opens no connection, reads no setting and resolves no annotation.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from tallybook._app import declaring
from tallybook._db import calls, fan_out
from tallybook._db.declared import Call
from tallybook._db.verb import AsyncConn, SyncConn, Verb, do, do_sync, on_job, traced
from tallybook._model.after import with_follow_up
from tallybook._model.backoff import Backoff, Retry, as_policy
from tallybook._model.job import Job, JobCall, JobInfo, checked_reason, job_id
from tallybook._model.options import check_name
from tallybook._task import BoundTask
from tallybook._task import Task as _Task
from tallybook._task.owner import Owner
from tallybook.errors import ConfigError, DuplicateTask, InvalidArgument

if TYPE_CHECKING:
    from tallybook._app.breakers import Breakers
    from tallybook._app.counts import Counts, Events
    from tallybook._app.declaring import AtomicOptions, PlainOptions
    from tallybook._app.history import Audit, Doctor, History, Services
    from tallybook._app.jobs import Dead, Jobs
    from tallybook._app.limits import ConcurrencyLimits, RateLimits
    from tallybook._app.nodes import Nodes
    from tallybook._app.queues import Queues
    from tallybook._app.schedules import InCode, Schedules
    from tallybook._app.subjects import Subjects
    from tallybook._model.breaker import BreakerRule
    from tallybook._model.rate import ConcurrencyRule, RateRule
    from tallybook._worker.entry import DrainReport, WorkerReport
    from tallybook._worker.jobs import Running
    from tallybook._worker.run.context import Context
    from tallybook._worker.run.served import Contexts
    from tallybook._worker.run.verbs import Verbs
    from tallybook.extra.providers import Providers

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
Tx = TypeVar("Tx")
Hook = TypeVar("Hook", bound=Callable[[Any], AsyncIterator[Any]])
Around = TypeVar("Around", bound=Callable[[Any], AsyncIterator[Any] | Iterator[Any]])


if TYPE_CHECKING:

    class Task(_Task[P, R_co]):
        """A Task as its App has made it: with the App itself, whose nouns a type checker sees."""

        app: App

    class ContextTask(Task[P, R_co]):
        """A Task whose function takes a Context first: a direct call gives one, an enqueue does not."""

        def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R_co:  # type: ignore[override]
            """Call the function here and now, with a Context."""

    class AtomicTask(Task[P, R_co], Generic[Tx, P, R_co]):
        """A Task whose function takes its transaction first: a direct call gives one, an enqueue does not."""

        def __call__(self, tx: Tx, /, *args: P.args, **kwargs: P.kwargs) -> R_co:  # type: ignore[override]
            """Call the function here and now, in a transaction of yours."""

    class AtomicContextTask(Task[P, R_co], Generic[Tx, P, R_co]):
        """A Task whose function takes its transaction and a Context."""

        def __call__(self, tx: Tx, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R_co:  # type: ignore[override]
            """Call the function here and now, in a transaction of yours and with a Context."""

else:
    Task = ContextTask = AtomicTask = AtomicContextTask = _Task


class _Noun:
    """A noun of an App; its module is imported when it is first asked for, since no program needs them all."""

    def __init__(self, module: str, cls: str) -> None:
        self._module, self._cls = module, cls

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, app: object, owner: type) -> Any:
        if app is None:
            return self
        made = vars(app)[self._name] = getattr(import_module(f"tallybook.{self._module}"), self._cls)(app)
        return made


def _noun(module: str, cls: str) -> Any:
    return _Noun(module, cls)


class _Decorator(Protocol):
    """What `app.task(queue="mail")` returns: it makes a Task of a function."""

    @overload
    def __call__(self, fn: Callable[Concatenate[Context, P], R], /) -> ContextTask[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Task[P, R]: ...


class _AtomicDecorator(Protocol):
    """The same for `app.task(atomic=True)`: the first parameter is the transaction, and no argument of a job."""

    @overload
    def __call__(self, fn: Callable[Concatenate[Tx, Context, P], R], /) -> AtomicContextTask[Tx, P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Tx, P], R], /) -> AtomicTask[Tx, P, R]: ...


class App(Owner):
    """The tasks of one program under one name. No connection, no work at import.

    `dsn` is used where no connection is at hand; None: TALLYBOOK_DSN, then libpq's PG* variables, read when needed.
    `session` makes the SQLAlchemy sessions of atomic tasks, a `sessionmaker` or an `async_sessionmaker`, or both in a
    tuple; without it the worker has an engine of its own for them.

        app = App("shop")

        @app.task(queue="mail")
        async def send_welcome(user_id: int) -> None: ...
    """

    audit: Audit = _noun("_app.history", "Audit")
    breakers: Breakers = _noun("_app.breakers", "Breakers")
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
        self,
        name: str,
        *,
        dsn: str | None = None,
        session: Callable[[], Any] | tuple[Callable[[], Any], ...] = (),
    ) -> None:
        super().__init__(name, dsn)
        self._sessions = session if isinstance(session, tuple) else (session,)
        for maker in self._sessions:
            if not callable(maker):
                raise ConfigError("session", maker, "not a sessionmaker", hint="Write session=sessionmaker(engine)")
        self.tasks: dict[str, Task[..., Any]] = {}
        self._names: dict[str, Task[..., Any]] = {}
        """Every name that its jobs may carry: those of the tasks and their aliases."""
        self._lifespans: list[Callable[[Any], AsyncIterator[Any]]] = []
        self._arounds: list[Callable[[Any], AsyncIterator[Any]]] = []
        self._thread_arounds: list[Callable[[Any], Iterator[Any]]] = []
        """Those that run in the thread of a plain handler."""
        self._also_serves: set[str] = set()
        """Queues that a worker serves besides those that its tasks name, unless it is told which."""
        self._retry_policies: dict[str, Backoff] = {}
        self._rate_rules: dict[str, RateRule] = {}
        """The rate limits that its code declares."""
        self._concurrency_rules: dict[str, ConcurrencyRule] = {}
        """The concurrency limits that its code declares."""
        self._breaker_rules: dict[str, BreakerRule] = {}
        """The circuit breakers that its code declares."""
        self._declared: dict[str, InCode] = {}
        """The schedules that its code declares."""
        self._included: list[Owner] = []
        """The apps whose tasks it serves, too: what is put in by these tasks is traced as its own."""

    @overload
    def task(self, fn: Callable[Concatenate[Context, P], R], /) -> ContextTask[P, R]: ...
    @overload
    def task(self, fn: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, /, **options: Unpack[PlainOptions]) -> _Decorator: ...
    @overload
    def task(self, /, **options: Unpack[AtomicOptions]) -> _AtomicDecorator: ...

    @declaring.signed
    def task(self, fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Make a task of a function, async or plain; it stays callable as the function that it is.

        `name` is what its jobs carry, by default the function's own, without its module. `queue` and `priority` (0 to
        32767, lower runs first) are those of its jobs; `max_attempts` failures (1 to 32767, by default 5) make a job
        dead. `unique` allows one live job per value of all args (True) or of these (a tuple of names). What the handler
        returns is kept, up to 1 MB of JSON, for `app.result`, unless `store_result` is False. `atomic` runs the function
        in a transaction that it gets first, of the library that the annotation says, and that carries its end (a text:
        of Django, with this alias): see https://github.com/tallybook/tallybook/blob/main/docs/atomic.md.
        Queue, priority, retry, max_attempts and unique can be changed per job by `with_`, and so can `limits`, the
        keys of the limits that hold each of them ("provider:{provider}", where `{name}` stands for an argument). With
        `exclusive=True` one job of the task runs at a time, whatever put it in; with a text one of each key
        ("{tenant}", as in `limits`). Another one waits, or with `on_busy="skip"` is cancelled. Raises DuplicateTask,
        ConfigError, SignatureError.

        `retry` is the backoff after a failure, by default exponential from 5 s with jitter, at most 6 h: a policy; the
        name of one that `retry_policy` declares, before or after the task; or a function of (failures) or (failures,
        error) that returns a timedelta, or None for no other attempt. After an exception of a class in `no_retry`
        there is none either: the job is dead at once.

        `version` (1 to 999) is that of its args: raise it when their names or meaning change, and say by `upgrade` how
        older args become newer ones. Jobs that carry one of the `aliases` are its jobs, too: the old names of a renamed
        task. `summary` is one line that job lists show, like "Welcome mail to {user_id}". `on_dead` is a task of this app
        (or its name): when a job dies, one job of it is put in by the same transaction, with the args job, task, args,
        failures and error. These four are checked as a whole when a worker starts.

        `timeout` (a timedelta, or text like "30 s") is the deadline of one attempt: an async handler is cancelled then, a
        plain one told by `ctx.timed_out`; what has not ended 5 s later is abandoned, the attempt has failed. With
        `process=True` a plain function runs in a child process of the worker and is killed at its deadline; `memory`
        ("512 MB") limits its address space, `env` names variables with credentials of the database that it gets all the
        same.

        `schedule` is a cron expression, in the zone `tz`, or an interval (a timedelta): a job without args is put in at each
        tick. `jitter`, `missed`, `catch_up` and `overlap` are those of `schedule`, by which a task gets several, with args.

            @app.task(queue="mail", retry=Exponential(timedelta(minutes=5)))
            async def send_welcome(user_id: int, *, lang: str = "en") -> None: ...
        """
        return declaring.task(self, fn, **options)

    def include(self, *tasks: Task[..., Any]) -> None:
        """Serve tasks that another App declares, under their names and with their options, as the ready-made ones.

        Put in by their own `enqueue`, or by SQL, their jobs run here, and find this app as `ctx.app`; lifespans and hooks
        of the other App stay with it. Raises DuplicateTask, ConfigError.

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

    def _declare(self, declared: Task[..., Any]) -> Task[..., Any]:
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
        return declared

    def retry_policy(self, name: str, policy: Retry) -> Backoff:
        """Give a retry policy a name that tasks and jobs say: `retry="patient"`. Returns the policy.

        The name may be said before it is declared; a worker that starts checks those of its tasks. ConfigError for a
        name that has a policy already, and for anything that is no policy (see `task`).

            app.retry_policy("patient", Exponential(timedelta(minutes=5)))
        """
        check_name("retry_policy", name, 64)
        return _add("retry_policy", self._retry_policies, name, as_policy(policy, option=f"retry_policy {name!r}"))

    def _policy(self, name: str, *, task: str | None = None) -> Backoff:
        """The retry policy that `retry_policy` has declared under this name. ConfigError: there is none."""
        found = self._retry_policies.get(name)
        if found is not None:
            return found
        near = get_close_matches(name, self._retry_policies, 3)
        known = " or ".join(map(repr, near)) or ", ".join(map(repr, sorted(self._retry_policies)))
        hint = f"Did you mean {known}?" if near else f"It has {known or 'none'}; declare it by app.retry_policy(...)"
        option = "retry" if task is None else f"retry of task {task!r}"
        raise ConfigError(option, name, f"app {self.name!r} has no retry policy of that name", hint=hint)

    def _check_policies(self) -> None:
        """ConfigError unless every policy that a task names is declared: what a worker asks when it starts."""
        for task in self.tasks.values():
            _ = task.retry

    def _check_tasks(self) -> None:
        """ConfigError unless summaries, upgrades and on_dead of all tasks fit: what a worker asks when it starts."""
        from tallybook._app.catalogue import check

        check(self.name, self.tasks, self._names)
        self._declared_schedules()

    def _catalogue(self) -> list[dict[str, Any]]:
        """What each task is, as `tallybook task list` shows it and as workers put it on record."""
        from tallybook._app.catalogue import catalogue

        return catalogue(self.name, self.tasks, self._names)

    def _contexts(self, state: SimpleNamespace, verbs: Verbs) -> Contexts:
        """Make the Contexts of its jobs, for a worker that serves it."""
        from tallybook._worker.run.context import Context

        def context(job: Running | None = None, *, atomic: bool = False) -> Context:
            return Context(state, job, verbs, app=self, atomic=atomic)

        return context

    def lifespan(self, fn: Hook) -> Hook:
        """Open what handlers share, once per worker process: an async generator function that yields once.

        What it sets on `ctx.state` every handler finds there; what follows its yield runs when the worker stops.

            @app.lifespan
            async def clients(ctx):
                async with httpx.AsyncClient() as ctx.state.http:
                    yield
        """
        self._lifespans.append(_hook("lifespan", fn))
        return fn

    def around_job(self, fn: Around) -> Around:
        """Run code around every job: an async generator function that yields once, while the job runs.

        Several nest in the order in which they are declared. What the handler raises is raised at the yield. A plain
        generator function surrounds plain handlers only, inside the async ones and in the handler's own thread: for what
        belongs to a thread, as connections do in Django. Neither runs in the child of a task with process=True.

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
        """Declare a schedule in code, where a task has several or one with args; `@app.task(schedule=...)` is the short form.

        Workers put it on record when they start, change it where it differs, and remove it when it has left the code.
        `cron` has 5 fields, or 6 with seconds first, names (MON, JAN, @daily) included, in the zone `tz` ("UTC" by default);
        `every` is an interval, whose ticks are the multiples of its length since 1970 (UTC). `jitter` fires each tick up to
        so much later. `missed` says what becomes of ticks that are found more than 60 s late: "once" fires the latest,
        "skip" none, "all" the latest `catch_up` (1 to 1000), one after the other. While the job of a fire has not ended for
        good the next tick is skipped, unless `overlap` is True. Raises ExpressionError and ConfigError.

            app.schedule("report-de", report.job("de"), cron="0 6 * * MON-FRI", tz="Europe/Berlin")

        With a `query` each tick puts in one job for each of its rows, but for those whose key an open job has: one SELECT with a
        column `args` (jsonb), and `key`, `run_at` and `priority` where needed. It is given the task, or `task.with_(...)`,
        instead of a job. Workers run it, with their rights; what it fails with is on record as the fate of the tick.

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
        """What each schedule in code is, as workers put it on record. ConfigError for one whose job cannot be described."""
        from tallybook._db import schedules

        return [
            schedules.definition(name, found.job(), found.timing, found.query)
            for name, found in sorted(self._declared.items())
        ]

    def rate_limit(
        self, name: str, calls: int, *, per: timedelta | str, burst: int = 1, per_node: bool = False
    ) -> None:
        """Declare a rate limit: at most `calls` in any window of `per`, over all workers and restarts.

        Of the jobs that name it (`limits=("provider:acme",)`), or whose handlers call `ctx.limit("provider:acme")`, each key
        `NAME:...` is held by itself. The name "queue:mail" holds all jobs of a queue, "task:send_welcome" all of a task.
        They start one after the other, `per / calls` apart; with a `burst` so many start at once where there was room.
        Workers put it on record at their start, change it where it differs, and remove it when it has left the code. ConfigError.
        Several nodes divide it, unless `per_node` is True: then each has the whole, for a key that leads to one node.

            app.rate_limit("provider", 8, per="1 min")
        """
        from tallybook._model.rate import RateRule

        _add("rate_limit", self._rate_rules, name, RateRule.checked(name, calls, per, burst, per_node=per_node))

    def concurrency_limit(self, name: str, most: int, *, per_node: bool = False) -> None:
        """Declare a concurrency limit: at most `most` jobs of a key run at once, over all workers.

        Names are those of `rate_limit`; a name may have a rule of both kinds. What is over it waits (state waiting) and goes on, by
        priority, then as it came, when one that runs has ended or its worker has died. `per_node` as in `rate_limit`. ConfigError.

            app.concurrency_limit("customer", 2)
        """
        from tallybook._model.rate import ConcurrencyRule

        _add("concurrency_limit", self._concurrency_rules, name, ConcurrencyRule(name, most, per_node))

    def breaker(self, name: str, failures: int, *, per: timedelta | str, open_for: timedelta | str) -> None:
        """Declare a circuit breaker: after `failures` of a key within `per` its jobs wait for `open_for`.

        Then one job is let through as a probe: if it completes the others go on, and if it fails they wait once more. Names are
        those of `rate_limit`; a name may have rules of all kinds. ConfigError.

            app.breaker("provider", 5, per="1 min", open_for="30 s")
        """
        from tallybook._model.breaker import BreakerRule

        _add("breaker", self._breaker_rules, name, BreakerRule.checked(name, failures, per, open_for))

    def get(self, job: int | Job) -> Verb[JobInfo]:
        """Read one job as it is now. Raises UnknownJob.

        (await app.get(job)).state
        """
        return on_job(self, job_id(job), calls.get(job_id(job)))

    def cancel(self, job: int | Job, reason: str | None = None) -> Verb[str]:
        """Say that a job shall not run; what that means for it: "cancelled", "cancelling" if it runs, or how it ended.

        A dead letter ends as cancelled, with its errors, and leaves the dead letters. Raises UnknownJob.

            state = await app.cancel(job.id, "the order was withdrawn").on(conn)
        """
        return on_job(self, job_id(job), calls.cancel(job_id(job), checked_reason(reason)))

    def retry(self, job: int | Job) -> Verb[int]:
        """Give a dead or cancelled job another attempt, at once; the number of that attempt.

        Raises UnknownJob, and InvalidArgument for a job in another state or whose unique key another job has now.

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
        """Wait until a job has ended and return what its handler returned; None waits for ever.

        The value has the type of the handler's return annotation where this App knows the task, else JSON's own types.
        Looks again every 10 ms at first, then less often, on one of the App's own connections, or `.on(conn)`, which is not in
        a transaction. UnknownJob: there is none, or the transaction that enqueued it has not committed. ResultTimeout: it
        has not ended in time (it goes on). JobDied, JobCancelled: there will be no result. ResultMissing: it completed, and
        its result could not be kept.

            text = await app.result(job, timeout=timedelta(seconds=10))
        """
        from tallybook._app.results import patience, wait

        return on_job(self, job_id(job), partial(wait, job_id(job), patience(timeout), self._names), "result")

    async def enqueue_many(
        self, conn: AsyncConn | App, jobs: Iterable[JobCall], *, then: JobCall | None = None
    ) -> list[Job]:
        """Put many jobs in, of any tasks, by one statement in `conn`'s transaction; one Job each, in their order.

        All are checked before anything is sent. `conn` is as in Task.enqueue, the App itself included. `then` is a
        follow-up that runs when all of them have ended, whatever they ended as; its Job is the last one. If its task has
        a parameter `failed`, that gets a list of those that did not complete:
        see https://github.com/tallybook/tallybook/blob/main/docs/fan-out.md.

            report = await app.enqueue_many(conn, [send_welcome.job(1), charge.job(7)])
        """
        listed = with_follow_up(_listed(jobs), then)
        return await do(conn, traced(self._tracing, listed, self._putting_many)) if listed else []

    def enqueue_many_sync(
        self, conn: SyncConn | App, jobs: Iterable[JobCall], *, then: JobCall | None = None
    ) -> list[Job]:
        """Put many jobs in; enqueue_many without an event loop."""
        listed = with_follow_up(_listed(jobs), then)
        return do_sync(conn, traced(self._tracing, listed, self._putting_many)) if listed else []

    def _putting(self, job: JobCall) -> Call[Job]:
        """The verb that puts in one job, which may wait for others."""
        return fan_out.enqueue(job, self._takes_failed)

    def _putting_many(self, jobs: list[JobCall]) -> Call[list[Job]]:
        """The verb that puts in many, of which some may wait for others."""
        return fan_out.fan_out(jobs, self._takes_failed)

    def _takes_failed(self, task: str) -> bool:
        """Whether jobs of this task are told, by a parameter `failed`, which of the jobs that they waited for did not complete."""
        known = self._names.get(task)
        return known is not None and fan_out.FAILED in known.args.names

    async def run_worker(
        self, *, queues: Mapping[str, int] | Iterable[str] | None = None, nodes: str | None = None, **options: Any
    ) -> WorkerReport:
        """Run jobs of these queues until stopped; the options are those of `tallybook worker`.

        `nodes` is "all", or names like "north,south": serve these databases of the app in one process,
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
        """Run all that is due, at most `max_jobs` jobs and `max_seconds` seconds, and return the counts; never waits.

        `nodes` as for `run_worker`: one after the other; those that do not answer are in the report as `unreachable`.
        `raise_on_failure` is for tests: when all has run, JobFailed for the first attempt that failed, whose cause is
        what the handler raised.

            done = await app.drain(max_jobs=10, max_seconds=25)
        """
        from tallybook._worker import entry

        return await entry.drain(
            self,
            dsn=dsn,
            queues=queues,
            nodes=nodes,
            max_jobs=max_jobs,
            max_seconds=max_seconds,
            raise_on_failure=raise_on_failure,
        )

    def __repr__(self) -> str:
        return f"<App {self.name}, {len(self.tasks)} tasks>"


def _add(option: str, declared: dict[str, R], name: str, one: R) -> R:
    if name in declared:
        raise ConfigError(option, name, "declared twice", hint="Give one of them another name")
    declared[name] = one
    return one


def _listed(jobs: Iterable[JobCall]) -> list[JobCall]:
    listed = list(jobs)
    for at, job in enumerate(listed):
        if type(job) is not JobCall:
            raise InvalidArgument(f"job {at} is of type {type(job).__name__}", hint="Describe it by task.job(...)")
    return listed


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
