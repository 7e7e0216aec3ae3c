"""The session, a small signed cookie; and the access check, which decides before any page who may view and act."""

import hashlib
import inspect
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from itsdangerous import BadData, URLSafeTimedSerializer
from starlette.requests import Request

from tallybook.extra.dashboard.users import User, Users

COOKIE = "tallybook"
LONGEST = 12 * 3600  # seconds for which a cookie is valid and a login lasts, regardless of activity
_MOST = 3500  # bytes; browsers drop a cookie above 4096
Authenticate = Callable[[Request], User | Awaitable[User | None] | None]
"""The host's hook that identifies the user. None means no access."""

_FORWARDED = (
    "forwarded", "via", "x-forwarded", "x-real-", "x-client-ip", "x-cluster-client-ip", "x-original-", "x-envoy-",
    "x-amzn-trace-id", "true-client-ip", "client-ip", "cf-", "fly-", "fastly-", "x-appengine-", "x-arr-", "x-azure-",
)  # fmt: skip
"""Prefixes of the headers of proxies, in lower case."""
_LONGEST_NAME = 200  # the limit of the audit


class Session(dict[str, Any]):
    """The values of the cookie: the user, the token against forged forms, and one notice."""

    def __init__(self, sent: dict[str, Any]) -> None:
        super().__init__(sent)
        self._sent = sent

    @property
    def changed(self) -> bool:
        """Whether the cookie has to be sent again."""
        return self != self._sent

    @property
    def token(self) -> str:
        if not isinstance(self.get("token"), str):
            self["token"] = secrets.token_urlsafe(24)
        return str(self["token"])

    def login(self, name: str, mark: str) -> None:
        """Replace the session by one of this user, which gets a new token."""
        self.clear()
        self.update(user=name, mark=mark, since=int(time.time()))

    @property
    def is_young(self) -> bool:
        """Whether the login is recent enough. The cookie's age does not show this: each new cookie is signed again."""
        since = self.get("since")
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
        text = self._signer.dumps(session)
        if len(text) > _MOST:
            session.pop("notice", None)
            text = self._signer.dumps(session)
        safe = "; Secure" if secure else ""
        return f"{cookie_name(host)}={text}; Path={root or '/'}; Max-Age={LONGEST}; HttpOnly; SameSite=Lax{safe}"


class Access:
    """The access of one of three kinds: the host application's hook, users with passwords, or this machine only."""

    def __init__(self, authenticate: Authenticate | None, users: Users | None, read_only: bool) -> None:
        self._authenticate, self.users, self.read_only = authenticate, users, read_only
        self.is_local = authenticate is None and users is None

    async def user(self, request: Request, session: Session) -> User | None:
        found: User | None = None
        if self._authenticate is not None:
            said = self._authenticate(request)
            found = await said if inspect.isawaitable(said) else said
            if found is not None and not isinstance(found, User):
                raise TypeError(f"authenticate returned {type(found).__name__}, not a tallybook.web.User or None")
            if found is not None and not (isinstance(found.name, str) and 1 <= len(found.name) <= _LONGEST_NAME):
                why = f"whose name is not a text of 1 to {_LONGEST_NAME} characters"
                raise TypeError(f"authenticate returned a User {why}")
        elif self.users is not None:
            name, mark = session.get("user"), session.get("mark")
            if isinstance(name, str) and isinstance(mark, str) and session.is_young:
                found = self.users.known(name, mark)
        elif self._is_this_machine(request):
            found = User("local", operate=True)
        return replace(found, operate=False) if found and self.read_only else found

    def _is_this_machine(self, request: Request) -> bool:
        """Return whether the request comes from this machine, by a name of this machine, and not through a proxy.

        The check of the name keeps out other sites whose own name resolves to this machine. A proxy with the defaults
        of nginx replaces its name by the name of this machine and adds no header. But it uses HTTP/1.0, which browsers
        do not, and the Origin of its pages has the name that the browser knows.
        """
        if request.client is None or not is_loopback(request.client.host):
            return False
        if any(name.startswith(_FORWARDED) for name in request.headers) or request.scope.get("http_version") == "1.0":
            return False
        origin = request.headers.get("origin", "null")
        if origin != "null" and not is_loopback(_hostname(origin.partition("://")[2])):
            return False
        return is_loopback(_hostname(request.headers.get("host", "")))


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
