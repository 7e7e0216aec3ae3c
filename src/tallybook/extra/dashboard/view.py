"""What a page is given: reading, answering, and one way to change something, with its row in the audit."""

from __future__ import annotations

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
from tallybook._db.verb import Verb, run
from tallybook.errors import InvalidArgument, TallybookError
from tallybook.extra.dashboard.asked import job_of
from tallybook.extra.dashboard.database import IN_THE_WAY, READ_TIMEOUT, Conn
from tallybook.extra.dashboard.gate import Visit
from tallybook.extra.dashboard.nodes import At, Said
from tallybook.extra.dashboard.render import address
from tallybook.extra.dashboard.shared import Shared

T = TypeVar("T")


class View:
    def __init__(self, request: Request, site: Shared) -> None:
        self.request = request
        self.site = site
        self.app: App = site.app
        self.visit: Visit = request.scope["tallybook"]
        self.path: dict[str, Any] = request.path_params
        self.node: str | None = None
        """The node that was read; None: all."""
        self.away: list[Said[Any]] = []
        """Nodes that did not answer."""

    @property
    def user(self) -> str:
        return self.visit.user.name if self.visit.user else ""

    @property
    def may_operate(self) -> bool:
        return bool(self.visit.user and self.visit.user.operate)

    async def at(self) -> At:
        """The node that it is about: that of its job, the one in the address, else the home. UnknownNode."""
        job = job_of(self.job)
        nodes = self.site.nodes
        return await nodes.named(self.asked("node")) if job is None else await nodes.of_job(job)

    @property
    def job(self) -> str:
        """The job that it is about, if it is about one."""
        return str(self.path.get("id", ""))

    @asynccontextmanager
    async def read(self, timeout: str = READ_TIMEOUT) -> AsyncIterator[Conn]:
        """A connection to its node that reads, all under one snapshot; it gives up after `timeout`."""
        at = await self.at()
        self.node = at.name
        async with at.database.read(timeout) as conn:
            yield conn

    async def ask(self, question: Callable[[Conn, str], Awaitable[T]]) -> dict[str, T]:
        """What the nodes answer, by name, or the one in the address; the page says which are away.

        QueueUnavailable where none answers.
        """
        found, self.away = await self.site.nodes.answered(question, self.asked("node"))
        return found

    def asked(self, name: str, default: str = "") -> str:
        """A parameter of the query, without blanks around it."""
        return self.request.query_params.get(name, default).strip()

    def asked_all(self, name: str) -> list[str]:
        """All values of a parameter that can be given several times."""
        return [value.strip() for value in self.request.query_params.getlist(name) if value.strip()]

    def url(self, path: str, **query: Any) -> str:
        """The address of a page, below where the dashboard is mounted; None and empty parameters are left out.

        A page of one node, or of a job, leads to pages of this node.
        """
        if not path.startswith("/static/"):
            query.setdefault("node", self.asked("node") or (self.node if self.path.get("id") else None))
        return address(self.visit.root, path, **query)

    def render(self, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        return HTMLResponse(self.text(template, **values), status)

    def text(self, template: str, **values: Any) -> str:
        notice = self.visit.session.pop("notice") if self.visit.session.get("notice") else None
        return self.site.env.get_template(template).render(
            url=self.url, root=self.visit.root, path=self.request.url.path.removeprefix(self.visit.root), user=self.user,
            may_operate=self.may_operate, token=self.visit.session.token, notice=self.visit.notice or notice, site=self.site,
            here=self.here, here_on=self.here_on, node=self.node, away=self.away, only=self.asked("node"), **values,
        )  # fmt: skip

    def here_on(self, node: str) -> str:
        """The address of this page for another node, or for all; from its first page on."""
        given = self.request.query_params
        asked = {
            name: given.getlist(name) for name in given if name not in ("node", "from") and not name.startswith("after")
        }
        return self.url(self.request.url.path.removeprefix(self.visit.root), **{**asked, "node": node})

    @property
    def here(self) -> str:
        query = self.request.url.query
        path = self.request.url.path
        return f"{path}?{query}" if query else path


class Act(View):
    """One request that changes something: in one transaction, which carries its row of the audit."""

    conn: Conn
    """Inside the transaction."""
    _audited = False
    _next: str | None = None

    @asynccontextmanager
    async def step(self, at: At | None = None) -> AsyncIterator[Conn]:
        """One transaction, on its node or this one, which has to put on record what it does."""
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

    def form(self, name: str, default: str = "") -> str:
        """A field of the form, without blanks around it."""
        return (self.visit.form.get(name) or [default])[0].strip()

    def whole(self, name: str) -> int:
        """A field that is a whole number. InvalidArgument for one that is none."""
        text = self.form(name)
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise InvalidArgument(f"{name} is a whole number, not {text[:50]!r}. Nothing was changed.")
        return int(text)

    def form_all(self, name: str) -> list[str]:
        """All values of a field that can be given several times."""
        return self.visit.form.get(name, [])

    async def audit(
        self, action: str, target: dict[str, Any], done: dict[str, Any] | None = None, *, changed: bool | str = True
    ) -> None:
        """Put on record what was meant and what became of it. Never args, never secrets. Every action says it once.

        `changed` is what its function has answered: where that is False, or "unchanged", there is nothing to put on record.
        """
        self._audited = True
        if changed in (False, "unchanged"):
            return
        await run(self.conn, audit.add(self.user, "web", action, target, done or {}))

    def go(self, path: str, **query: Any) -> None:
        """Where to go afterwards, in place of where the form was."""
        self._next = self.url(path, **query)

    def nothing(self) -> None:
        """Say that nothing was changed, so that there is nothing to put on record."""
        self._audited = True

    def after(self) -> str:
        """Where to go on: only to a page of this dashboard."""
        if self._next is not None:
            return self._next
        back = self.form("back")
        return back if is_inside(back, self.visit.root) else self.url("/")


def is_inside(address: str, root: str) -> bool:
    """Whether an address that somebody has sent along is one of a page of this dashboard."""
    path = unquote(address.partition("?")[0])
    if not address.startswith(f"{root}/") or path.startswith("//") or "\\" in path or not address.isprintable():
        return False
    return not {".", ".."} & set(path.split("/"))


_TOLD = (DataError, QueryCanceled, *IN_THE_WAY, InsufficientPrivilege)
"""Errors of the database that somebody who acts is told where the form was."""
Page = Callable[[View], Awaitable[Response]]
Action = Callable[[Act], Awaitable[str]]


class Pages:
    """The pages and actions of one noun; `site.py` puts all of them together."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def page(self, path: str) -> Callable[[Page], Page]:
        """A page that is only read: GET."""

        def add(fn: Page) -> Page:
            async def endpoint(request: Request) -> Response:
                return await fn(View(request, request.app.state.site))

            self.routes.append(Route(path, endpoint, methods=["GET"]))
            return fn

        return add

    def action(self, path: str, *, steps: bool = False) -> Callable[[Action], Action]:
        """What changes something: POST of a form. The function returns what to tell the person; it runs in one
        transaction, or, with `steps`, in those that it begins itself by `act.step()`. An error of ours leaves nothing of the
        transaction that it ended, and is told in the same place.
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

    def button(
        self,
        path: str,
        action: str,
        do: Callable[[App, str, str], Verb[bool]],
        done: str,
        told: tuple[str, str],
        *,
        target: str | None = None,
        then: str | None = None,
    ) -> None:
        """The action of a button that does something to one thing, by the name in its form: `do(app, name, who)`.

        In the audit it is `action`, of the thing as `target`, what stands before the dot unless it is said. `told` is what
        the person reads, where it was done and where there was nothing to do; `then` is where to go on.
        """

        async def press(act: Act) -> str:
            name = act.form("name")
            changed = await do(act.app, name, act.user).on(act.conn)
            target_ = {target or action.partition(".")[0]: name}
            await act.audit(action, target_, {done: changed}, changed=changed)
            if then is not None:
                act.go(then)
            return told[0 if changed else 1].format(name)

        self.action(path)(press)
