"""The dashboard's pages for machines: /metrics for Prometheus, /healthz and /readyz for probes."""

import asyncio
import hmac
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tallybook._db.numbers import Asked, ask
from tallybook._model.exposition import CONTENT_TYPE, Numbers, Sample, Shown, of_nodes, of_the_database, text
from tallybook.errors import ConfigError
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.dashboard.nodes import At, Nodes, sorted_out

_FEWEST = 16
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_READY = "select to_regclass('tallybook.entry') is not null"


def metrics_route(nodes: Nodes, *, token: str | None = None, admits: Callable[[Request], bool] | None = None) -> Route:
    """Return a route with the metrics of the database, as in a worker's /metrics. They are read at most once a second.

    A request needs `Authorization: Bearer TOKEN`, or must be accepted by `admits`, which may check a session; others
    get a 401. With neither of the two, every request is served, and the application that mounts the route has to
    protect it. An unreachable database is `tallybook_up 0` with a 200. ConfigError if the token has fewer than 16
    characters, or characters that a header cannot carry.

    With several nodes, each series has the label `node`, and each node has its own `tallybook_up`.

        Starlette(routes=[metrics_route(nodes, token=os.environ["METRICS_TOKEN"])])
    """
    if token is not None and (not isinstance(token, str) or len(token) < _FEWEST):
        hint = 'Make one with python -c "import secrets; print(secrets.token_urlsafe(32))"'
        raise ConfigError("token", "(not shown)", f"must have at least {_FEWEST} characters", hint=hint)
    if token is not None and (not (token.isascii() and token.isprintable()) or " " in token):
        raise ConfigError("token", "(not shown)", "has characters that a header cannot carry")
    asked: dict[str, tuple[Asked[Numbers], Shown]] = {}

    async def numbers(at: At) -> dict[str, list[Sample]]:
        async def answer() -> Numbers:
            return sorted_out([await nodes.ask_one(at, lambda conn, _: ask(conn))])[0][at.name]

        one, shown = asked.setdefault(at.name, (Asked(answer), Shown()))
        found, standby = of_the_database(await one.now(), shown), at.database.standby
        if standby is not None and standby.lag is not None:
            found["tallybook_standby_lag_seconds"] = [((), standby.lag)]
        return found

    async def metrics(request: Request) -> Response:
        is_known = knows_token(request, token) or (admits is not None and admits(request))
        if not is_known and (token is not None or admits is not None):
            headers = {**_HEADERS, "WWW-Authenticate": 'Bearer realm="tallybook"'}
            return PlainTextResponse("a bearer token is required\n", 401, headers)
        known = await nodes.known()
        found = dict(zip((at.name for at in known), await asyncio.gather(*map(numbers, known)), strict=True))
        whole = of_nodes(found) if nodes.many else found[""]
        return Response(text(whole), headers={**_HEADERS, "Content-Type": CONTENT_TYPE})

    return Route("/metrics", metrics, methods=["GET"], name="metrics")


def health_routes(nodes: Nodes) -> list[Route]:
    """Return the routes of the probes.

    `/healthz` is 200 while the process answers. `/readyz` is 200 while the database answers and has Tallybook
    installed, otherwise 503; of several nodes one is enough. They read the database at most once a second, show nothing
    secret and need no authentication.
    """

    async def answer() -> bool:
        async def ready(conn: Conn, _: str) -> bool:
            row = await (await conn.execute(_READY)).fetchone()
            return bool(row and row[0])

        return any((await nodes.answered(ready))[0].values())

    asked = Asked(answer)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_HEADERS)

    async def readyz(request: Request) -> Response:
        if found := await asked.now():
            return await healthz(request)
        why = "no connection to the database" if found is None else "Tallybook is not installed in the database"
        return PlainTextResponse(f"{why}\n", 503, _HEADERS)

    return [Route(f"/{one.__name__}", one, methods=["GET"], name=one.__name__) for one in (healthz, readyz)]


def knows_token(request: Request, token: str | None) -> bool:
    """Return whether the request has this bearer token, in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return (
        token is not None and scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())
    )
