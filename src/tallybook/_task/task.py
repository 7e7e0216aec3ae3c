"""Task: a callable function, with the verb that makes jobs of it.

    send_welcome(42)                                     calls the function
    await send_welcome.enqueue(conn, 42)                 enqueues a job, in conn's transaction
    await send_welcome.with_(delay="5 min").enqueue(conn, 42)
    send_welcome.job(42)                                 describes a job, for app.enqueue_many

Options of one job are passed to `with_`, so they never collide with the task's arguments.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, ParamSpec, Self, TypeVar, cast

from tallybook._db import calls
from tallybook._db.declared import Call
from tallybook._db.source import Source, demand_loop
from tallybook._db.sync import kind_of, refused, transaction_kind
from tallybook._db.verb import AsyncConn, Made, SyncConn, Verb, run, run_sync, traced
from tallybook._model.backoff import DEFAULT, Backoff
from tallybook._model.contract import PLAIN, Contract, Exclusive, Execution, Upgrade
from tallybook._model.job import Job, JobCall, Parent, checked_after
from tallybook._model.options import METHODS, Options, Unique, as_option, check_arguments, check_name, checked_links
from tallybook._model.payload import encode
from tallybook._model.signature import ArgsModel
from tallybook.errors import ConfigError, PayloadError, SignatureError

if TYPE_CHECKING:
    from tallybook._model.rate import BreakerRule, ConcurrencyRule, RateRule
    from tallybook._model.subject import SubjectReport
    from tallybook._task.subject import TaskSubject
    from tallybook.extra.providers import Providers

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
U = TypeVar("U", bound=Upgrade)
OnConflict = Literal["skip", "raise", "replace_args", "raise_priority", "push_run_at"]


class Owner(Source):
    """The base of App: what its tasks, and the workers that serve it, read of it."""

    tasks: Mapping[str, Task[..., Any]]
    _names: Mapping[str, Task[..., Any]]
    """The task names that its jobs may have: names and aliases of its tasks."""
    providers: Providers
    _putting: Callable[[JobCall], Call[Job]]
    _declared_schedules: Callable[[], list[dict[str, Any]]]

    def __init__(self, name: str, dsn: str | None, sessions: tuple[Callable[[], Any], ...]) -> None:
        super().__init__(name, dsn)
        self._sessions = sessions
        self._lifespans: list[Callable[[Any], AsyncIterator[Any]]] = []
        self._arounds: list[Callable[[Any], AsyncIterator[Any]]] = []
        self._thread_arounds: list[Callable[[Any], Iterator[Any]]] = []
        """The hooks that run in the thread of a plain handler."""
        self._also_serves: set[str] = set()
        """Queues that a worker without a list of queues serves, in addition to those of its tasks."""
        # Declared in code, by name.
        self._retry_policies: dict[str, Backoff] = {}
        self._rate_rules: dict[str, RateRule] = {}
        self._concurrency_rules: dict[str, ConcurrencyRule] = {}
        self._breaker_rules: dict[str, BreakerRule] = {}

    def _policy(self, name: str, *, task: str | None = None) -> Backoff:
        if name in self._retry_policies:
            return self._retry_policies[name]
        from difflib import get_close_matches

        near = get_close_matches(name, self._retry_policies, 3)
        known = " or ".join(map(repr, near)) or ", ".join(map(repr, sorted(self._retry_policies)))
        hint = f"Did you mean {known}?" if near else f"It has {known or 'none'}; declare it by app.retry_policy(...)"
        option = "retry" if task is None else f"retry of task {task!r}"
        raise ConfigError(option, name, f"app {self.name!r} has no retry policy of that name", hint=hint)


class BoundTask(Generic[P, R_co]):
    """A task with options for its next jobs, made by `task.with_(...)`; it can be kept and used many times.

    A Task is one with its own options.
    """

    __slots__ = ("_exclusive", "_keyed", "app", "args", "name", "options")

    def __init__(self, owner: Task[P, R_co], options: Options) -> None:
        self.options = options
        self.app: Owner = owner.app
        self.name: str = owner.name
        self.args: ArgsModel = owner.args
        self._exclusive = owner.exclusive.limits(owner.name) if owner.exclusive else ()
        self._keyed = options.unique is not None and options.unique is not False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            ours = METHODS.get(name)
            hint = "" if ours is None else f". Here it is .{ours}" if ours[0] != "(" else f". Here it is {ours}"
            raise AttributeError(f"{type(self).__name__!r} has no {name!r}{hint}", name=name, obj=self)

    def enqueue(self, conn: AsyncConn | Source, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Job[R_co]]:
        """Enqueue one job in `conn`'s transaction: workers see it after the commit, and never after a rollback.

        `conn` is a psycopg AsyncConnection, an asyncpg connection, a SQLAlchemy AsyncSession or AsyncConnection; or
        the App, which uses its own connection and commits at once. Raises SignatureError and PayloadError before
        anything is sent, ConnectionNotSupported for any other object, and NotSupported if no event loop runs.

            job = await send_welcome.enqueue(conn, 42, lang="de")
        """
        demand_loop("enqueue")
        return self._enqueue(conn, args, kwargs)

    def enqueue_sync(self, conn: SyncConn | Source, /, *args: P.args, **kwargs: P.kwargs) -> Job[R_co]:
        """Enqueue one job in `conn`'s transaction, like `enqueue`, without an event loop.

        `conn` is a psycopg Connection, a SQLAlchemy Session or Connection, a Django connection or its alias; or the
        App, which opens a connection for it and commits at once.

            job = send_welcome.enqueue_sync(session, 42, lang="de")
        """
        return run_sync(conn, self._made(conn, args, kwargs, sync=True))

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobCall:
        """Describe a job, checked and encoded, for `app.enqueue_many`. Raises SignatureError, PayloadError.

        report = await app.enqueue_many(conn, [send_welcome.job(1), charge.job(7)])
        """
        if isinstance(self.options.retry, str):
            self.app._policy(self.options.retry)  # a typo is found here, not when the job fails
        text = encode(self.args.bind(args, kwargs), task=self.name)
        keyed = self.options.limits or self.options.fair_key or self._exclusive
        options = self._keys_filled(text) if keyed else self.options
        return JobCall(self.name, text, self._key(text) if self._keyed else None, options)

    async def _enqueue(self, conn: object, args: Any, kwargs: Any) -> Job[R_co]:
        return await run(conn, self._made(conn, args, kwargs, sync=False))

    def _made(self, conn: object, args: Any, kwargs: Any, *, sync: bool) -> Made[Job]:
        try:
            job = self.job(*args, **kwargs)
        except SignatureError:
            if kind_of(conn) or isinstance(conn, Source):
                raise
            raise refused(conn, "enqueue", sync=sync) from None  # the connection was forgotten
        return traced(self.app._tracing, job, self.app._putting if self.options.after else calls.enqueue)

    def subject(self, name: str) -> TaskSubject[P]:
        """Return the subject of this name (1 to 512 bytes), to push, upsert, read or forget it. Sends nothing yet.

        await refresh.subject("asset:42").push(42).on(conn)
        """
        from tallybook._task.subject import TaskSubject

        return TaskSubject(self, name)

    def append(self, *args: P.args, **kwargs: P.kwargs) -> Verb[SubjectReport]:
        """Create a subject with a new name, to run at once; the report has the name.

        report = await refresh.append(42).on(conn)
        """
        from tallybook._task.subject import appending

        return Verb(self.app, traced(self.app._tracing, self.job(*args, **kwargs), appending), "append")

    def _keys_filled(self, text: str) -> Options:
        """Return the options with the args filled into the limits' keys and the fair key."""
        limits, fair = self.options.limits + self._exclusive, self.options.fair_key
        if not self._exclusive and not any("{" in key for key in (*limits, fair or "")):
            return self.options
        args = json.loads(text)
        limits = tuple(self._filled("limits", key, args) for key in limits)
        return replace(self.options, limits=limits, fair_key=fair and self._filled("fair_key", fair, args))

    def _filled(self, option: str, key: str, args: Mapping[str, Any]) -> str:
        def value(found: re.Match[str]) -> str:
            check_arguments(option, (found[1],), self.name, (found[1],), self.args.names)
            given = args.get(found[1])
            if isinstance(given, bool) or not isinstance(given, str | int):
                reason = f"argument {found[1]!r} is neither a string nor an integer here"
                raise ConfigError(option, key, reason, hint=f"Name the key by with_({option}=...)")
            return str(given)

        return re.sub(r"\{(\w+)\}", value, key)

    def _key(self, text: str) -> str:
        unique = self.options.unique
        if isinstance(unique, str):
            return unique
        args = json.loads(text)
        if isinstance(unique, tuple):
            check_arguments("unique", unique, self.name, unique, self.args.names)
            args = {name: args[name] for name in unique if name in args}
        canonical = json.dumps(args, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __repr__(self) -> str:
        return f"<Task {self.name} with {self.options}>"


class Task(BoundTask[P, R_co]):
    """A function that jobs run, made by `@app.task`. Calling it only calls the function.

    `name` is stored with each job; SQL producers and older releases of the program rely on it. `fn` is the function,
    `is_async` whether it is a coroutine function. `queue` and `priority` (lower runs first) are the defaults of its
    jobs, which `with_` overrides. `max_attempts` (None: the queue's), `retry_name` (of a named policy), `no_retry` and
    `execution` (timeout, process, memory, env) are as declared. `args` binds and decodes its arguments; `contract` has
    its version, aliases, summary and on_dead.
    """

    __wrapped__: Callable[..., Any]
    __name__: str

    def __init__(
        self,
        app: Owner,
        fn: Callable[..., Any],
        *,
        name: str | None,
        options: Options,
        retry: Backoff | str | None,
        no_retry: tuple[type[BaseException], ...],
        store_result: bool,
        contract: Contract,
        atomic: bool | str,
        execution: Execution,
        exclusive: Exclusive | None,
    ) -> None:
        self.store_result = store_result
        self.contract = contract
        functools.update_wrapper(self, _checked(fn))
        self.app = app
        self.fn = fn
        if name is None and fn.__name__ == "<lambda>":
            raise ConfigError("name", fn.__name__, "a lambda has no name to store in a row", hint="Give it name=...")
        self.name = fn.__name__ if name is None else name
        check_name("name", self.name, 200)
        self.is_async = inspect.iscoroutinefunction(fn)
        self.queue = options.queue
        self.priority = options.priority
        self.max_attempts = options.max_attempts
        self.retry_name = retry if isinstance(retry, str) else None
        self._retry = DEFAULT if retry is None or isinstance(retry, str) else retry
        self.no_retry = no_retry
        self.execution = execution
        self.exclusive: Exclusive | None = exclusive
        self.guarded = execution is not PLAIN
        if not isinstance(atomic, bool | str) or atomic == "":
            raise ConfigError("atomic", atomic, "neither True nor False", hint="Or the alias of a Django database")
        self.atomic = atomic
        self.args = ArgsModel(fn, task=self.name, is_special=_is_given, check_specials=self._check_given)
        if exclusive is not None and exclusive.key and not self.args.is_open:  # else no annotation is resolved
            exclusive.check(self.name, self.args.names)
        # The task's policy is looked up when an attempt fails; a row stores only the policy that its job set.
        super().__init__(self, replace(options, max_attempts=None, version=contract.version))

    def of_app(self, app: Owner) -> Self:
        """Return the same task for another app, with that app's retry policies, providers and on_dead."""
        found = copy(self)
        found.app = app
        return found

    @property
    def retry(self) -> Backoff:
        """Its retry policy. Raises ConfigError if the app has not declared the named policy."""
        return self._retry if self.retry_name is None else self.app._policy(self.retry_name, task=self.name)

    def upgrade(self, version: int) -> Callable[[U], U]:
        """Declare the upgrade of args from `version` to the next one: a plain function that takes and returns a dict.

        It receives the enqueued JSON values by name when such a job runs; the stored row does not change. Upgrades are
        chained: from 1 to 2, from 2 to 3. An exception makes the job dead. Raises ConfigError for a version that is not
        below the task's or has an upgrade already, and for a function that is not plain.

            @send_welcome.upgrade(1)
            def _(args: dict) -> dict:
                return {"user_id": args["id"], "lang": "en"}
        """

        def declare(fn: U) -> U:
            self.contract.add_upgrade(self.name, version, fn)
            return fn

        return declare

    @functools.cached_property
    def wants_context(self) -> bool:
        """Whether its function takes a Context, first or after its transaction.

        Raises SignatureError if it is not supported.
        """
        return any(map(_is_context, self.args.specials))

    @functools.cached_property
    def transaction(self) -> str:
        """The kind of transaction that its function takes first if it is atomic; else empty."""
        return next(filter(None, map(transaction_kind, self.args.specials)), "")

    def _check_given(self, annotations: Sequence[Any]) -> None:
        kinds = ["Context" if _is_context(annotation) else transaction_kind(annotation) for annotation in annotations]
        if not self.atomic:
            if kinds not in ([], ["Context"]):
                reason = "it takes a transaction, or a Context twice; a transaction needs @app.task(atomic=True)"
                raise SignatureError(self.name, reason)
            return
        kind = kinds[0] if kinds else ""
        if kind in ("", "Context") or kinds[1:] not in ([], ["Context"]):
            raise SignatureError(
                self.name,
                "an atomic task takes its transaction first, by the annotation: psycopg.AsyncConnection or Connection,"
                " asyncpg.Connection, SQLAlchemy's Session or AsyncSession, or Django's BaseDatabaseWrapper;"
                " then optionally a Context",
            )
        if kind.startswith("async") != self.is_async:
            takes = "a plain one, so no `async`" if self.is_async else "an async one, so it has to be `async def`"
            raise SignatureError(self.name, f"its transaction is {takes}")
        if isinstance(self.atomic, str) and kind != "django":
            reason = f"atomic={self.atomic!r} names a database of Django's, and it takes another"
            raise SignatureError(self.name, reason)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function directly, as a unit test does; no job, no connection."""
        result: R_co = self.fn(*args, **kwargs)
        return result

    def result_text(self, value: object) -> str | None:
        """Encode a return value as `encoded_result` does; return None if the task stores no result."""
        return encoded_result(value, self.name) if self.store_result else None

    def read_result(self, found: Any) -> R_co:
        """Decode a stored result by the function's return annotation; plain JSON values if that is not supported.

        Raises PayloadError if the result does not fit the annotation.
        """
        from tallybook._model.decoder import decode

        if found is not None:
            with suppress(SignatureError):
                found = decode(self.args.returns, found, task=self.name, what="result")
        return cast("R_co", found)

    def with_(
        self,
        *,
        run_at: datetime | None = None,
        delay: timedelta | str | None = None,
        priority: int | None = None,
        queue: str | None = None,
        unique: Unique | None = None,
        max_attempts: int | None = None,
        headers: Mapping[str, object] | None = None,
        links: Mapping[str, str | int] | None = None,
        on_conflict: OnConflict | None = None,
        unique_while: Literal["running", "queued"] | None = None,
        order_key: str | None = None,
        expires_at: datetime | None = None,
        retry: Backoff | str | None = None,
        after: Parent | Iterable[Parent] | None = None,
        on_parent: Literal["completed", "any"] | None = None,
        limits: tuple[str, ...] | None = None,
        fair_key: str | None = None,
        **unknown: Never,
    ) -> BoundTask[P, R_co]:
        """Return the task with options for its next jobs; None keeps the task's value.

        Raises ConfigError for a wrong value.

        `run_at` is aware; `delay` (a timedelta, or text like "5 min") counts from the enqueue, by the server's clock.
        `priority` is 0 to 32767, lower runs first. `unique` is a key: while a live job of this task has it, another
        enqueue adds no job and returns `Job.created` False. True derives the key from all args, a tuple from the named
        args; False means no key. A derived key is the SHA-256 of the args as Python encodes them, without defaults.
        With `unique_while="queued"` the key is free once its job starts. `on_conflict` decides what an enqueue does if
        a job has the key: "skip", "raise" (KeyTaken), or, if that job has not started, "replace_args",
        "raise_priority" (if this call's runs earlier) or "push_run_at" (to this call's time). Jobs with the same
        `order_key` run one at a time, in the order in which they became available. After `expires_at` (aware) no
        attempt starts: the job is dead, with the reason expired. The job waits until all jobs of `after` have ended:
        Jobs, ids, or `task.job(...)` of the same `enqueue_many`. If one is cancelled or dead, the job is cancelled,
        unless `on_parent` is "any": see https://github.com/tallybook/tallybook/blob/main/docs/fan-out.md. `links` name
        up to 10 of your rows, like {"submission": 42}; `app.jobs.trace` finds the job by them. `retry` is an
        Exponential, Constant or Linear, or the name of a policy of the app; a function cannot be stored in a row.
        `limits` are the keys of the limits that hold the job, like "provider:acme"; `{name}` is replaced by that
        argument. Jobs with a `fair_key` ("tenant:42", or "tenant:{tenant}" for an argument) take turns with the other
        keys of their queue, one job per key.

            await send_welcome.with_(delay="5 min", unique="u:42").enqueue(conn, 42)
        """
        for name in unknown:
            raise TypeError(f"with_() has no option {name!r}. {as_option(name) or 'help(Task.with_) lists them'}")
        given = {
            "run_at": run_at, "delay": delay, "priority": priority, "queue": queue, "unique": unique,
            "max_attempts": max_attempts, "headers": _headers(self.name, headers, links), "on_conflict": on_conflict,
            "unique_while": unique_while, "order_key": order_key, "expires_at": expires_at, "retry": retry,
            "after": None if after is None else checked_after(after), "on_parent": on_parent, "limits": limits,
            "fair_key": fair_key,
        }  # fmt: skip
        return BoundTask(self, self.options.replaced(given))

    def __repr__(self) -> str:
        return f"<Task {self.name} of {self.app.name}>"


def job_of_rows(task: BoundTask[..., Any]) -> JobCall:
    """Describe the jobs of a query, whose rows have their args and keys. ConfigError: an unsupported option."""
    if isinstance(task.options.retry, str):
        task.app._policy(task.options.retry)
    if task._keyed:
        hint = "Write task.with_(unique=False), and give the query a column key"
        raise ConfigError("unique", task.options.unique, "the rows of the query have the keys", hint=hint)
    if task._exclusive:
        reason = "it cannot be filled from the args of the query's rows"
        raise ConfigError("exclusive", task._exclusive[0], reason, hint="Write exclusive=True")
    return JobCall(task.name, "{}", None, task.options)


def encoded_result(value: object, task: str) -> str:
    """Encode a return value as JSON; return "!" and the reason if that fails."""
    try:
        return encode(value, task=task, what="result")
    except PayloadError as error:
        logging.getLogger("tallybook.worker").warning("%s", error)
        return f"!{error.reason} at {error.path}"


def _is_context(annotation: Any) -> bool:
    module = sys.modules.get("tallybook._worker.run.context")  # not imported: no annotation is that class
    return module is not None and annotation is module.Context


def _is_given(annotation: Any) -> bool:
    return _is_context(annotation) or transaction_kind(annotation) != ""


def _headers(task: str, headers: Mapping[str, object] | None, links: Mapping[str, str | int] | None) -> str | None:
    if headers is None and links is None:
        return None
    if headers is not None and not isinstance(headers, Mapping):
        raise ConfigError("headers", headers, "not a mapping", hint="Write headers={'trace': '...'}")
    said = dict(headers or {})
    if "links" in said:
        raise ConfigError("headers", "links", "are an option of their own", hint="Write links={'submission': 42}")
    if links is not None:
        said["links"] = checked_links(links)
    return encode(said, task=task, max_bytes=8_000, what="headers")


def _checked(fn: object) -> Callable[..., Any]:
    if not inspect.isfunction(fn):
        raise ConfigError("task", fn, "not a function", hint="Options go by name: @app.task(queue='mail')")
    plain = inspect.unwrap(fn)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise ConfigError("task", fn, "a generator function, which a worker cannot run to its end")
    return fn
