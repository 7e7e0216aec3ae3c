"""Prepare args, results and errors of a job for display: hide values whose key looks like a secret, cut long texts.

Any program may have written an error, so no type of its values is assumed.
"""

import json
import re
from typing import Any

from tallybook._model.subject import instant

DOTS = "••••••"
_SECRET = re.compile(
    r"pass$|passw|pass[_-]?(phrase|code)|pwd|secret|token|authori[sz]ation|^auth$|bearer|jwt|cookie|credential|dsn$"
    r"|(api|access|private|signing|encryption|master)[_\s-]?key|session[_\s-]?id|connection[_\s-]?string"
    r"|(database|webhook)[_\s-]?ur[il]",
    re.I,
)
_DEEPEST = 64


def redact(value: Any, depth: int = 0) -> Any:
    """Return the value with dots in place of everything under a key that looks like a secret, at any depth."""
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


def shown(value: Any, most: int = 20_000, *, indent: int | None = 2) -> str:
    """Return a value as readable JSON, redacted and cut off after `most` characters."""
    text = json.dumps(redact(value), indent=indent, ensure_ascii=False, default=str)
    return _cut(text, most, "\n")


def bounded(value: Any, most: int = 4000) -> Any:
    """Return the value with each text cut off after `most` characters."""
    if isinstance(value, dict):
        return {key: bounded(item, most) for key, item in value.items()}
    if isinstance(value, list):
        return [bounded(item, most) for item in value]
    return _cut(value, most, "") if isinstance(value, str) else value


def _cut(text: str, most: int, gap: str) -> str:
    return text if len(text) <= most else f"{text[:most]}{gap}… {len(text) - most:,} more characters"


_SAID = ("type", "message", "at", "started_at", "attempt", "worker", "traceback")
_LONGEST = 20_000


def error_view(error: object) -> dict[str, Any]:
    """Return one error for display; `more` has details, a ref_id, and other fields."""
    found = error if isinstance(error, dict) else {"message": error}
    more = {key: value for key, value in found.items() if key not in _SAID and value is not None}
    said = {name: found.get(name) for name in ("type", "message", "traceback")}
    texts = {name: "" if text is None else _cut(str(text), _LONGEST, " ") for name, text in said.items()}
    attempt = found.get("attempt") if type(found.get("attempt")) is int else None
    return {**texts, "at": instant(found.get("at")), "attempt": attempt, "more": more or None}


def error_views(errors: object) -> list[dict[str, Any]]:
    return [error_view(error) for error in reversed(errors)] if isinstance(errors, list) else []
