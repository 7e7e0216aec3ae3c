"""The steps of the verbs for providers: generators that yield Calls, shared by sync and async callers.

This module decrypts and encrypts between two statements. A secret value is only ever in a Secret. The keys are those of
TALLYBOOK_KEYS, or of the file that TALLYBOOK_KEYS_FILE names.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from tallybook._db import providers as calls
from tallybook._db.providers import Stored
from tallybook._db.verb import Steps
from tallybook._model.options import check_name
from tallybook._model.provider import Keyring, Place, Provider, Secret, parse_keys
from tallybook.errors import ConfigError, SecretError, UnknownProvider

_TRIES = 20
_NOWHERE = "TALLYBOOK_KEYS, or the file that TALLYBOOK_KEYS_FILE names"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The result of a rotation. If nothing is `left` under other keys, those keys can be removed."""

    key_id: str
    """The current key."""
    rotated: int
    """Secrets that were encrypted again, previous values included."""
    left: dict[str, int]
    """The number of secrets that are encrypted with another key, by its id."""
    problems: tuple[SecretError, ...] = ()
    """The errors of the secrets that could not be decrypted and were left."""


@dataclass(frozen=True, slots=True)
class Tested:
    """Whether one stored secret can be decrypted here."""

    provider: str
    field: str
    slot: str
    key_id: str
    problem: SecretError | None = None


class KeySource:
    """The current keyring, parsed again when the variable or the file changes, also while workers run."""

    def __init__(self) -> None:
        self._seen: object = None
        self._keyring = Keyring({}, _NOWHERE)

    def keyring(self) -> Keyring:
        """Return the current keys, an empty keyring if neither variable is set. ConfigError if they cannot be read."""
        text = Secret(os.environ.get("TALLYBOOK_KEYS", ""))
        path = os.environ.get("TALLYBOOK_KEYS_FILE", "")
        if text.reveal().strip() and path:
            hint = "Unset one of them; a program that rotates its keys without a restart needs the file"
            raise ConfigError("TALLYBOOK_KEYS_FILE", path, "TALLYBOOK_KEYS is set as well", hint=hint)
        seen: object = text
        if path:
            try:
                about = Path(path).stat()
            except OSError as error:
                raise _unreadable(path, error) from None
            seen = (path, about.st_mtime_ns, about.st_size, about.st_ino)
        if seen != self._seen:
            if path:
                self._keyring = parse_keys(_read(path), "TALLYBOOK_KEYS_FILE")
            elif text.reveal().strip():
                self._keyring = parse_keys(text, "TALLYBOOK_KEYS")
            else:
                self._keyring = Keyring({}, _NOWHERE)
            self._seen = seen
        return self._keyring


def _read(path: str) -> Secret:
    try:
        return Secret(Path(path).read_text("utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError:
        problem = ConfigError("TALLYBOOK_KEYS_FILE", path, "not a text file")
    raise problem  # without the error above, which contains the bytes of the file


def _unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError("TALLYBOOK_KEYS_FILE", path, f"cannot be read: {error.strerror}")


def get(name: str, keys: KeySource) -> Steps[Provider]:
    stored = yield from _known(name)
    if not stored.active:
        raise UnknownProvider(name, inactive=True)
    return _decrypted(stored, keys)


def resolve(data_type: str, symbol: str | None, keys: KeySource) -> Steps[Provider | None]:
    stored = yield calls.resolve(data_type, symbol)
    return None if stored is None else _decrypted(stored, keys)


def load(keys: KeySource) -> Steps[dict[str, Provider]]:
    found: list[Stored] = yield calls.active
    return {stored.name: _decrypted(stored, keys) for stored in found}


def test(name: str, keys: KeySource) -> Steps[list[Tested]]:
    stored = yield from _known(name)
    found = []
    for place, sealed in stored.secrets.items():
        problem = None
        try:
            keys.keyring().open(place, sealed)
        except SecretError as error:
            problem = error
        found.append(Tested(place.provider, place.field, place.slot, sealed.key_id, problem))
    return found


def set_secret(name: str, field: str, secret: Secret, keys: KeySource, *, keep_previous: bool) -> Steps[str]:
    check_field(field)
    place, before = Place(name, field), Place(name, field, "previous")
    keyring = keys.keyring()
    for _ in range(_TRIES):
        stored = yield from _known(name)
        was = stored.secrets.get(place)
        former = None
        if was is not None and keep_previous:
            old = keyring.open(place, was)
            if old == secret:
                return "unchanged"
            former = keyring.seal(before, old)
        if (yield calls.secret_set(place, was, keyring.seal(place, secret), former)):
            return "created" if was is None else "changed"
    raise SecretError(name, field, "other programs keep changing it", hint="Try again")


def drop_secret(name: str, field: str, *, previous_only: bool) -> Steps[bool]:
    yield from _known(name)
    return bool((yield calls.secret_drop(name, field, "previous" if previous_only else None)))


def rotate(keys: KeySource) -> Steps[Rotation]:
    """Encrypt all secrets with the current key, each in its own transaction."""
    keyring = keys.keyring()
    if keyring.current is None:
        raise ConfigError("TALLYBOOK_KEYS", None, "there is no key", hint="`tallybook provider key` prints one")
    rotated, moved = 0, -1
    problems: dict[Place, SecretError] = {}
    while moved:  # until a pass changes nothing: a program with older keys may set secrets meanwhile
        moved, problems = 0, {}
        after: Place | None = None
        while batch := (yield calls.under_other_keys(keyring.current, after)):
            for after, sealed in batch:
                try:
                    secret = keyring.open(after, sealed)
                except SecretError as error:
                    problems[after] = error
                    continue
                if (yield calls.secret_reseal(after, sealed, keyring.seal(after, secret))):
                    moved += 1
        rotated += moved
    in_use: dict[str, int] = yield calls.keys_in_use
    left = {key_id: n for key_id, n in in_use.items() if key_id != keyring.current}
    return Rotation(keyring.current, rotated, left, tuple(problems.values()))


def check_field(field: str) -> None:
    """Raise ConfigError if `field` is not a valid name. The text is not shown: it may be the secret itself."""
    try:
        check_name("field", field, 64)
        fits = "=" not in field
    except ConfigError:
        fits = False
    if not fits:
        raise ConfigError("field", "(not shown)", "a field has 1 to 64 bytes and no =", hint="Like api_key or password")


def _known(name: str) -> Steps[Stored]:
    stored: Stored | None = yield calls.read(name)
    if stored is None:
        raise UnknownProvider(name, (yield calls.names))
    return stored


def _decrypted(stored: Stored, keys: KeySource) -> Provider:
    secrets: dict[str, Secret] = {}
    if stored.secrets:  # a provider without secrets needs neither keys nor the package cryptography
        keyring = keys.keyring()
        opened = {place: keyring.open(place, sealed) for place, sealed in stored.secrets.items()}
        for place, secret in opened.items():
            if place.slot == "current":
                secret.previous = opened.get(Place(place.provider, place.field, "previous"))
                secrets[place.field] = secret
    return Provider(stored.name, stored.kind, stored.settings, secrets)
