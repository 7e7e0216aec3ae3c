"""What a task promises to other releases: the names and version of its args, and the follow-up of a death.

A job may be older or newer than the code that runs it. So its row stores the version of its args (by default 1), and
the task has a function from each version to the next.
"""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tallybook._model.failure import safe_text
from tallybook._model.options import check_name, check_number
from tallybook._model.payload import encode
from tallybook.errors import ConfigError, PayloadError

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
"""Converts args of one version to the next: JSON values in, JSON values out."""

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
