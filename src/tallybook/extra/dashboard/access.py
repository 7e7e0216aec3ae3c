"""The access check: which user may view and act. It runs before any page."""

import inspect
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.requests import Request

from tallybook.extra.dashboard.session import Session
from tallybook.extra.dashboard.users import User, Users

Authenticate = Callable[[Request], User | Awaitable[User | None] | None]
"""The host's hook that identifies the user. None means no access."""

_FORWARDED = (
    "forwarded", "via", "x-forwarded", "x-real-", "x-client-ip", "x-cluster-client-ip", "x-original-", "x-envoy-",
    "x-amzn-trace-id", "true-client-ip", "client-ip", "cf-", "fly-", "fastly-", "x-appengine-", "x-arr-", "x-azure-",
)  # fmt: skip
"""Prefixes of the headers of proxies, in lower case."""
_LONGEST = 200  # the limit of the audit


class Access:
    """The access of one of three kinds: the host application's hook, users with passwords, or this machine only."""

    def __init__(self, authenticate: Authenticate | None, users: Users | None, read_only: bool) -> None:
        self._authenticate, self.users, self.read_only = authenticate, users, read_only
        self.is_local = authenticate is None and users is None

    async def user(self, request: Request, session: Session) -> User | None:
        found: User | None
        if self._authenticate is not None:
            said = self._authenticate(request)
            found = await said if inspect.isawaitable(said) else said
            if found is not None and not isinstance(found, User):
                raise TypeError(f"authenticate returned {type(found).__name__}, not a tallybook.web.User or None")
            if found is not None and not (isinstance(found.name, str) and 1 <= len(found.name) <= _LONGEST):
                raise TypeError(f"authenticate returned a User whose name is not a text of 1 to {_LONGEST} characters")
        elif self.users is not None:
            name, mark = session.get("user"), session.get("mark")
            known = isinstance(name, str) and isinstance(mark, str) and session.is_young
            found = self.users.known(name, mark) if known else None
        else:
            found = User("local", operate=True) if self._is_this_machine(request) else None
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
    """Return whether a host name or an address is a loopback one."""
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
