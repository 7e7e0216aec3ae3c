"""Why a job does not run, and its history: the rows of the verbs why and trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason why a job does not run, or how it ended.

    The codes are listed in https://github.com/tallybook/tallybook/blob/main/docs/why.md.
    """

    state: str | None
    """As in JobInfo; None: there is no such job."""
    reason: str
    """A short code, like queue_paused; should_start: nothing blocks it."""
    explanation: str
    """One sentence for people."""
    details: dict[str, Any] = field(default_factory=dict)
    """Instants (ISO 8601), keys, ids, numbers; the code determines which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One event of one job, at an aware instant in UTC."""

    at: datetime
    job: int
    queue: str
    task: str
    attempt: int
    event: str
    """enqueued, scheduled, waiting, started, completed, failed, snoozed, moved, lost, cancelling, cancelled, dead or
    retried."""
    worker: str | None = None
    details: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
