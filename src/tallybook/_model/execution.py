"""How an attempt runs: with a deadline, in its own process, with a memory limit, or alone (`exclusive=`)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tallybook._model.durations import parse_duration
from tallybook._model.options import check_arguments, check_name
from tallybook.errors import ConfigError

if TYPE_CHECKING:
    from tallybook._model.rate import ConcurrencyRule

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
