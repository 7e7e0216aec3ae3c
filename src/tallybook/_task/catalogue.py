"""The catalogue: descriptions of an app's tasks, for people and for programs of other releases.

A starting worker writes it to tallybook.task; `tallybook task list` shows it. The checks here need several tasks, or
annotations, so they do not run at import, where a task is declared.
"""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from enum import Enum
from typing import Any

from tallybook._model.backoff import ByFunction, to_json
from tallybook._model.contract import DEATH, DEATH_SIGNATURE
from tallybook._model.durations import format_duration
from tallybook._task.task import Owner, Task
from tallybook.errors import ConfigError, SignatureError

_LONGEST_DEFAULT = 60


def check_tasks(app: Owner) -> None:
    """Raise ConfigError unless policies, summaries, upgrades, on_dead and schedules of all tasks are valid."""
    for task in app.tasks.values():
        _ = task.retry  # its policy is declared
        task.contract.check_upgrades(task.name)
        for name in task.contract.placeholders:
            if name not in task.args.names and not task.args.is_open:
                near = get_close_matches(name, task.args.names, 1)
                known = ", ".join(sorted(task.args.names)) or "none"
                hint = f"Did you mean {{{near[0]}}}?" if near else f"It has {known}"
                option = f"summary of task {task.name!r}"
                raise ConfigError(option, task.contract.summary, f"the task has no argument {name!r}", hint=hint)
        if task.contract.on_dead is not None:
            _check_on_dead(app, task, task.contract.on_dead)
    app._declared_schedules()


def _check_on_dead(app: Owner, task: Task[..., Any], named: str) -> None:
    option = f"on_dead of task {task.name!r}"
    follower = app._names.get(named)
    if follower is None:
        near = get_close_matches(named, app._names, 1)
        hint = f"Did you mean {near[0]!r}?" if near else "Import the module that defines it"
        raise ConfigError(option, named, f"app {app.name!r} has no task of that name", hint=hint)
    if follower is task:
        raise ConfigError(option, named, "that is the task itself", hint="Name another task")
    if follower.contract.on_dead is not None:
        reason = f"task {follower.name!r} has an on_dead of its own"
        hint = "A follow-up of a dead job has no follow-up of its own: remove its on_dead"
        raise ConfigError(option, named, reason, hint=hint)
    if follower.contract.version != 1:
        reason = f"task {follower.name!r} has a version"
        raise ConfigError(option, named, reason, hint="Tallybook passes its args, which have no version: remove it")
    if follower.args.names != frozenset(DEATH) or follower.args.is_open:
        hint = f"Write `def {follower.fn.__name__}{DEATH_SIGNATURE}`, after a Context if it takes one"
        raise ConfigError(option, named, f"task {follower.name!r} takes other arguments", hint=hint)


def catalogue(app: Owner) -> list[dict[str, Any]]:
    """Return one entry per task, as worker_start takes them and `tallybook task list` shows them."""
    found = []
    for task in sorted(app.tasks.values(), key=lambda task: task.name):
        follower = app._names.get(task.contract.on_dead or "")
        entry = {
            "name": task.name,
            "app": app.name,
            "summary": task.contract.summary,
            "on_dead_task": None if follower is None else follower.name,
            "on_dead_queue": None if follower is None else follower.queue,
            "version": task.contract.version,
            "aliases": list(task.contract.aliases),
            "definition": definition(task),
        }
        found.append({name: value for name, value in entry.items() if value is not None})
    return found


def definition(task: Task[..., Any]) -> dict[str, Any]:
    """Describe the declaration of one task as JSON, without options that have their default."""
    unique, execution = task.options.unique, task.execution
    given: dict[str, Any] = {
        "retry_name": task.retry_name,
        "max_attempts": task.max_attempts,
        "no_retry": [cls.__qualname__ for cls in task.no_retry],
        "unique": True if unique is True else list(unique or ()),
        "store_result": None if task.store_result else False,
        "timeout": None if execution.timeout is None else format_duration(execution.timeout),
        "process": execution.process or None,
        "memory": execution.memory,
        "env": list(execution.env),
        "atomic": task.atomic or None,
    }
    said = {"args": _args(task), "queue": task.queue, "priority": task.priority, "retry": _policy(task)}
    return said | {name: value for name, value in given.items() if value not in (None, [])}


def _policy(task: Task[..., Any]) -> Any:
    policy = task.retry
    try:
        return to_json(policy)
    except ConfigError:  # code: only its name can be shown
        code = policy.function if isinstance(policy, ByFunction) else type(policy)
        name = getattr(code, "__qualname__", type(code).__qualname__)
        return {"function": f"{getattr(code, '__module__', None) or '?'}.{name}"}


def _args(task: Task[..., Any]) -> list[dict[str, Any]] | None:
    """Return name, type and default of each argument in order; None if the signature is not supported."""
    try:
        described = task.args.described()
    except SignatureError:
        return None
    found = []
    for parameter, annotation in described:
        stars = "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""
        one: dict[str, Any] = {"name": stars + parameter.name}
        if annotation is not inspect.Parameter.empty:
            one["type"] = inspect.formatannotation(annotation)
        if parameter.default is not inspect.Parameter.empty:
            one["default"] = _default(parameter.default)
        found.append(one)
    return found


def _default(value: object) -> str:
    """Show a short default as written, and others as a placeholder: their repr is the user's code."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    shown = repr(value) if value is None or type(value) in (bool, int, float, str) or value in ((), [], {}) else "..."
    return shown if len(shown) <= _LONGEST_DEFAULT else "..."
