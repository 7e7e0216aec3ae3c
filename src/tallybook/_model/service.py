"""A service as programs see it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """Maintenance that any worker runs, and what its last run on record did."""

    name: str
    every: timedelta
    """How often each worker looks after it at least; what is known to be due is not waited for."""
    last_run_at: datetime | None = None
    """None: it never ran. Without anything to do it runs once a minute."""
    last_took: timedelta | None = None
    last_effect: int | None = None
    """How many jobs, or rows, the last run changed."""
