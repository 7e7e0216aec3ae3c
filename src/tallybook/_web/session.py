"""The session: a small signed cookie. It says who is there, carries the token against forged forms, and one notice."""

from __future__ import annotations

import hashlib
import secrets
from http.cookies import SimpleCookie
from typing import Any

from itsdangerous import BadSignature, URLSafeTimedSerializer

__all__ = ["COOKIE", "Session", "Sessions"]

COOKIE = "tallybook"
_LONGEST = 12 * 3600
_MOST = 3500  # bytes; browsers drop a cookie above 4096


class Session:
    """What the cookie held, and whether it has to be sent again."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.changed = False

    @property
    def token(self) -> str:
        """The token that a form of this session carries."""
        if not isinstance(self.values.get("token"), str):
            self["token"] = secrets.token_urlsafe(24)
        return str(self.values["token"])

    def __setitem__(self, key: str, value: Any) -> None:
        self.values[key] = value
        self.changed = True

    def get(self, key: str) -> Any:
        """A value, or None."""
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

    def read(self, cookies: str) -> Session:
        """The session of a request, a new one for a cookie that is missing, too old, or not ours."""
        try:
            found = SimpleCookie(cookies).get(COOKIE)
            values = self._signer.loads(found.value, max_age=_LONGEST) if found else {}
        except (BadSignature, Exception):  # a cookie is anybody's text
            values = {}
        return Session(values if isinstance(values, dict) else {})

    def written(self, session: Session, *, root: str, secure: bool) -> str:
        """The Set-Cookie header."""
        value = self._signer.dumps(session.values)
        text = value if isinstance(value, str) else value.decode()
        if len(text) > _MOST:
            session.values.pop("notice", None)
            again = self._signer.dumps(session.values)
            text = again if isinstance(again, str) else again.decode()
        safe = "; Secure" if secure else ""
        return f"{COOKIE}={text}; Path={root or '/'}; Max-Age={_LONGEST}; HttpOnly; SameSite=Lax{safe}"
