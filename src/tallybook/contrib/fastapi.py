"""Tallybook in FastAPI: the app's pool while it serves, a transaction around a request. Needs `tallybook[fastapi]`.

api = FastAPI(lifespan=lifespan(app))
Transaction = Annotated[AsyncSession, in_transaction(sessions)]

@api.post("/users")
async def register(session: Transaction, email: str) -> None:
    session.add(user := User(email=email))
    await session.flush()
    await send_welcome.enqueue(session, user.id)      # committed with the user, before the answer is sent

api.mount("/queue", dashboard(app, authenticate=who))  # of tallybook.web; the lifespan closes its connections
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import psycopg

try:
    from fastapi import Depends, FastAPI
    from fastapi.requests import HTTPConnection
except ImportError as error:  # pragma: no cover - shown to people
    raise ImportError(f"{error}. Install it with: pip install 'tallybook[fastapi]'") from error

from tallybook._app import App
from tallybook._worker.run.calling import enter_lifespans
from tallybook._worker.run.context import Context

__all__ = ["in_transaction", "lifespan", "the_app"]

log = logging.getLogger("tallybook.web")

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Any]]
Queues = Mapping[str, int] | Iterable[str]


def lifespan(
    app: App, inner: Lifespan | None = None, *, max_size: int = 4, shared: bool = False, worker: bool | Queues = False
) -> Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Any]]]:
    """Return the lifespan of a FastAPI application that uses this App: its pool is open while requests are served.

    `inner` is your own lifespan, which runs inside with the pool already open; its value is in `request.state` as
    usual. The pool has at most `max_size` connections. Mounted dashboards are closed at the end. Raises
    QueueUnavailable if the database cannot be reached at the start.

    With `shared`, requests and jobs share the code that opens their resources: the functions of `@app.lifespan` run
    here too, before `inner`, and `request.state` has what they set on `ctx.state`. They close in reverse order.

    `worker` runs a worker beside the requests, for development only: True, or its queues as for `app.run_worker`. When
    the server stops, running jobs return to their queues. In production, run `tallybook worker` as separate processes:
    a job then never delays a request, and each can be restarted and scaled separately.

        api = FastAPI(lifespan=lifespan(app))
    """

    @asynccontextmanager
    async def living(api: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_close_dashboards, api)
            await stack.enter_async_context(app.open(max_size=max_size))
            context = Context(SimpleNamespace(), app=app)
            if shared:
                await enter_lifespans(app, context, stack)
            state = None if inner is None else await stack.enter_async_context(inner(api))
            if worker is not False:
                await stack.enter_async_context(_working(app, None if worker is True else worker))
            yield {**vars(context.state), **(state or {}), "tallybook": app}

    return living


def the_app(connection: HTTPConnection) -> App:
    """A dependency: the App of the lifespan, for routes in modules that cannot import it. Also for `def` routes.

    @api.post("/welcome")
    async def welcome(app: Annotated[App, Depends(the_app)]) -> None:
        await send_welcome.enqueue(app, 42)  # at once, in its own transaction
    """
    app = getattr(connection.state, "tallybook", None)
    if not isinstance(app, App):
        raise RuntimeError(
            "no App is open: FastAPI(lifespan=lifespan(app)) opens it, and a TestClient runs that as a context manager"
        )
    return app


def in_transaction(sessions: Callable[[], Any] | None = None) -> Any:
    """A dependency: a transaction around the route, for its changes and the jobs that it enqueues.

    `sessions` is SQLAlchemy's `async_sessionmaker`, or a `sessionmaker` for `def` routes. Without it, the dependency is
    a psycopg AsyncConnection of the App's pool (`max_size` of the lifespan limits how many requests have one). It is
    committed after the route has returned and before the answer is sent, so a success means that the row and the jobs
    exist. An exception, also an HTTPException, rolls back. Give it a name: each call makes a separate transaction.

        Transaction = Annotated[AsyncSession, in_transaction(sessions)]
    """
    if sessions is None:
        return Depends(_connection, scope="function")
    from sqlalchemy.ext.asyncio import async_sessionmaker
    from sqlalchemy.orm import sessionmaker

    maker: Any = sessions

    async def session() -> AsyncIterator[Any]:
        async with maker.begin() as found:
            yield found

    def session_sync() -> Iterator[Any]:
        with maker.begin() as found:
            yield found

    if not isinstance(maker, async_sessionmaker | sessionmaker):
        raise TypeError(f"in_transaction needs a sessionmaker or an async_sessionmaker, not {type(maker).__name__}")
    return Depends(session if isinstance(maker, async_sessionmaker) else session_sync, scope="function")


async def _connection(connection: HTTPConnection) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    async with the_app(connection)._connection() as conn, conn.transaction():
        yield conn


@asynccontextmanager
async def _working(app: App, queues: Queues | None) -> AsyncIterator[None]:
    log.warning("a worker of app %r runs in the web server; use this for development only", app.name)
    running = asyncio.create_task(app.run_worker(queues=queues, install_signals=False), name="tallybook-worker")
    running.add_done_callback(_told)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait((running,))


def _told(running: asyncio.Task[Any]) -> None:
    if not running.cancelled() and (error := running.exception()):
        log.error("the worker in the web server has ended", exc_info=error)


async def _close_dashboards(api: FastAPI) -> None:
    from tallybook.web import Site

    for route in api.routes:
        if isinstance(site := getattr(route, "app", None), Site):
            await site.aclose()
