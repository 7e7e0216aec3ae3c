"""The dashboard and the operator API: mount them in your application or run `tallybook web`. Needs `tallybook[web]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tallybook.errors import ConfigError

try:
    from tallybook.extra.dashboard.access import Access, Authenticate
    from tallybook.extra.dashboard.nodes import Nodes
    from tallybook.extra.dashboard.site import Site, mounted
    from tallybook.extra.dashboard.users import User, read_users
    from tallybook.extra.operator.keys import Key, read_keys
    from tallybook.extra.operator.serve import OperatorApi, operator_api
except ImportError as error:  # pragma: no cover - told to people
    raise ImportError(f"{error}. Install it with: pip install 'tallybook[web]'") from error

if TYPE_CHECKING:
    from tallybook._app import App

__all__ = ["Authenticate", "Key", "OperatorApi", "Site", "User", "dashboard", "mounted", "operator_api", "read_keys"]


def dashboard(
    app: App,
    *,
    authenticate: Authenticate | None = None,
    users: str | Path | None = None,
    read_only: bool | None = None,
    secret: str | None = None,
    dsn: str | None = None,
    metrics_token: str | None = None,
    nodes: str | None = None,
    read_dsn: str | None = None,
) -> Site:
    """Return the dashboard of an App as an ASGI application.

    Access: `authenticate(request)`, async or plain, returns a `User` or None; or `users` is a TOML file with names and
    password hashes. With neither, only requests from this machine to localhost or a loopback address are answered.
    `read_only` removes all actions; it defaults to True if no login is required. `secret` (32 characters or more)
    signs the sessions; without one they end at a restart, and replicas do not share them. `metrics_token` lets a
    scraper read /metrics.
    `nodes` is "all", or names like "north,south": the dashboard of several databases, see
    https://github.com/tallybook/tallybook/blob/main/docs/nodes.md. With `read_dsn` pages and metrics are read from a
    hot standby and show its lag; actions use the primary.

    It connects on the first request. Mount it in an application, or run it alone. Raises ConfigError for invalid
    options.

        api.mount("/queue", dashboard(app, authenticate=who))
    """
    if authenticate is not None and users is not None:
        raise ConfigError("users", str(users), "authenticate= already decides about access")
    if authenticate is not None and not callable(authenticate):
        raise ConfigError("authenticate", authenticate, "not a function", hint="def who(request): return User('ada')")
    if secret is not None and len(secret) < 32:
        raise ConfigError("secret", "(not shown)", "it has fewer than 32 characters")
    if metrics_token is not None and len(metrics_token) < 16:
        raise ConfigError("metrics_token", "(not shown)", "it has fewer than 16 characters")
    known = None if users is None else read_users(Path(users))
    closed = authenticate is None and known is None
    access = Access(authenticate, known, closed if read_only is None else read_only)
    databases = Nodes(app, dsn=dsn, read_dsn=read_dsn, which=nodes)
    return Site(app, access, databases, secret=secret, metrics_token=metrics_token)
