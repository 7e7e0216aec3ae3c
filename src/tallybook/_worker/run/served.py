"""What a worker needs of the App that it serves.

An App imports the worker's entry points, so no module of the worker imports App; this protocol names the parts that
they read. Only `context.py` here imports App, because `ctx.app` is public and has the type App.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from tallybook._model.rate import BreakerRule, ConcurrencyRule, RateRule
from tallybook._model.tracing import Tracing
from tallybook._worker.jobs import AnyTask
from tallybook._worker.run.context import Context
from tallybook._worker.run.verbs import Verbs
from tallybook.extra.providers import Providers


class ServedApp(Protocol):
    """An App, as a worker reads it."""

    name: str
    dsn: str | None
    providers: Providers
    _tracing: Tracing | None
    _sessions: tuple[Callable[[], Any], ...]
    _lifespans: list[Callable[[Any], AsyncIterator[Any]]]
    _arounds: list[Callable[[Any], AsyncIterator[Any]]]
    _thread_arounds: list[Callable[[Any], Iterator[Any]]]
    _also_serves: set[str]
    _rate_rules: dict[str, RateRule]
    _concurrency_rules: dict[str, ConcurrencyRule]
    _breaker_rules: dict[str, BreakerRule]

    @property
    def tasks(self) -> Mapping[str, AnyTask]: ...
    @property
    def _names(self) -> Mapping[str, AnyTask]: ...
    def conninfo(self, dsn: str | None = None) -> str: ...
    def _contexts(self, state: SimpleNamespace, verbs: Verbs) -> Callable[..., Context]: ...
    def _check_tasks(self) -> None: ...
    def _catalogue(self) -> Sequence[dict[str, Any]]: ...
    def _declared_schedules(self) -> list[dict[str, Any]]: ...
