"""A service, for programs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


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
