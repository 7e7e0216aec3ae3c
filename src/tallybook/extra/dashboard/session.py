"""The session: a small signed cookie with the user, the token against forged forms, and one notice."""

import hashlib
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from itsdangerous import BadData, URLSafeTimedSerializer

from tallybook.extra.dashboard.users import User

COOKIE = "tallybook"
LONGEST = 12 * 3600  # seconds for which a cookie is valid and a login lasts, regardless of activity
_MOST = 3500  # bytes; browsers drop a cookie above 4096


class Session:
    """The values of the cookie, and whether it has to be sent again."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values, self.changed = values, False

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
        if key not in self.values:
            return None
        self.changed = True
        return self.values.pop(key)

    def renew(self) -> None:
        """Clear the session, so that it gets a new token: at a login and at a logout."""
        self.values, self.changed = {}, True

    def login(self, name: str, mark: str) -> None:
        self.values, self.changed = {"user": name, "mark": mark, "since": int(time.time())}, True

    @property
    def is_young(self) -> bool:
        """Whether the login is recent enough. The cookie's age does not show this: each new cookie is signed again."""
        since = self.values.get("since")
        return isinstance(since, int) and time.time() - since < LONGEST


@dataclass
class Visit:
    session: Session
    user: User | None
    root: str
    form: dict[str, list[str]] = field(default_factory=dict)


def cookie_name(host: str) -> str:
    """Return the cookie's name for a host, with its port: browsers share the cookies of two dashboards on one host."""
    _, _, port = host.rpartition(":")
    return f"{COOKIE}-{port}" if port.isdecimal() and len(port) < 6 else COOKIE


class Sessions:
    """Reads and writes the cookie. Without a secret, this process makes its own, and a restart ends all sessions."""

    def __init__(self, secret: str | None) -> None:
        key, digest = secret or secrets.token_urlsafe(48), {"digest_method": hashlib.sha256}
        self._signer = URLSafeTimedSerializer(key, salt="tallybook.session", signer_kwargs=digest)

    def read(self, cookies: str, host: str) -> Session:
        """Return the session of a request, a new one if the cookie is missing, too old, or not ours."""
        values: Any = {}
        # Parse them one by one: a strict parser may refuse the cookies of another application on this host.
        for one in cookies.split(";"):
            name, _, text = one.strip().partition("=")
            if name == cookie_name(host):
                with suppress(BadData):
                    values = self._signer.loads(text, max_age=LONGEST)
                    break
        return Session(values if isinstance(values, dict) else {})

    def written(self, session: Session, host: str, *, root: str, secure: bool) -> str:
        text = self._signer.dumps(session.values)
        if len(text) > _MOST:
            session.values.pop("notice", None)
            text = self._signer.dumps(session.values)
        safe = "; Secure" if secure else ""
        return f"{cookie_name(host)}={text}; Path={root or '/'}; Max-Age={LONGEST}; HttpOnly; SameSite=Lax{safe}"
