"""The operator API below /api/v1 of an app that serves everything else: of the dashboard in `tallybook web`."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from tallybook.extra.operator.serve import OperatorApi

__all__ = ["PREFIX", "Beside"]

PREFIX = "/api/v1"


class Beside:
    """An ASGI app of two. Who may use the dashboard decides nothing for the API: its requests are signed."""

    def __init__(self, site: ASGIApp, api: OperatorApi) -> None:
        self._site = site
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan, which is the site's."""
        if scope["type"] == "http":
            root: str = scope.get("root_path", "").rstrip("/")
            path: str = scope["path"].removeprefix(root)
            if path == PREFIX or path.startswith(PREFIX + "/"):
                await self._api({**scope, "root_path": root + PREFIX}, receive, send)
                return
        await self._site(scope, receive, send)
        if scope["type"] == "lifespan":
            await self._api.close()
