"""Mount a dashboard in an application that cannot mount another one, like Django's."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


def mounted(inner: ASGIApp, path: str, site: ASGIApp) -> ASGIApp:
    """Return an ASGI application that serves `site` below `path`, and `inner` elsewhere.

    application = mounted(get_asgi_application(), "/queue", dashboard(app, authenticate=who))
    """
    prefix = "/" + path.strip("/")
    if prefix == "/":
        raise ValueError("mounted needs a path for the dashboard, like '/queue'")

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "").rstrip("/")
        found = scope.get("path", "")
        if root and found.startswith(f"{root}/"):  # servers keep the prefix of their proxy in the path
            found = found[len(root) :]
        if scope["type"] in ("http", "websocket") and (found == prefix or found.startswith(f"{prefix}/")):
            scope = {**scope, "root_path": root + prefix}
            await site(scope, receive, send)
        else:
            await inner(scope, receive, send)

    return both
