"""`exclusive=` of a task: a concurrency limit of one, declared with it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from tallybook._model.options import check_name
from tallybook._model.rate import ConcurrencyRule
from tallybook.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Exclusive:
    """One job of a task at a time, or one of each `key`. ConfigError for a wrong value."""

    key: str | None = None
    """`{name}` stands for that argument; None: one for the whole task."""
    skips: bool = False

    @classmethod
    def checked(cls, exclusive: object, on_busy: object) -> Exclusive | None:
        """What the two options of a task say; None: nothing."""
        if on_busy not in ("wait", "skip"):
            raise ConfigError("on_busy", on_busy, "is wait or skip")
        if exclusive is False:
            if on_busy == "skip":
                raise ConfigError("on_busy", on_busy, "the task is not exclusive", hint="Give exclusive=True, too")
            return None
        if exclusive is not True:
            check_name("exclusive", exclusive, 150)
        return cls(None if exclusive is True else str(exclusive), on_busy == "skip")

    def check(self, task: str, arguments: Collection[str]) -> None:
        """ConfigError for a `{name}` that is none of the task's arguments."""
        for name in re.findall(r"\{(\w+)\}", self.key or ""):
            if name not in arguments:
                known = ", ".join(sorted(arguments)) or "none"
                raise ConfigError(
                    "exclusive", self.key, f"task {task!r} has no argument {name!r}", hint=f"It has {known}"
                )

    def rule(self, task: str) -> ConcurrencyRule:
        """The limit that holds the jobs of a task of this name. ConfigError for a name that none can have."""
        if self.key is None:
            return ConcurrencyRule(f"task:{task}", 1, skips=self.skips)
        if ":" in task:
            raise ConfigError("exclusive", self.key, f"the task's name {task!r} has a colon", hint="Write True")
        return ConcurrencyRule(f"exclusive {task}", 1, skips=self.skips)

    def limits(self, task: str) -> tuple[str, ...]:
        """What its jobs name: a limit of all jobs of a task holds them without."""
        return () if self.key is None else (f"exclusive {task}:{self.key}",)
