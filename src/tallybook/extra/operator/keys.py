"""The keys of the operator API: their scopes, their queues and the file of keys. A secret is never shown."""

import json
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tallybook._model.options import check_name
from tallybook._model.private_file import open_to_others
from tallybook.errors import ConfigError

SCOPES = ("read", "enqueue", "operate", "admin")
"""admin includes the others, and also sees args, results and errors."""
ID = re.compile("[A-Za-z0-9._@-]{1,64}")
_HEX = re.compile("(?:[0-9a-f]{2}){32,128}")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the operator API. ConfigError for invalid values.

    `secret` has 64 to 256 lower-case hexadecimal digits: 32 random bytes or more. `scopes` are some of read, enqueue,
    operate and admin. With `queues` the key reaches these queues only.

        Key("deploy", os.environ["DEPLOY_SECRET"], ("read", "operate"), ("mail",))
    """

    id: str
    secret: str = field(repr=False)
    scopes: tuple[str, ...]
    queues: tuple[str, ...] | None = None
    """None: all."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not ID.fullmatch(self.id):
            raise ConfigError("key", self.id, "an id has 1 to 64 characters: A-Z, a-z, 0-9, '.', '_', '@' and '-'")
        if not isinstance(self.secret, str) or not _HEX.fullmatch(self.secret) or len(set(self.secret)) < 6:
            # Not shown: it may be a real secret with a typing error.
            what, hint = f"secret of key {self.id}", "Make one with `tallybook web key`"
            raise ConfigError(what, Hidden(), "is not 64 to 256 random hexadecimal digits", hint=hint)
        object.__setattr__(self, "scopes", _names(f"scopes of key {self.id}", self.scopes))
        if not self.scopes or not set(self.scopes) <= set(SCOPES):
            raise ConfigError(f"scopes of key {self.id}", self.scopes, f"choose from {', '.join(SCOPES)}")
        if self.queues is not None:
            object.__setattr__(self, "queues", _names(f"queues of key {self.id}", self.queues))
            if not self.queues:
                raise ConfigError(f"queues of key {self.id}", self.queues, "is empty", hint="Omit it for all queues")
            for queue in self.queues:
                check_name(f"queues of key {self.id}", queue, 64)

    def may(self, scope: str) -> bool:
        """Return whether the key has this scope; admin has all."""
        return scope in self.scopes or "admin" in self.scopes

    def reaches(self, queue: str) -> bool:
        """Return whether the key may use this queue."""
        return self.queues is None or queue in self.queues


class Hidden:
    """The placeholder for a secret in a message."""

    def __repr__(self) -> str:
        return "(not shown)"


def _names(option: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ConfigError(option, value, "not a list of names")
    return tuple(dict.fromkeys(value))


class KeyRing:
    """The active keys by id. Several can be active, so that a key can be replaced while both are valid."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys: dict[str, tuple[Key, bytes]] = {}
        # A request with an unknown key takes as long to refuse as one with a wrong signature.
        self._nobody = secrets.token_bytes(32)
        for key in keys:
            if not isinstance(key, Key):
                raise ConfigError("keys", Hidden(), f"a {type(key).__name__} is not a Key")
            secret = bytes.fromhex(key.secret)
            if key.id in self._keys:
                raise ConfigError("keys", key.id, "appears twice")
            if any(secret == other for _, other in self._keys.values()):
                raise ConfigError("keys", key.id, "has the secret of another key")
            self._keys[key.id] = key, secret
        if not self._keys:
            raise ConfigError("keys", (), "there are no keys", hint="Make one with `tallybook web key`")

    def get(self, key_id: str) -> tuple[Key | None, bytes]:
        """Return the key and its secret; None and a random secret for an unknown id."""
        return self._keys.get(key_id, (None, self._nobody))


def read_keys(path: str | os.PathLike[str]) -> list[Key]:
    """Return the keys of a TOML file. ConfigError if it is not valid, or if group or others may read or write it.

    [keys.deploy]
    secret = "..."
    scopes = ["read", "operate"]
    queues = ["mail"]
    """
    shown = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            about = os.fstat(file.fileno())
            if os.name == "posix" and not stat.S_ISREG(about.st_mode):
                raise ConfigError("keys", shown, "is not a regular file")
            if open_to_others(about):
                reason = "users other than its owner may read or write it"
                raise ConfigError("keys", shown, reason, hint=f"Run chmod 600 {shown}")
            text = file.read(1_000_001)
    except OSError as error:
        raise ConfigError("keys", shown, error.strerror or "cannot be read") from None
    try:
        if len(text) > 1_000_000:
            raise ValueError
        found = tomllib.loads(text.decode())
    except ValueError:  # its text may show a secret
        hint = "Compare it with https://github.com/tallybook/tallybook/blob/main/docs/operator-api.md"
        raise ConfigError("keys", shown, "is not a TOML file", hint=hint) from None
    tables = found.get("keys")
    if set(found) != {"keys"} or not isinstance(tables, dict):
        raise ConfigError("keys", shown, "must have one table [keys.NAME] for each key and nothing else")
    keys = []
    for name, columns in tables.items():
        if not isinstance(columns, dict) or not {"secret", "scopes"} <= set(columns) <= {"secret", "scopes", "queues"}:
            raise ConfigError("keys", name, "a key has secret and scopes, and queues if it is limited to some queues")
        keys.append(Key(name, columns["secret"], columns["scopes"], columns.get("queues")))
    return keys


def key_block(name: str, scopes: Iterable[str], queues: Iterable[str] = ()) -> str:
    """Return the lines of a new key for the file of keys, with 32 fresh random bytes. Raises ConfigError."""
    key = Key(name, secrets.token_hex(32), tuple(scopes), tuple(queues) or None)
    # Ids and names have no control characters, so their strings in JSON are basic strings of TOML.
    said = {name: json.dumps(getattr(key, name), ensure_ascii=False) for name in ("id", "secret", "scopes", "queues")}
    lines = [f"[keys.{said['id']}]", f"secret = {said['secret']}", f"scopes = {said['scopes']}"]
    if key.queues:
        lines.append(f"queues = {said['queues']}")
    return "\n".join(lines) + "\n"
