"""How long history is kept, as programs see it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionInfo:
    """How long what is kept."""

    name: str
    """brief, default and long: the classes of queues; dead: dead letters; fires: ticks of schedules; audit: what people changed."""
    keep: timedelta
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRange:
    """A range of history whose time is over, and that is still there."""

    name: str
    """The class."""
    lower: int
    """The transaction ids of what it holds: from lower on."""
    upper: int | None
    """Up to, and without, this one; None: there is no end."""
    due_at: datetime | None
    """Since when it could have gone."""
    open_jobs: int | None
    """How many of its jobs are open; None: it is held by something else."""
    why: str
