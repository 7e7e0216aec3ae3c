"""Providers, the services that jobs call: settings, which everybody may read, and secrets, which nobody sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tallybook._model.secret import Secret


@dataclass(frozen=True)
class Provider:
    """One provider as stored in the database, with its secrets decrypted in memory.

    `settings` are plain JSON values (a base URL, a host, a port); `secrets` are by field (`"api_key"`, `"password"`).
    """

    name: str
    kind: str
    """Its purpose, in the user's own words: `market-data`, `webhook`, `smtp`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict, repr=False)
    active: bool = True
