"""Providers, the services that jobs call: settings, which everybody may read, and secrets, which nobody sees.

Secrets are encrypted with keys, by AES-256-GCM, bound to the place where they are stored. The additional data has
provider, field, slot and key id, but nothing about the installation. So a dump can be restored anywhere, and a
ciphertext that was moved to another row or field cannot be decrypted. Each encryption has a fresh random nonce of 96
bits; one key suffices for 2^32 of them. Only the library's own objects hold raw keys, and their repr shows nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from tallybook.errors import ConfigError, NotSupported, SecretError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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


LONGEST = 65_536  # bytes of one secret
_ID = re.compile(r"[A-Za-z0-9._-]{1,32}")  # too short for a key, so that a misplaced key is not shown as an id
_HINT = "Write ID:KEY,ID:KEY, the current one first; `tallybook provider key` prints a new one"


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a secret is stored."""

    provider: str
    field: str
    slot: str = "current"


@dataclass(frozen=True, slots=True)
class Sealed:
    """A secret as the database stores it."""

    key_id: str
    nonce: bytes
    ciphertext: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    kind: str
    settings: dict[str, Any]
    active: bool
    secrets: dict[Place, Sealed]


@dataclass(frozen=True, slots=True)
class Field:
    """One secret, described only by its key and its times."""

    field: str
    slot: str
    key_id: str
    set_at: datetime
    sealed_at: datetime


@dataclass(frozen=True, slots=True)
class Route:
    """A rule: this provider serves this kind of data, for all symbols or for one."""

    data_type: str
    symbol: str | None
    provider: str
    active: bool
    in_force: bool  # whether it applies: it and its provider are active


@dataclass(frozen=True, slots=True)
class Listed:
    """A provider for people."""

    name: str
    kind: str
    settings: dict[str, Any]
    active: bool
    created_at: datetime
    changed_at: datetime
    fields: list[Field] = field(default_factory=list)
    routes: int = 0


class Keyring:
    """The keys of this program by id. `current` encrypts new secrets; None: there are no keys."""

    __slots__ = ("_keys", "current", "source")

    def __init__(self, keys: Mapping[str, AESGCM], source: str) -> None:
        self._keys = dict(keys)
        self.current = next(iter(self._keys), None)
        self.source = source  # the origin of the keys, for people

    @property
    def ids(self) -> list[str]:
        """The ids, the current one first."""
        return list(self._keys)

    def seal(self, place: Place, secret: Secret) -> Sealed:
        """Encrypt with the current key. Raises SecretError if there is none or the secret is too long."""
        if self.current is None:
            raise SecretError(place.provider, place.field, "there is no key to encrypt it with", hint=self._where())
        nonce = os.urandom(12)
        sealed = _sealed(self._keys[self.current], nonce, secret, _bound_to(place, self.current))
        if sealed is None:
            raise SecretError(place.provider, place.field, f"a secret has 1 to {LONGEST} bytes of text")
        return Sealed(self.current, nonce, sealed)

    def open(self, place: Place, sealed: Sealed) -> Secret:
        """Decrypt. Raises SecretError for an unknown key id, a wrong key, or an altered or moved ciphertext."""
        key = self._keys.get(sealed.key_id)
        if key is None:
            known = f"this program has {', '.join(self._keys)}" if self._keys else "this program has no keys"
            reason = f"it is encrypted with key {sealed.key_id!r}, but {known}"
            raise SecretError(place.provider, place.field, reason, slot=place.slot, hint=self._where())
        found = _opened(key, sealed, _bound_to(place, sealed.key_id))
        if found is None:
            # One text for all causes, so that altering ciphertexts reveals nothing.
            reason = f"it cannot be decrypted with key {sealed.key_id!r}"
            hint = "Another key has this id, or the stored secret was altered or moved here. Set the secret again"
            raise SecretError(place.provider, place.field, reason, slot=place.slot, hint=hint)
        return found

    def _where(self) -> str:
        return f"Keys are read from {self.source}; `tallybook provider key` prints a new one"

    def __repr__(self) -> str:
        return f"<Keyring {', '.join(self._keys) or 'without keys'}>"


def _sealed(key: AESGCM, nonce: bytes, secret: Secret, bound_to: bytes) -> bytes | None:
    try:
        text = secret.reveal().encode()
    except UnicodeEncodeError:  # the exception holds the text
        return None
    return key.encrypt(nonce, text, bound_to) if 1 <= len(text) <= LONGEST else None


def _opened(key: AESGCM, sealed: Sealed, bound_to: bytes) -> Secret | None:
    # Return None instead of raising, so that no frame with key or text is attached to the caller's error.
    from cryptography.exceptions import InvalidTag

    try:
        return Secret(key.decrypt(sealed.nonce, sealed.ciphertext, bound_to).decode())
    except (InvalidTag, ValueError):
        return None


def _bound_to(place: Place, key_id: str) -> bytes:
    bound = ["tallybook.provider_secret", 1, place.provider, place.field, place.slot, key_id]
    return json.dumps(bound, ensure_ascii=True, separators=(",", ":")).encode()


def parse_keys(text: Secret, source: str) -> Keyring:
    """Return the keys of `k2:BASE64,k1:BASE64`, or of lines with # comments. Errors never show a key."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        hint = "Install it: pip install 'tallybook[crypto]'"
        raise NotSupported("encryption of secrets without the package cryptography", hint=hint) from None
    found = _parsed(text.reveal(), AESGCM)
    if isinstance(found, str):  # raised here, where no frame has a key in a variable
        raise ConfigError(source, "(not shown)", found, hint=_HINT)
    return Keyring(found, source)


def _parsed(text: str, cipher: type[AESGCM]) -> dict[str, AESGCM] | str:
    entries = [entry for line in text.splitlines() for entry in re.split(r"[,\s]+", line.partition("#")[0]) if entry]
    keys: dict[str, AESGCM] = {}
    for at, entry in enumerate(entries, 1):
        key_id, _, encoded = entry.partition(":")
        if not encoded or not _ID.fullmatch(key_id):
            return f"entry {at} is not ID:KEY; an id has 1 to 32 of A-Z a-z 0-9 . _ -"
        if key_id in keys:
            return f"there are two keys {key_id!r}"
        try:
            raw = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != 32:
            return f"key {key_id!r} is not base64 of 32 bytes"
        keys[key_id] = cipher(raw)
    return keys or "there is no key in it"


def new_key(key_id: str | None = None) -> str:
    """Return a new random key as `ID:BASE64`; without `key_id` the id is random, too."""
    if key_id is not None and not _ID.fullmatch(key_id):
        raise ConfigError("id", key_id, "must be 1 to 32 of A-Z a-z 0-9 . _ -")
    return f"{key_id or 'k' + os.urandom(3).hex()}:{base64.b64encode(os.urandom(32)).decode()}"


def open_to_others(about: os.stat_result, us: int | None = None) -> bool:
    """Whether others than its owner may read or write a file with secrets. `us` is the user, by default the process's.

    A file of root's may be readable by our own group unless we are root. Kubernetes stores secrets this way, and so do
    administrators for a service that must not change them.
    """
    if os.name != "posix":
        return False
    us = os.geteuid() if us is None else us
    allowed = 0o040 if about.st_uid == 0 and us != 0 else 0
    return bool(about.st_mode & 0o077 & ~allowed)
