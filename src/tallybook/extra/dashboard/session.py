"""The session: a small signed cookie. It says who is there, carries the token against forged forms, and one notice."""

from __future__ import annotations

import hashlib
import secrets
import time
from contextlib import suppress
from typing import Any

from itsdangerous import BadData, URLSafeTimedSerializer

COOKIE = "tallybook"
LONGEST = 12 * 3600
"""Seconds: as long as a cookie is good, and as long as a login lasts, whatever is done meanwhile."""
_MOST = 3500  # bytes; browsers drop a cookie above 4096


class Session:
    """What the cookie held, and whether it has to be sent again."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.changed = False

    @property
    def token(self) -> str:
        if not isinstance(self.values.get("token"), str):
            self["token"] = secrets.token_urlsafe(24)
        return str(self.values["token"])

    def __setitem__(self, key: str, value: Any) -> None:
        self.values[key] = value
        self.changed = True

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def pop(self, key: str) -> Any:
        """Take a value out; None if it is not there."""
        if key not in self.values:
            return None
        self.changed = True
        return self.values.pop(key)

    def renew(self) -> None:
        """Begin anew, with another token: at a login and at a logout."""
        self.values = {}
        self.changed = True

    def login(self, name: str, mark: str) -> None:
        """Somebody has come in; what was before is forgotten."""
        self.renew()
        self.values = {"user": name, "mark": mark, "since": int(time.time())}

    @property
    def is_young(self) -> bool:
        """Whether the login is not too long ago. A cookie that is sent again is signed again: its own age says nothing."""
        since = self.values.get("since")
        return isinstance(since, int) and time.time() - since < LONGEST


def cookie_name(host: str) -> str:
    """The cookie's name on a host: browsers keep those of all ports together, and two dashboards may run on one machine."""
    _, _, port = host.rpartition(":")
    return f"{COOKIE}-{port}" if port.isdecimal() and len(port) < 6 else COOKIE


class Sessions:
    """Reads and writes the cookie. Without a secret one is made for this process: a restart then ends all sessions."""

    def __init__(self, secret: str | None) -> None:
        if secret is not None and len(secret) < 32:
            raise ValueError("a secret has at least 32 characters")
        self._signer = URLSafeTimedSerializer(
            secret or secrets.token_urlsafe(48),
            salt="tallybook.session",
            signer_kwargs={"digest_method": hashlib.sha256},
        )

    def read(self, cookies: str, host: str) -> Session:
        """The session of a request, a new one for a cookie that is missing, too old, or not ours."""
        values: Any = {}
        # Not all at once: what another application of this host keeps in its cookies may be no cookie for a strict reader.
        for one in cookies.split(";"):
            name, _, text = one.strip().partition("=")
            if name == cookie_name(host):
                with suppress(BadData):
                    values = self._signer.loads(text, max_age=LONGEST)
                    break
        return Session(values if isinstance(values, dict) else {})

    def written(self, session: Session, host: str, *, root: str, secure: bool) -> str:
        value = self._signer.dumps(session.values)
        text = value if isinstance(value, str) else value.decode()
        if len(text) > _MOST:
            session.values.pop("notice", None)
            again = self._signer.dumps(session.values)
            text = again if isinstance(again, str) else again.decode()
        safe = "; Secure" if secure else ""
        return f"{cookie_name(host)}={text}; Path={root or '/'}; Max-Age={LONGEST}; HttpOnly; SameSite=Lax{safe}"
