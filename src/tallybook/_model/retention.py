"""Retention periods, for programs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionInfo:
    """A retention period."""

    name: str
    """brief, default, long: of queues; dead: of dead letters; fires: of ticks; audit: of changes by people."""
    keep: timedelta
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRange:
    """A range of history that is past its retention period but still stored."""

    name: str
    """The class."""
    lower: int
    """The range's transaction ids: from lower on."""
    upper: int | None
    """Exclusive upper bound; None: there is no end."""
    due_at: datetime | None
    """The time since when it could be pruned."""
    open_jobs: int | None
    """The number of its open jobs; None: something else holds it."""
    why: str
