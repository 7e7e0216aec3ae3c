"""The people of the dashboard: names with salted, slow hashes of their passwords, in a file; `tallybook web user` makes lines."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tallybook._model.private_file import open_to_others
from tallybook.errors import ConfigError

_N, _R, _P = 2**15, 8, 1
_NAME = re.compile(r"[\w.@+-]{1,64}")
_TRIES, _WITHIN = 10, 60.0
_MOST_NAMES = 10_000  # that tries are remembered of


@dataclass(frozen=True)
class User:
    """Who looks at the dashboard. `operate`: may also change things."""

    name: str
    operate: bool = False


@dataclass(frozen=True)
class Password:
    """A user and the hash of the password."""

    user: User
    hash: str = field(repr=False)

    @property
    def mark(self) -> str:
        """What a session keeps of the hash: it ends when the password is changed."""
        return hashlib.sha256(self.hash.encode()).hexdigest()[:16]


def hashed(password: str, salt: bytes | None = None) -> str:
    """The text that stands for a password in the file. Takes about 0.1 s, by intention."""
    salt = salt or secrets.token_bytes(16)
    key = hashlib.scrypt(password.encode(), salt=salt, n=_N, r=_R, p=_P, maxmem=128 * _N * _R * 2, dklen=32)
    return f"scrypt${_N}${base64.b64encode(salt).decode()}${base64.b64encode(key).decode()}"


def _fits(password: str, kept: str) -> bool:
    salt = base64.b64decode(kept.split("$")[2])
    return hmac.compare_digest(hashed(password, salt).encode(), kept.encode())


class Users:
    """The users of a dashboard. Tries are counted by name: after ten within a minute a name has to wait."""

    def __init__(self, passwords: dict[str, Password]) -> None:
        self._passwords = passwords
        self._tries: dict[str, list[float]] = {}
        self._nobody = f"scrypt${_N}${base64.b64encode(b'0' * 16).decode()}${base64.b64encode(b'0' * 32).decode()}"

    def __len__(self) -> int:
        return len(self._passwords)

    def known(self, name: str, mark: str) -> User | None:
        """The user of a session, if the password is still the same."""
        found = self._passwords.get(name)
        return found.user if found and hmac.compare_digest(found.mark.encode(), mark.encode()) else None

    def may_try(self, name: str) -> bool:
        """Count a try before it is made, so that many at once are counted, too. False: too many of late.

        A name that there is not is counted like any other: how it is answered tells nobody which names there are.
        """
        since = time.monotonic() - _WITHIN
        recent = [at for at in self._tries.pop(name, ()) if at > since]
        if may := len(recent) < _TRIES:
            recent.append(time.monotonic())
        if len(self._tries) >= _MOST_NAMES:  # the one that was asked for longest ago
            del self._tries[next(iter(self._tries))]
        self._tries[name] = recent
        return may

    def login(self, name: str, password: str) -> Password | None:
        """The user, if name and password fit; takes as long for a name that there is not. Blocks for about 0.1 s."""
        found = self._passwords.get(name)
        fits = _fits(password, found.hash if found else self._nobody)
        if found is None or not fits:
            return None
        self._tries.pop(name, None)
        return found


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def read_users(path: Path) -> Users:
    """The users of a TOML file: `[users.ada]` with `password` (as `tallybook web user` prints it) and `operate`.

    ConfigError for a file that is not there, that others may read, or that says something else.
    """
    table = read_private(path, "users").get("users")
    if not isinstance(table, dict) or not table:
        raise ConfigError(
            "users", str(path), "it names no users", hint="`tallybook web user ada` prints what to write there"
        )
    found = {}
    for name, said in table.items():
        if not is_name(name):
            raise ConfigError("users", name, "a name has 1 to 64 letters, digits, or any of _ . @ + -")
        if not isinstance(said, dict) or not _is_hash(said.get("password")):
            hint = f"`tallybook web user {name}` prints one"
            raise ConfigError("users", name, "has no password hash", hint=hint)
        if unknown := set(said) - {"password", "operate"}:
            raise ConfigError("users", name, f"says {min(unknown)!r}, which means nothing here")
        if not isinstance(said.get("operate", False), bool):
            raise ConfigError("users", name, "operate is true or false")
        found[name] = Password(User(name, said.get("operate", False)), said["password"])
    return Users(found)


def read_private(path: Path, option: str) -> dict[str, Any]:
    """A TOML file that nobody else may read. ConfigError for anything else."""
    try:
        with path.open("rb") as file:
            if open_to_others(os.fstat(file.fileno())):
                raise ConfigError(option, str(path), "others may read it", hint=f"chmod 600 {path}")
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(path), f"is not TOML: {error}") from None


def _is_hash(text: object) -> bool:
    if not isinstance(text, str):
        return False
    parts = text.split("$")
    try:
        return len(parts) == 4 and parts[0] == "scrypt" and parts[1] == str(_N) and all(map(_b64, parts[2:]))
    except ValueError:
        return False


def _b64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
