"""`@app.task`: its options with their types and defaults, and the Task made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict

from tallybook._model.backoff import NoRetry, Retry, as_policy, checked_no_retry
from tallybook._model.contract import Contract, Exclusive, Execution
from tallybook._model.options import Options, check_name
from tallybook._task import Task
from tallybook.errors import ConfigError

if TYPE_CHECKING:
    from tallybook._model.schedule import Timing


class _Options(TypedDict, total=False):
    name: str | None
    queue: str
    priority: int
    retry: Retry | str | None
    no_retry: NoRetry
    max_attempts: int | None
    unique: bool | tuple[str, ...] | None
    limits: tuple[str, ...]
    fair_key: str | None
    exclusive: bool | str
    on_busy: Literal["wait", "skip"]
    store_result: bool
    version: int
    aliases: tuple[str, ...]
    summary: str | None
    on_dead: Task[..., Any] | str | None
    timeout: timedelta | str | None
    schedule: str | timedelta | None
    tz: str | None
    jitter: timedelta | str | None
    missed: str | None
    catch_up: int | None
    overlap: bool | None


class PlainOptions(_Options, total=False):
    """Options of a task that is not atomic."""

    atomic: Literal[False]
    process: bool
    memory: str | None
    env: Sequence[str]


class AtomicOptions(_Options, total=False):
    """Options of an atomic task."""

    atomic: Required[Literal[True] | str]


def task(
    app: Any,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    queue: str = "default",
    priority: int = 2,
    retry: Retry | str | None = None,
    no_retry: NoRetry = (),
    max_attempts: int | None = None,
    unique: bool | tuple[str, ...] | None = None,
    limits: tuple[str, ...] = (),
    fair_key: str | None = None,
    exclusive: bool | str = False,
    on_busy: Literal["wait", "skip"] = "wait",
    store_result: bool = True,
    version: int = 1,
    aliases: tuple[str, ...] = (),
    summary: str | None = None,
    on_dead: Task[..., Any] | str | None = None,
    atomic: bool | str = False,
    timeout: timedelta | str | None = None,
    process: bool = False,
    memory: str | None = None,
    env: Sequence[str] = (),
    schedule: str | timedelta | None = None,
    tz: str | None = None,
    jitter: timedelta | str | None = None,
    missed: str | None = None,
    catch_up: int | None = None,
    overlap: bool | None = None,
) -> Any:
    """App.task."""
    timing = _timing(schedule, tz=tz, jitter=jitter, missed=missed, catch_up=catch_up, overlap=overlap)
    if isinstance(unique, str):
        hint = f"Write unique=({unique!r},) for one job per value of that argument, or with_(unique=...) for a key"
        raise ConfigError("unique", unique, "one key for all jobs of a task", hint=hint)
    if isinstance(retry, str):
        check_name("retry", retry, 64)
    policy = retry if retry is None or isinstance(retry, str) else as_policy(retry)
    final = checked_no_retry(no_retry)
    options = Options(queue, priority, unique, max_attempts=max_attempts, limits=limits, fair_key=fair_key)
    alone = Exclusive.checked(exclusive, on_busy)
    contract = Contract(version, aliases, summary, _follower(app, on_dead))

    def declare(fn: Callable[..., Any]) -> Task[..., Any]:
        execution = Execution.checked(fn, timeout=timeout, process=process, memory=memory, env=env)
        if process and atomic:
            raise ConfigError("process", fn, "an atomic task runs in the worker, which has its transaction")
        declared: Task[..., Any] = Task(
            app, fn, name=name, options=options, retry=policy, no_retry=final, store_result=store_result, atomic=atomic,
            execution=execution, exclusive=alone, contract=replace(contract, upgrades={}),  # each function has its own
        )  # fmt: skip
        app._declare(declared)
        if timing is not None:
            from tallybook._app.schedules import declared_task

            app._declare_schedule(declared.name, declared_task(declared, timing))
        return declared

    return declare if fn is None else declare(fn)


def _follower(app: Any, on_dead: object) -> str | None:
    if not isinstance(on_dead, Task):
        if on_dead is None or isinstance(on_dead, str):
            return on_dead
        raise ConfigError("on_dead", on_dead, "not a task", hint="Name a task, without options: on_dead=tell_admin")
    if on_dead.app is not app:
        raise ConfigError("on_dead", on_dead, f"a task of another app than {app.name!r}")
    return on_dead.name


def _timing(schedule: str | timedelta | None, **given: Any) -> Timing | None:
    said = {name: value for name, value in given.items() if value is not None}
    if schedule is None:
        if said:
            option, value = next(iter(said.items()))
            raise ConfigError(option, value, "there is no schedule", hint="Give schedule='*/5 * * * *', too")
        return None
    from tallybook._model.schedule import Timing

    kind = {"every": schedule} if isinstance(schedule, timedelta) else {"cron": schedule}
    return Timing.checked(**kind, **said, option="schedule")
