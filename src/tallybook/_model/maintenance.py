"""The rows of app.history, app.services, app.audit and app.doctor, for programs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """Maintenance that any worker runs, and the result of its last recorded run."""

    name: str
    every: timedelta
    """The maximum interval between a worker's runs of it; known due work runs without waiting."""
    last_run_at: datetime | None = None
    """None: it never ran. A service without work is recorded once a minute."""
    last_took: timedelta | None = None
    last_effect: int | None = None
    """The number of jobs, or rows, that the last run changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """A change made in a page, through the operator API, in Django's admin or by an agent over MCP."""

    id: int
    """Ascending; pass the last row's as `before` to get the next page."""
    at: datetime
    actor: str
    """The user of a page or of the admin, the id of an API key, or the name of an agent."""
    via: str
    """web, api, admin, mcp, or a value that your program sets."""
    action: str
    """The verb: retry, pause, ..."""
    target: dict[str, Any]
    """The target of the action."""
    done: dict[str, Any]
    """The effect."""


LEVELS = ("ok", "note", "warning", "problem")  # from good to bad


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of the doctor: its result, and the advice."""

    name: str
    """The name of the check, like "horizon"."""
    level: str
    """"ok", "note" (good to know), "warning" (will hurt) or "problem" (hurts now)."""
    finding: str
    advice: str | None = None
    """What to do; None: nothing."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The finding for programs: `count`, and the first 20 `items`."""

    @property
    def good(self) -> bool:
        """Whether no action is needed: ok, or a note."""
        return self.level in LEVELS[:2]
