"""A row of the audit as programs see it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """What somebody has changed by a page or by the API."""

    id: int
    """Rises; pass the last one's as `before` to read on."""
    at: datetime
    actor: str
    """The user of a page, or the id of an API key."""
    via: str
    """web, api, or what a program of yours says."""
    action: str
    """The verb: retry, pause, ..."""
    target: dict[str, Any]
    """What was meant."""
    done: dict[str, Any]
    """What became of it."""
