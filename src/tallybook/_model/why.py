"""Why a job does not run, and its history: the rows of the verbs why and trace; and links, which find events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tallybook._model.options import text_problem
from tallybook.errors import ConfigError


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


def checked_links(links: Mapping[str, object]) -> dict[str, str]:
    """Return links in the form for headers, with keys as text. Raises ConfigError for invalid links."""
    if not isinstance(links, Mapping) or not links:
        raise ConfigError("links", links, "not a mapping of kinds and keys", hint="Write links={'submission': 42}")
    if len(links) > 10:
        raise ConfigError("links", sorted(map(str, links)), f"a job has at most 10 links, not {len(links)}")
    found = {}
    for kind, key in links.items():
        if not isinstance(kind, str) or not re.fullmatch("[a-z0-9_]{1,50}", kind):
            raise ConfigError("links", kind, "a kind must be 1 to 50 of a to z, 0 to 9 and _")
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise ConfigError("links", key, f"the key of {kind!r} is neither text nor a whole number")
        text = str(key)
        if problem := text_problem(text):
            raise ConfigError("links", key, f"the key of {kind!r} {problem}")
        if not 1 <= len(text.encode()) <= 200:
            raise ConfigError("links", text[:100], f"the key of {kind!r} must have 1 to 200 bytes")
        found[kind] = text
    return found
