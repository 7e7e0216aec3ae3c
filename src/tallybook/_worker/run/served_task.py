"""What a worker needs of a task.

An App imports the worker's entry points, so no module of the worker imports Task; this protocol names what they read.
"""

from collections.abc import Callable
from typing import Any, Protocol

from tallybook._model.backoff import Backoff
from tallybook._model.contract import Contract, Execution
from tallybook._model.options import Options
from tallybook._model.signature import ArgsModel


class Policies(Protocol):
    """An App, for a task that looks up a retry policy by name."""

    def _policy(self, name: str, *, task: str | None = None) -> Backoff: ...


class ServedTask(Protocol):
    """A Task, as a worker reads it."""

    name: str
    fn: Callable[..., Any]
    is_async: bool
    options: Options
    max_attempts: int | None
    no_retry: tuple[type[BaseException], ...]
    store_result: bool
    contract: Contract
    execution: Execution
    guarded: bool
    atomic: bool | str
    args: ArgsModel

    @property
    def app(self) -> Policies: ...
    @property
    def queue(self) -> str: ...
    @property
    def retry(self) -> Backoff: ...
    @property
    def wants_context(self) -> bool: ...
    @property
    def transaction(self) -> str: ...
    def result_text(self, value: object) -> str | None: ...
