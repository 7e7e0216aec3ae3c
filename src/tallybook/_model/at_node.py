"""The node of the running code. A handler's own calls of its App use the node of its job."""

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class At:
    """A node by name; both DSNs are empty in a child process that gets no credentials."""

    name: str
    dsn: str = field(repr=False)
    list_dsn: str = field(repr=False)  # the DSN of the database that has the list of nodes


at_node: ContextVar[At | None] = ContextVar("tallybook_node", default=None)
"""Set by a worker of several nodes around its work for one of them."""
