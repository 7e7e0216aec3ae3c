"""What all pages share: the parts of a dashboard, and the request of a page, which reads, renders and changes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tallybook import errors
from tallybook._app import App
from tallybook._app.history import audit_add
from tallybook._db.driver import DataError, InsufficientPrivilege, QueryCanceled
from tallybook._db.nodes import Answer, node_of
from tallybook._db.verb import Verb, run
from tallybook.extra.dashboard.access import Access, Sessions, Visit
from tallybook.extra.dashboard.database import IN_THE_WAY, Conn
from tallybook.extra.dashboard.live import Live
from tallybook.extra.dashboard.metrics import Readings
from tallybook.extra.dashboard.nodes import At, Nodes, Question
from tallybook.extra.dashboard.texts import address, environment, id_of
from tallybook.extra.dashboard.users import User

T = TypeVar("T")
_STATUS: dict[type[Exception], int] = {
    errors.UnknownJob: 404, errors.UnknownQueue: 404, errors.UnknownSchedule: 404, errors.UnknownTask: 404,
    errors.UnknownProvider: 404, errors.InvalidArgument: 400, errors.KeyTaken: 409, errors.QueueUnavailable: 503,
    errors.CommitUnknown: 503, errors.SchemaError: 503, errors.UnknownNode: 404,
}  # fmt: skip
_AT_ONCE = 2  # passwords that are checked at the same time, at 0.1 s and 32 MB each
_IN_DOUBT = "The connection was lost at the commit: the change may have been made. Check before you repeat it."


class Shared:
    """The base of Site: the part that pages use."""

    def __init__(self, app: App, access: Access, nodes: Nodes, *, secret: str | None) -> None:
        self.app, self.access, self.nodes = app, access, nodes
        self.live = Live(nodes)
        self.sessions = Sessions(secret)
        self.overview = Readings(nodes)
        self.env = environment()
        # The turns of the checks of passwords, and the number of logins that have one or wait.
        self.turns, self.waiting = asyncio.Semaphore(_AT_ONCE), 0
        self.root = ""  # where the dashboard is mounted, known from a request; fragments for all viewers use it

    def fragment(self, template: str, only: str = "", **values: Any) -> str:
        """Render a part of a page for all viewers, or for all viewers of a node, without values of a single viewer."""
        url = partial(address, self.root, **({"node": only} if only else {}))
        return self.env.get_template(template).render(url=url, site=self, **values)

    def node_name(self, job: int) -> str:
        """Return the name of a job's node for display; an empty text if there is one database."""
        if not self.nodes.many:
            return ""
        number = node_of(job)
        return next((at.name for at in self.nodes.read if at.node.number == number), f"node {number}")

    def why_read_only(self, user: User | None) -> str:
        if self.access.read_only:
            advice = "Start it with --operate, or with read_only=False, to change things from here."
            return f"This dashboard is read-only. {advice}"
        return f"{user.name if user else 'You'} may view the dashboard, but not change anything."

    def explain(self, error: Exception) -> tuple[int, str, str | None]:
        """Return the status, message and hint for an exception; never an internal text."""
        if isinstance(error, QueryCanceled):
            return 504, "The database did not answer in time.", "Use more filters, or try again."
        if isinstance(error, IN_THE_WAY):
            return 503, "Another transaction holds a lock that this needs. Nothing was changed.", "Try again."
        if isinstance(error, DataError) and error.sqlstate:  # without one, the driver could not read an answer
            return 400, "The database cannot store one of these values.", None
        if isinstance(error, InsufficientPrivilege):
            why = "The database login of this dashboard lacks the right to do that."
            hint = "Its login needs the operator's role: https://github.com/tallybook/tallybook/blob/main/docs/roles.md"
            return 403, why, hint
        if isinstance(error, errors.TallybookError):
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
            return status, _IN_DOUBT if isinstance(error, errors.CommitUnknown) else str(error), None
        return 500, "Something went wrong in the dashboard. See its log.", None


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
        job = id_of(self.form("job") or str(self.path.get("id", "")))
        nodes = self.site.nodes
        return await nodes.named(self.asked("node")) if job is None else await nodes.of_job(job)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Conn]:
        """Yield a read-only connection to the node, with one snapshot and a statement timeout."""
        at = await self.at()
        self.node = at.name
        async with at.database.read() as conn:
            yield conn

    async def ask(self, question: Question[T]) -> dict[str, T]:
        """Return the answers by name of node, or that of the node in the address. QueueUnavailable if none answers."""
        found, self.away = await self.site.nodes.answered(question, self.asked("node"))
        return found

    def asked(self, name: str, default: str = "") -> str:
        """Return a parameter of the query, stripped."""
        return self.request.query_params.get(name, default).strip()

    def form(self, name: str) -> str:
        """Return a field of the form, stripped; it is empty if the request has none."""
        return (self.visit.form.get(name) or [""])[0].strip()

    def asked_all(self, name: str) -> list[str]:
        return [value.strip() for value in self.request.query_params.getlist(name) if value.strip()]

    def url(self, path: str, /, **query: Any) -> str:
        """Return the address of a page of the dashboard, with the node of this page; empty parameters are omitted."""
        if not path.startswith("/static/"):
            query.setdefault("node", self.asked("node") or (self.node if self.path.get("id") else None))
        return address(self.visit.root, path, **query)

    def render(self, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        """Return a page. One with a `problem` of the values in the address has status 400."""
        text = self.site.env.get_template(template).render(
            url=self.url, root=self.visit.root, path=self.request.url.path.removeprefix(self.visit.root),
            user=self.user, may_operate=self.may_operate, token=self.visit.session.token,
            notice=self.visit.session.pop("notice", None), site=self.site, here=self.here, here_on=self.here_on,
            node=self.node, away=self.away, only=self.asked("node"), **values,
        )  # fmt: skip
        return HTMLResponse(text, 400 if status == 200 and values.get("problem") else status)

    def refused(self, status: int, why: str) -> HTMLResponse:
        return self.render("error.html", status=status, title="Not this way", message=why, hint=None)

    def here_on(self, node: str) -> str:
        """Return the address of this page for another node, or for all, from its first page on."""
        given = self.request.query_params
        kept = [name for name in given if name not in ("node", "from") and not name.startswith("after")]
        asked: dict[str, Any] = {name: given.getlist(name) for name in kept}
        return self.url(self.request.url.path.removeprefix(self.visit.root), **asked, node=node)

    @property
    def here(self) -> str:
        url = self.request.url
        return f"{url.path}?{url.query}" if url.query else url.path


class Act(View):
    """A request that changes something, in one transaction with its audit row."""

    conn: Conn  # in the transaction
    _audited = False
    then: str | None = None  # the page to go to afterwards, instead of the page of the form

    @asynccontextmanager
    async def step(self, at: At | None = None) -> AsyncIterator[Conn]:
        """Run one transaction, on the node of the request or on `at`. The block must call `audit`."""
        at = at or await self.at()
        self.node = at.name
        async with at.database.act(self.request.url.path.removeprefix(self.visit.root)) as conn:
            self.conn, self._audited = conn, False
            yield conn
            if not self._audited:
                raise RuntimeError(f"{self.request.url.path} changed something without a word to the audit")

    def whole(self, name: str) -> int:
        """Return a field that is a whole number. InvalidArgument if it is not."""
        text = self.form(name)
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise errors.InvalidArgument(f"{name} must be a whole number, not {text[:50]!r}. Nothing was changed.")
        return int(text)

    def form_all(self, name: str) -> list[str]:
        return self.visit.form.get(name, [])

    async def audit(
        self, action: str, target: dict[str, Any], done: dict[str, Any], *, changed: bool | str = True
    ) -> None:
        """Add the audit row, never with args or secrets, unless nothing was changed. Every action calls this once."""
        self._audited = True
        if changed not in (False, "unchanged"):
            await run(self.conn, audit_add(self.user, "web", action, target, done))

    def after(self) -> str:
        """Return the address to go to afterwards, always a page of this dashboard."""
        if self.then is not None:
            return self.url(self.then)
        back = self.form("back")
        return back if is_inside(back, self.visit.root) else self.url("/")


def is_inside(address: str, root: str) -> bool:
    """Return whether an address from a form is a page of this dashboard."""
    path = unquote(address.partition("?")[0])
    if not address.startswith(f"{root}/") or path.startswith("//") or "\\" in path or not address.isprintable():
        return False
    return not {".", ".."} & set(path.split("/"))


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

        It runs in one transaction or, with `steps`, in those that it begins with `act.step()`. An error that a user can
        understand rolls back the current transaction and becomes the notice.
        """

        def add(fn: Action) -> Action:
            async def endpoint(request: Request) -> Response:
                act = Act(request, request.app.state.site)
                try:
                    async with nullcontext() if steps else act.step():
                        said = await fn(act)
                    kind = "done"
                except (errors.TallybookError, DataError, QueryCanceled, *IN_THE_WAY, InsufficientPrivilege) as error:
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
            now = became.isoformat() if isinstance(became, datetime) else became
            await act.audit(action, about, {done: now}, changed=now)
            act.then = then
            return told[0 if became else 1].format(name, became, **values)

        self.action(path)(press)
