"""The app that holds the ready-made tasks until `app.include` adds them to yours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from tallybook._app import App, ContextTask
from tallybook._model.backoff import Backoff
from tallybook._worker.run.context import Context

P = ParamSpec("P")
R = TypeVar("R")

shelf = App("tallybook.tasks")


def ready_made(
    name: str, *, summary: str | None = None, retry: Backoff | None = None, max_attempts: int | None = None
) -> Callable[[Callable[Concatenate[Context, P], R]], ContextTask[P, R]]:
    """`shelf.task` for functions with a Context. An Any in an annotation makes mypy infer Any for an overload."""
    made: Any = shelf.task(name=name, summary=summary, retry=retry, max_attempts=max_attempts)
    return cast(Callable[[Callable[Concatenate[Context, P], R]], ContextTask[P, R]], made)
