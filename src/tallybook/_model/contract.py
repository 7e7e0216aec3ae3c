"""What `@app.task` sets for each attempt: what the task promises to other releases, and how an attempt runs.

A job may be older or newer than the code that runs it. So its row stores the version of its args (by default 1), and
the task has a function from each version to the next, and a follow-up of a death. An attempt runs with a deadline, in
its own process, with a memory limit, or alone (`exclusive=`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tallybook._model.durations import parse_duration
from tallybook._model.failure import safe_text
from tallybook._model.options import check_arguments, check_name, check_number
from tallybook._model.payload import encode
from tallybook.errors import ConfigError, PayloadError

if TYPE_CHECKING:
    from tallybook._model.rate import ConcurrencyRule

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]  # converts args, as JSON values, of one version to the next

DEATH = ("job", "task", "args", "failures", "error")  # the args of a task that `on_dead` names
DEATH_SIGNATURE = "(job: int, task: str, args: dict, failures: int, error: dict)"
LAST_VERSION = 999

_SUMMARY_LENGTH = 200
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}?")


@dataclass(frozen=True)
class Contract:
    """The version of a task's args, its other names, its summary, and the task to enqueue when a job of it dies.

    Raises ConfigError, which names the option, for a wrong value.
    """

    version: int = 1
    aliases: tuple[str, ...] = ()
    summary: str | None = None
    on_dead: str | None = None  # the name of a task of the same app
    upgrades: dict[int, Upgrade] = field(default_factory=dict)  # by the version that they read

    def __post_init__(self) -> None:
        check_number("version", self.version, 1, LAST_VERSION)
        if isinstance(self.aliases, str) or not isinstance(self.aliases, tuple | list):
            raise ConfigError("aliases", self.aliases, "not a tuple of names", hint="Write aliases=('old_name',)")
        object.__setattr__(self, "aliases", tuple(self.aliases))
        for name in self.aliases:
            check_name("aliases", name, 200)
        if len(set(self.aliases)) < len(self.aliases):
            raise ConfigError("aliases", self.aliases, "contains a name twice")
        if self.summary is not None:
            if not isinstance(self.summary, str):
                raise ConfigError("summary", self.summary, "not a text")
            check_name("summary", self.summary, _SUMMARY_LENGTH)
            for found in _PLACEHOLDER.finditer(self.summary):
                if not re.fullmatch(r"\{\w+\}", found[0]) or not found[1].isidentifier():
                    reason = f"{found[0]!r} is not {{name}} of an argument"
                    raise ConfigError("summary", self.summary, reason, hint="Write 'Welcome mail to {user_id}'")
        if self.on_dead is not None:
            check_name("on_dead", self.on_dead, 200)

    @property
    def placeholders(self) -> list[str]:
        """The names of the args in the summary."""
        return [] if self.summary is None else _PLACEHOLDER.findall(self.summary)

    def add_upgrade(self, task: str, version: int, fn: object) -> None:
        """Register `fn` as the upgrade of args of this version. Raises ConfigError if it does not fit."""
        option = f"{task}.upgrade"
        if isinstance(version, bool) or not isinstance(version, int):
            raise ConfigError(option, version, "not the version that is upgraded", hint=f"Write @{task}.upgrade(1)")
        if not 1 <= version < self.version:
            say = f"the task's args are of version {self.version}"
            hint = f"An upgrade from {version} needs @app.task(version={max(version, 1) + 1}), or a later one"
            raise ConfigError(option, version, say, hint=hint)
        if version in self.upgrades:
            raise ConfigError(option, version, "there is an upgrade from this version already")
        if not callable(fn) or inspect.iscoroutinefunction(fn):
            hint = "Write `def upgrade(args: dict) -> dict`; it is called in memory, before the job's args are read"
            raise ConfigError(option, fn, "not a plain function", hint=hint)
        try:
            inspect.signature(fn).bind({})
        except TypeError:
            raise ConfigError(option, fn, "must accept one argument, the args as a dict") from None
        except ValueError:  # a builtin without a signature
            pass
        self.upgrades[version] = fn

    def check_upgrades(self, task: str) -> None:
        """Raise ConfigError unless each step from version 1 on has a function."""
        for version in range(1, self.version):
            if version not in self.upgrades:
                reason = f"there is no upgrade of args from version {version} to {version + 1}"
                hint = f"Write @{task}.upgrade({version}) above a function of (args: dict) -> dict"
                raise ConfigError(f"version of task {task!r}", self.version, reason, hint=hint)

    def upgraded(self, task: str, args: Any, version: object) -> Any:
        """Return `args` of this version as args of the task's own version. Raises PayloadError if that fails.

        A step that raises would raise again with the same args, so the job is dead at once. After a fix of the
        function, a person retries the job.
        """
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise PayloadError("$", f"{safe_text(version, 40)!r} is not a version of args", task=task, verb="read")
        for step in range(version, self.version):
            try:
                if step not in self.upgrades:
                    raise KeyError(f"no upgrade from version {step}")  # checked when the worker started
                args = self.upgrades[step](args)
                if type(args) is not dict:
                    raise TypeError(f"it returned {type(args).__name__}, not a dict")
                # The next step and the handler get only values that a row can store.
                args = json.loads(encode(args, task=task))
            except Exception as error:
                said = f"{type(error).__name__}: {safe_text(error, 1000)}"
                reason = f"the upgrade from version {step} to {step + 1} failed: {said}"
                raise PayloadError("$", reason, task=task, verb="upgraded") from error
        return args


_UNITS = {"": 0, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
_LONGEST = timedelta(days=3650)  # more is a mistake, and timers of an event loop have a maximum
_LEAST = 32 << 20  # Python does not start with less


@dataclass(frozen=True, slots=True)
class Execution:
    """The execution options of a task. Raises ConfigError, which names the option, for a wrong value."""

    timeout: timedelta | None = None  # the deadline of one attempt, from its start
    process: bool = False  # run in a child process of the worker, so that damage to its process affects no other job
    memory: int | None = None  # the address space of that process, in bytes
    env: tuple[str, ...] = ()  # environment variables with database credentials that the child receives nevertheless

    @classmethod
    def checked(
        cls,
        fn: Callable[..., Any],
        *,
        timeout: timedelta | str | None,
        process: bool,
        memory: int | str | None,
        env: Sequence[str],
    ) -> Execution:
        """Return the options of `@app.task` for this function."""
        if timeout is not None:
            timeout = parse_duration(timeout, option="timeout")
            if timeout <= timedelta(0):
                raise ConfigError("timeout", timeout, "must be greater than zero")
            if timeout > _LONGEST:
                raise ConfigError("timeout", timeout, "longer than ten years")
        if not isinstance(process, bool):
            raise ConfigError("process", process, "not True or False")
        if not process:
            for option, value in (("memory", memory), ("env", env)):
                if value:
                    hint = f"Write @app.task(process=True, {option}=...)"
                    raise ConfigError(option, value, "is for tasks that run in a process of their own", hint=hint)
            return cls(timeout) if timeout is not None else PLAIN
        if inspect.iscoroutinefunction(fn):
            hint = "Write `def`; the process runs one job at a time, so async has no benefit there"
            raise ConfigError("process", fn, "an async function runs on the worker's loop", hint=hint)
        name = getattr(fn, "__qualname__", "<lambda>")
        if "<lambda>" in name or "<locals>" in name:
            hint = "Define it at the top of a module: the child process imports it by its name"
            raise ConfigError("process", name, "a function inside another, or a lambda, cannot be imported", hint=hint)
        if isinstance(env, str) or not all(isinstance(one, str) and one for one in env):
            raise ConfigError("env", env, "not a sequence of names", hint="Write env=('TALLYBOOK_DSN',)")
        return cls(timeout, True, None if memory is None else parse_size(memory, option="memory"), tuple(sorted(env)))


PLAIN = Execution()


def parse_size(value: int | str, *, option: str) -> int:
    """Return the bytes of `512 MB` (a MB is 1024 kB, as in PostgreSQL). Raises ConfigError, also for a bare number."""
    hint = "Write '512 MB' or '2 GB'"
    found = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(option, value, "not a size", hint=hint)
    number, unit = found.groups()
    if not _UNITS.get(unit):
        raise ConfigError(option, value, f"unknown unit {unit!r}" if unit else "a size needs a unit", hint=hint)
    size = int(float(number) * _UNITS[unit])
    if not _LEAST <= size < 1 << 62:
        raise ConfigError(option, value, "must be at least 32 MB", hint=hint)
    return size


@dataclass(frozen=True, slots=True)
class Exclusive:
    """`exclusive=` of a task: one running job per task, or per `key`. Raises ConfigError for a wrong value."""

    key: str | None = None  # `{name}` is replaced by that argument; None: one job for the whole task
    skips: bool = False

    @classmethod
    def checked(cls, exclusive: object, on_busy: object) -> Exclusive | None:
        """Return the value of a task's two options, or None if it is not exclusive."""
        if on_busy not in ("wait", "skip"):
            raise ConfigError("on_busy", on_busy, "must be wait or skip")
        if exclusive is False:
            if on_busy == "skip":
                raise ConfigError("on_busy", on_busy, "the task is not exclusive", hint="Pass exclusive=True as well")
            return None
        if exclusive is not True:
            check_name("exclusive", exclusive, 150)
        return cls(None if exclusive is True else str(exclusive), on_busy == "skip")

    def check(self, task: str, arguments: Collection[str]) -> None:
        """Raise ConfigError for a `{name}` that is not an argument of the task."""
        check_arguments("exclusive", self.key, task, re.findall(r"\{(\w+)\}", self.key or ""), arguments)

    def rule(self, task: str) -> ConcurrencyRule:
        """Return the limit of the jobs of this task. Raises ConfigError if the task's name cannot have one."""
        from tallybook._model.rate import ConcurrencyRule

        if self.key is None:
            return ConcurrencyRule(f"task:{task}", 1, skips=self.skips)
        if ":" in task:
            raise ConfigError("exclusive", self.key, f"the task's name {task!r} has a colon", hint="Write True")
        return ConcurrencyRule(f"exclusive {task}", 1, skips=self.skips)

    def limits(self, task: str) -> tuple[str, ...]:
        """Return the limits that its jobs name; the limit of a whole task applies without a name."""
        return () if self.key is None else (f"exclusive {task}:{self.key}",)
