"""What all pages of one dashboard share: its App, its database, who may see it, and words for errors."""

from __future__ import annotations

from functools import partial
from typing import Any

from tallybook import errors
from tallybook._app import App
from tallybook._db.driver import DataError, InsufficientPrivilege, QueryCanceled
from tallybook._db.nodes import node_of
from tallybook.extra.dashboard.access import Access
from tallybook.extra.dashboard.database import IN_THE_WAY
from tallybook.extra.dashboard.live import Live
from tallybook.extra.dashboard.nodes import Nodes
from tallybook.extra.dashboard.readings import Readings
from tallybook.extra.dashboard.render import address, environment
from tallybook.extra.dashboard.session import Sessions
from tallybook.extra.dashboard.users import User

_STATUS: dict[type[Exception], int] = {
    errors.UnknownJob: 404, errors.UnknownQueue: 404, errors.UnknownSchedule: 404, errors.UnknownTask: 404,
    errors.UnknownProvider: 404, errors.InvalidArgument: 400, errors.KeyTaken: 409, errors.QueueUnavailable: 503,
    errors.CommitUnknown: 503, errors.SchemaError: 503, errors.UnknownNode: 404,
}  # fmt: skip

_IN_DOUBT = "The connection was lost at the commit: the change was made, or it was not. Check before you repeat it."


class Shared:
    """The base of Site: what a page may ask of it."""

    def __init__(self, app: App, access: Access, nodes: Nodes, *, secret: str | None) -> None:
        self.app = app
        self.access = access
        self.nodes = nodes
        self.live = Live(nodes)
        self.sessions = Sessions(secret)
        self.overview = Readings(nodes)
        """What the overview keeps from one reading to the next."""
        self.env = environment()
        self.root = ""
        """Where the dashboard is mounted, as the first request said: for what is written once for all viewers."""

    def fragment(self, template: str, only: str = "", **values: Any) -> str:
        """A piece of a page that all viewers get, or all of one node: without anything that is only for one of them."""
        url = partial(address, self.root, **({"node": only} if only else {}))
        return self.env.get_template(template).render(url=url, site=self, **values)

    def node_name(self, job: int) -> str:
        """The node of a job, for people; nothing where there is one database."""
        if not self.nodes.many:
            return ""
        number = node_of(job)
        return next((at.name for at in self.nodes.read if at.node.number == number), f"node {number}")

    def why_read_only(self, user: User | None) -> str:
        """Why somebody who looks cannot act."""
        if self.access.read_only:
            return "This dashboard is read-only. Start it with --operate, or with read_only=False, to change things from here."
        return f"{user.name if user else 'You'} may look, but not change anything."

    def explain(self, error: Exception) -> tuple[int, str, str | None]:
        """From an exception to a status, a sentence and a hint; never a text that was not meant for people."""
        if isinstance(error, QueryCanceled):
            why = "The database did not answer in time, so this was given up."
            return 504, why, "Use more filters, or try again."
        if isinstance(error, IN_THE_WAY):
            return 503, "Somebody else holds what this needs. Nothing was changed.", "Try again."
        if isinstance(error, DataError) and error.sqlstate:  # without one it is we who cannot read an answer
            return 400, "The database cannot take one of these values.", None
        if isinstance(error, InsufficientPrivilege):
            why = "The database does not let this dashboard do that."
            hint = "Its login needs the operator's role: https://github.com/tallybook/tallybook/blob/main/docs/roles.md"
            return 403, why, hint
        if isinstance(error, errors.TallybookError):
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
            return status, _IN_DOUBT if isinstance(error, errors.CommitUnknown) else str(error), None
        return 500, "Something went wrong in the dashboard. Its log says what.", None
