"""The request of a page: it reads, renders, and changes something together with its audit row."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tallybook._app import App
from tallybook._db import audit
from tallybook._db.driver import DataError, InsufficientPrivilege, QueryCanceled
from tallybook._db.nodes import Answer
from tallybook._db.verb import Verb, run
from tallybook.errors import InvalidArgument, TallybookError
from tallybook.extra.dashboard.access import Visit
from tallybook.extra.dashboard.asked import job_of
from tallybook.extra.dashboard.database import IN_THE_WAY, Conn
from tallybook.extra.dashboard.nodes import At
from tallybook.extra.dashboard.render import address
from tallybook.extra.dashboard.shared import Shared

T = TypeVar("T")


class View:
    def __init__(self, request: Request, site: Shared) -> None:
        self.request, self.site = request, site
        self.app: App = site.app
        self.visit: Visit = request.scope["tallybook"]
        self.path: dict[str, Any] = request.path_params
        self.node: str | None = None  # the node that was read; None for all
        self.away: list[Answer[Any]] = []  # nodes that did not answer

    @property
    def user(self) -> str:
        return self.visit.user.name if self.visit.user else ""

    @property
    def may_operate(self) -> bool:
        return bool(self.visit.user and self.visit.user.operate)

    async def at(self) -> At:
        """Return the node of the request: that of its job, the one in the address, or the home. Raises UnknownNode."""
        job = job_of(self.job)
        nodes = self.site.nodes
        return await nodes.named(self.asked("node")) if job is None else await nodes.of_job(job)

    @property
    def job(self) -> str:
        """The id of the job in the address, or an empty text."""
        return str(self.path.get("id", ""))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Conn]:
        """Yield a read-only connection to the node, with one snapshot and a statement timeout."""
        at = await self.at()
        self.node = at.name
        async with at.database.read() as conn:
            yield conn

    async def ask(self, question: Callable[[Conn, str], Awaitable[T]]) -> dict[str, T]:
        """Return the answers by name of node, or that of the node in the address. QueueUnavailable if none answers."""
        found, self.away = await self.site.nodes.answered(question, self.asked("node"))
        return found

    def asked(self, name: str, default: str = "") -> str:
        """Return a parameter of the query, stripped."""
        return self.request.query_params.get(name, default).strip()

    def asked_all(self, name: str) -> list[str]:
        return [value.strip() for value in self.request.query_params.getlist(name) if value.strip()]

    def url(self, path: str, /, **query: Any) -> str:
        """Return the address of a page of the dashboard, with the node of this page; empty parameters are omitted."""
        if not path.startswith("/static/"):
            query.setdefault("node", self.asked("node") or (self.node if self.path.get("id") else None))
        return address(self.visit.root, path, **query)

    def render(self, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        text = self.site.env.get_template(template).render(
            url=self.url, root=self.visit.root, path=self.request.url.path.removeprefix(self.visit.root),
            user=self.user, may_operate=self.may_operate, token=self.visit.session.token,
            notice=self.visit.session.pop("notice", None), site=self.site, here=self.here, here_on=self.here_on,
            node=self.node, away=self.away, only=self.asked("node"), **values,
        )  # fmt: skip
        return HTMLResponse(text, status)

    def refused(self, status: int, why: str) -> HTMLResponse:
        return self.render("error.html", status=status, title="Not this way", message=why, hint=None)

    def here_on(self, node: str) -> str:
        """Return the address of this page for another node, or for all, from its first page on."""
        given = self.request.query_params
        asked = {
            name: given.getlist(name) for name in given if name not in ("node", "from") and not name.startswith("after")
        }
        return self.url(self.request.url.path.removeprefix(self.visit.root), **{**asked, "node": node})

    @property
    def here(self) -> str:
        url = self.request.url
        return f"{url.path}?{url.query}" if url.query else url.path


class Act(View):
    """A request that changes something, in one transaction with its audit row."""

    conn: Conn  # in the transaction
    _audited = False
    _next: str | None = None

    @asynccontextmanager
    async def step(self, at: At | None = None) -> AsyncIterator[Conn]:
        """Run one transaction, on the node of the request or on `at`. The block must call `audit` or `nothing`."""
        at = at or await self.at()
        self.node = at.name
        async with at.database.act(self.request.url.path.removeprefix(self.visit.root)) as conn:
            self.conn, self._audited = conn, False
            yield conn
            if not self._audited:
                raise RuntimeError(f"{self.request.url.path} changed something without a word to the audit")

    @property
    def job(self) -> str:
        return self.form("job") or super().job

    def form(self, name: str) -> str:
        """Return a field of the form, stripped."""
        return (self.visit.form.get(name) or [""])[0].strip()

    def whole(self, name: str) -> int:
        """Return a field that is a whole number. InvalidArgument if it is not."""
        text = self.form(name)
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise InvalidArgument(f"{name} must be a whole number, not {text[:50]!r}. Nothing was changed.")
        return int(text)

    def form_all(self, name: str) -> list[str]:
        return self.visit.form.get(name, [])

    async def audit(
        self, action: str, target: dict[str, Any], done: dict[str, Any], *, changed: bool | str = True
    ) -> None:
        """Add the audit row, never with args or secrets. Every action calls this once, with the verb's `changed`."""
        self._audited = True
        if changed not in (False, "unchanged"):
            await run(self.conn, audit.add(self.user, "web", action, target, done))

    def go(self, path: str, **query: Any) -> None:
        """Set the page to go to afterwards, instead of the page of the form."""
        self._next = self.url(path, **query)

    def nothing(self) -> None:
        """Declare that nothing was changed, so that no audit row is needed."""
        self._audited = True

    def after(self) -> str:
        """Return the address to go to afterwards, always a page of this dashboard."""
        if self._next is not None:
            return self._next
        back = self.form("back")
        return back if is_inside(back, self.visit.root) else self.url("/")


def is_inside(address: str, root: str) -> bool:
    """Return whether an address from a form is a page of this dashboard."""
    path = unquote(address.partition("?")[0])
    if not address.startswith(f"{root}/") or path.startswith("//") or "\\" in path or not address.isprintable():
        return False
    return not {".", ".."} & set(path.split("/"))


_TOLD = (DataError, QueryCanceled, *IN_THE_WAY, InsufficientPrivilege)
"""Errors of the database that an action shows as a notice on the page of its form."""
Page = Callable[[View], Awaitable[Response]]
Action = Callable[[Act], Awaitable[str]]


class Pages:
    """The pages and actions of one noun; `site.py` collects all of them."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def page(self, path: str, method: str = "GET") -> Callable[[Page], Page]:
        def add(fn: Page) -> Page:
            async def endpoint(request: Request) -> Response:
                return await fn(View(request, request.app.state.site))

            self.routes.append(Route(path, endpoint, methods=[method]))
            return fn

        return add

    def action(self, path: str, *, steps: bool = False) -> Callable[[Action], Action]:
        """Register an action: POST of a form. The function returns the notice for the user.

        It runs in one transaction or, with `steps`, in those that it begins with `act.step()`. An error of Tallybook
        rolls back the current transaction and becomes the notice.
        """

        def add(fn: Action) -> Action:
            async def endpoint(request: Request) -> Response:
                act = Act(request, request.app.state.site)
                try:
                    async with nullcontext() if steps else act.step():
                        said = await fn(act)
                    kind = "done"
                except (TallybookError, *_TOLD) as error:
                    said, kind = act.site.explain(error)[1], "problem"
                act.visit.session["notice"] = (kind, said[:500])
                return RedirectResponse(act.after(), 303)

            self.routes.append(Route(path, endpoint, methods=["POST"]))
            return fn

        return add

    def form(
        self,
        path: str,
        action: str,
        do: Callable[..., Verb[Any]],
        done: str,
        told: tuple[str, ...],
        *,
        target: str | None = None,
        then: str | None = None,
        **fields: Callable[[Act, str], Any],
    ) -> None:
        """Register the action of a form, which calls `do(app, name, who)` with the name and other fields of the form.

        The audit row has `action`, the fields, and the name under `target`, by default the part of `action` before the
        dot. `told` has the notices for a change and for no change; `then` is the page to go to afterwards.
        """

        async def press(act: Act) -> str:
            name, values = act.form("name"), {field: read(act, field) for field, read in fields.items()}
            became = await do(act.app, name, act.user, **values).on(act.conn)
            about = {target or action.partition(".")[0]: name, **values}
            await act.audit(action, about, {done: became}, changed=became)
            if then is not None:
                act.go(then)
            return told[0 if became else 1].format(name, became, **values)

        self.action(path)(press)
