"""A row of the audit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any


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
