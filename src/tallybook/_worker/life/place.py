"""A worker's place among those of one process: what it shares with them, and its part of what they divide."""

from collections.abc import Callable
from dataclasses import dataclass

from tallybook._worker.jobs import Book
from tallybook._worker.life.watchdog import Watchdog
from tallybook._worker.run.common import Common


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part of what the code declares for all nodes."""

    at: int = 0
    """Its position among the nodes, in the order of their numbers."""
    of: int = 1
    """How many nodes there are."""
    home: bool = True
    """Whether the code's schedules are stored there."""
    number: int | None = None
    """The number that the list has for the node; None: the list has no numbers."""


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class Place:
    """The objects that the worker of one node shares with those of the other nodes."""

    book: Book
    common: Common
    watchdog: Watchdog
    worn_out: Callable[[], object]
    """Called when too many abandoned handlers are left: they belong to the process, so all of its workers stop."""
