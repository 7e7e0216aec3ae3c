"""`exclusive=` of a task: a concurrency limit of one, declared with the task."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tallybook._model.options import check_name
from tallybook.errors import ConfigError

if TYPE_CHECKING:
    from tallybook._model.rate import ConcurrencyRule


@dataclass(frozen=True, slots=True)
class Exclusive:
    """One running job per task, or per `key`. Raises ConfigError for a wrong value."""

    key: str | None = None
    """`{name}` is replaced by that argument; None: one job for the whole task."""
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
        for name in re.findall(r"\{(\w+)\}", self.key or ""):
            if name not in arguments:
                known = ", ".join(sorted(arguments)) or "none"
                raise ConfigError(
                    "exclusive", self.key, f"task {task!r} has no argument {name!r}", hint=f"It has {known}"
                )

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
