"""On which node the code that runs now is at work: a handler's own calls of its App go where its job came from."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class At:
    """A node by name; `dsn` is empty in a child process that gets no credentials."""

    name: str
    dsn: str = field(repr=False)


at_node: ContextVar[At | None] = ContextVar("tallybook_node", default=None)
"""Set by a worker of several nodes, for all that it does for one of them."""
