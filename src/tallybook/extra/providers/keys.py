"""The source of a program's keys: TALLYBOOK_KEYS, or the file that TALLYBOOK_KEYS_FILE names."""

from __future__ import annotations

import os
from pathlib import Path

from tallybook._model.keyring import Keyring, parse_keys
from tallybook._model.provider import Secret
from tallybook.errors import ConfigError

_NOWHERE = "TALLYBOOK_KEYS, or the file that TALLYBOOK_KEYS_FILE names"


class KeySource:
    """The current keyring, parsed again when the variable, or the time or size of the file, changes.

    A file can therefore be replaced while workers run.
    """

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
        seen = (path, *_stamp(path)) if path else text
        if seen != self._seen:
            if path:
                self._keyring = parse_keys(_read(path), "TALLYBOOK_KEYS_FILE")
            elif text.reveal().strip():
                self._keyring = parse_keys(text, "TALLYBOOK_KEYS")
            else:
                self._keyring = Keyring({}, _NOWHERE)
            self._seen = seen
        return self._keyring


def _stamp(path: str) -> tuple[int, ...]:
    try:
        found = Path(path).stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


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
