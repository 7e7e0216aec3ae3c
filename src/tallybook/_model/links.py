"""The links of a job: rows of the program that it belongs to, by which its history is found."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tallybook._model.options import text_problem
from tallybook.errors import ConfigError


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
