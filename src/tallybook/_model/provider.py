"""Providers, the services that jobs call: settings, which everybody may read, and secrets, which nobody sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

STARS = "********"


class Secret:
    """One secret text. Only `reveal()` returns it; str, repr and format show stars, and pickling raises.

    `previous` is the value before the last change, if it is still valid (a signature's key during a rotation).
    """

    __slots__ = ("_text", "previous")

    def __init__(self, text: str, previous: Secret | None = None) -> None:
        self._text = text
        self.previous = previous

    def reveal(self) -> str:
        """Return the text. Keep it in a local variable, only for the call that needs it."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret({STARS!r})"

    def __str__(self) -> str:
        return STARS

    def __format__(self, spec: str) -> str:
        return format(STARS, spec)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret cannot be pickled: it must not leave its process")

    __getstate__ = __reduce__

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))


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
