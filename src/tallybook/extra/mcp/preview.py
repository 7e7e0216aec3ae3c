"""From the preview of a change to the change: tokens that are valid once, for a limited time, for the same call."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tallybook.extra.dashboard.database import Conn
from tallybook.extra.mcp.tools import OPERATION
from tallybook.extra.operator.operations import Ask, Changed, Operation
from tallybook.extra.operator.problems import Problem

_MOST = 100
"""Previews that are stored; the oldest is dropped first."""
_SEEN = ("queue", "task", "state", "priority", "attempt", "failures", "crashes", "run_at")
AGAIN = "Call it again without confirm for a new preview"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The object of a change as it is now, and what the change would do."""

    now: dict[str, Any]
    would: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Preview:
    verb: str
    arguments: Mapping[str, Any]
    outcome: Outcome
    until: float


class Previews:
    """The previews that can be confirmed."""

    def __init__(self, lifetime: timedelta) -> None:
        self._lifetime = lifetime.total_seconds()
        self._by_token: dict[str, _Preview] = {}

    def add(self, verb: str, arguments: Mapping[str, Any], outcome: Outcome) -> str:
        while len(self._by_token) >= _MOST:
            del self._by_token[next(iter(self._by_token))]
        token = secrets.token_urlsafe(18)
        self._by_token[token] = _Preview(verb, arguments, outcome, time.monotonic() + self._lifetime)
        return token

    def take(self, token: object, verb: str, arguments: Mapping[str, Any]) -> Outcome:
        """Use up a token and return its preview. A Problem unless the token is valid for this call."""
        found = self._by_token.pop(token, None) if isinstance(token, str) else None
        if found is None:
            raise Problem("conflict", "there is no such preview, or it was confirmed before", hint=AGAIN)
        if time.monotonic() >= found.until:
            raise Problem("conflict", "the preview has expired, and nothing was done", hint=AGAIN)
        if (found.verb, found.arguments) != (verb, arguments):
            raise Problem("conflict", "the preview was of another call, and nothing was done", hint=AGAIN)
        return found.outcome


async def carried_out(operation: Operation, ask: Ask, conn: Conn) -> tuple[Outcome, Changed]:
    """Make the change in the caller's transaction and return its outcome. A preview rolls it back."""
    now = await _now(operation, ask, conn)
    changed = await operation.change(ask, conn, "mcp")
    # A new job gets another id each time.
    would = {name: value for name, value in changed.answer.items() if name != "job" or "job" in ask.values}
    return Outcome(now, would), changed


async def _now(operation: Operation, ask: Ask, conn: Conn) -> dict[str, Any]:
    """Return the job, or the newest dead letters, that the change affects.

    A dead letter that is added becomes the newest; one that is removed lowers the count.
    """
    if operation.path.startswith("/jobs/"):
        found = await _read("get_job", ask, conn)
        return {name: found[name] for name in _SEEN}
    if operation.path.startswith("/dead-letters/"):
        newest = Ask(ask.app, ask.key, {**ask.values, "max_jobs": min(20, ask.get("max_jobs", 20))})
        found = await _read("list_dead_letters", newest, conn)
        shown = ("job", "died_at", "queue", "task", "reason", "attempt", "error_type")
        return {"newest": [{name: letter[name] for name in shown} for letter in found["dead_letters"]]}
    return {}


async def _read(name: str, ask: Ask, conn: Conn) -> dict[str, Any]:
    reads = OPERATION[name].reads
    assert reads is not None
    return await reads(ask, conn)
