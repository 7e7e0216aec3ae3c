"""What a job carries, for eyes: values whose key looks like a secret are not shown, and nothing is shown at any length."""

from __future__ import annotations

import json
import re
from typing import Any

DOTS = "••••••"
_SECRET = re.compile(
    r"pass$|passw|pass[_-]?(phrase|code)|pwd|secret|token|authori[sz]ation|^auth$|bearer|jwt|cookie|credential|dsn$"
    r"|(api|access|private|signing|encryption|master)[_\s-]?key",
    re.I,
)
_DEEPEST = 64


def redact(value: Any, depth: int = 0) -> Any:
    """The same value with dots in place of everything under a key that looks like a secret, at any depth.

    redact({"user": 1, "api_key": "x"})  # {"user": 1, "api_key": "••••••"}
    """
    if depth > _DEEPEST:
        return DOTS
    if isinstance(value, dict):
        return {
            key: DOTS if isinstance(key, str) and _SECRET.search(key) and item is not None else redact(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item, depth + 1) for item in value]
    return value


def shown(value: Any, most: int = 20_000) -> str:
    """A value as JSON for people, redacted, indented, cut off after `most` characters."""
    text = json.dumps(redact(value), indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= most else f"{text[:most]}\n… {len(text) - most:,} more characters"
