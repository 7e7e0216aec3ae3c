"""The users of the dashboard: a file with names and salted, slow hashes of passwords, made by `tallybook web user`."""

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

from tallybook._model.provider import open_to_others
from tallybook.errors import ConfigError

_N, _R, _P = 2**15, 8, 1
_NAME = re.compile(r"[\w.@+-]{1,64}")
_TRIES, _WITHIN = 10, 60.0
_MOST_NAMES = 10_000  # names whose attempts are counted


@dataclass(frozen=True)
class User:
    """A user of the dashboard. With `operate`, the user may also change things."""

    name: str
    operate: bool = False


@dataclass(frozen=True)
class Password:
    user: User
    hash: str = field(repr=False)

    @property
    def mark(self) -> str:
        """The part of the hash that a session stores, so that a change of the password ends the session."""
        return hashlib.sha256(self.hash.encode()).hexdigest()[:16]


def hashed(password: str, salt: bytes | None = None) -> str:
    """Return the hash of a password for the file. Takes about 0.1 s, on purpose."""
    salt = salt or secrets.token_bytes(16)
    key = hashlib.scrypt(password.encode(), salt=salt, n=_N, r=_R, p=_P, maxmem=128 * _N * _R * 2, dklen=32)
    return f"scrypt${_N}${base64.b64encode(salt).decode()}${base64.b64encode(key).decode()}"


def _fits(password: str, kept: str) -> bool:
    return hmac.compare_digest(hashed(password, base64.b64decode(kept.split("$")[2])).encode(), kept.encode())


class Users:
    """The users of a dashboard. Attempts are counted by name: ten per minute are allowed."""

    def __init__(self, passwords: dict[str, Password]) -> None:
        self._passwords = passwords
        self._tries: dict[str, list[float]] = {}
        self._nobody = f"scrypt${_N}${base64.b64encode(b'0' * 16).decode()}${base64.b64encode(b'0' * 32).decode()}"

    def known(self, name: str, mark: str) -> User | None:
        """Return the user of a session, or None if the password has changed."""
        found = self._passwords.get(name)
        return found.user if found and hmac.compare_digest(found.mark.encode(), mark.encode()) else None

    def may_try(self, name: str) -> bool:
        """Count an attempt before it is made, so that concurrent ones count too. False if there were too many."""
        # An unknown name is counted like any other, so the answer does not reveal which names exist.
        since = time.monotonic() - _WITHIN
        recent = [at for at in self._tries.pop(name, ()) if at > since]
        if may := len(recent) < _TRIES:
            recent.append(time.monotonic())
        if len(self._tries) >= _MOST_NAMES:  # drop the name with the oldest attempt
            del self._tries[next(iter(self._tries))]
        self._tries[name] = recent
        return may

    def login(self, name: str, password: str) -> Password | None:
        """Return the user if name and password match. Blocks for about 0.1 s, also for an unknown name."""
        found = self._passwords.get(name)
        fits = _fits(password, found.hash if found else self._nobody)
        if found is None or not fits:
            return None
        self._tries.pop(name, None)
        return found


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def read_users(path: Path) -> Users:
    """Return the users of a TOML file: `[users.ada]` with `password` (as `tallybook web user` prints it) and `operate`.

    ConfigError if the file is missing, readable by others, or has other contents.
    """
    try:
        with path.open("rb") as file:
            if open_to_others(os.fstat(file.fileno())):
                raise ConfigError("users", str(path), "others may read it", hint=f"Run chmod 600 {path}")
            table = tomllib.load(file).get("users")
    except OSError as error:
        raise ConfigError("users", str(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("users", str(path), f"is not TOML: {error}") from None
    if not isinstance(table, dict) or not table:
        hint = "`tallybook web user ada` prints the lines of a user"
        raise ConfigError("users", str(path), "it names no users", hint=hint)
    found = {}
    for name, said in table.items():
        if not is_name(name):
            raise ConfigError("users", name, "a name has 1 to 64 characters: letters, digits, and _ . @ + -")
        if not isinstance(said, dict) or not _is_hash(said.get("password")):
            raise ConfigError("users", name, "has no password hash", hint=f"`tallybook web user {name}` prints one")
        if unknown := set(said) - {"password", "operate"}:
            raise ConfigError("users", name, f"has the unknown key {min(unknown)!r}")
        if not isinstance(said.get("operate", False), bool):
            raise ConfigError("users", name, "operate must be true or false")
        found[name] = Password(User(name, said.get("operate", False)), said["password"])
    return Users(found)


def _is_hash(text: object) -> bool:
    parts = text.split("$") if isinstance(text, str) else []
    if parts[:2] != ["scrypt", str(_N)] or len(parts) != 4:
        return False
    try:
        return all(base64.b64decode(one, validate=True) for one in parts[2:])
    except ValueError:
        return False
