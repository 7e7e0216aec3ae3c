"""A finding of the doctor, for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEVELS = ("ok", "note", "warning", "problem")
"""From good to bad."""


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
