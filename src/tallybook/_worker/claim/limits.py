"""A limit that a task names and nobody has declared is found when the worker starts, not when the first job fails."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from tallybook.errors import ConfigError

if TYPE_CHECKING:
    from tallybook._worker.run.served_task import ServedTask

__all__ = ["check_limits"]


def check_limits(tasks: Iterable[ServedTask], known: Sequence[list[str]] | None) -> None:
    """ConfigError for a limit that is declared neither in code nor in the database, and for a `{name}` that is no argument."""
    (names,) = known or ([],)
    for task in tasks:
        for key in (*task.options.limits, *filter(None, (task.options.fair_key,))):
            _check_arguments(task, key)
        for key in task.options.limits:
            if not any(_holds(name, key) for name in names):
                near = get_close_matches(key.split(":")[0], names, 2) or sorted(names)[:5]
                hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "There is none"
                hint += "; app.rate_limit(...) and app.concurrency_limit(...) declare one"
                raise ConfigError(f"limits of task {task.name!r}", key, "no limit of that name is declared", hint=hint)


def _holds(name: str, key: str) -> bool:
    """Whether a rule of this name may hold jobs of this key: its own, or one below it."""
    fixed = key.split("{", maxsplit=1)[0]
    return name == key or key.startswith(f"{name}:") or ("{" in key and name.startswith(fixed))


def _check_arguments(task: ServedTask, key: str) -> None:
    for wanted in re.findall(r"\{(\w+)\}", key):
        if wanted not in task.args.names and not task.args.is_open:
            known = sorted(task.args.names)
            near = get_close_matches(wanted, known, 1)
            hint = f"Did you mean {{{near[0]}}}?" if near else f"It has {', '.join(known) or 'none'}"
            raise ConfigError(f"limits of task {task.name!r}", key, f"it has no argument {wanted!r}", hint=hint)
