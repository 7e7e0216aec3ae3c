"""The parts that all pages of a dashboard share: its App, its databases, its access check and the texts of errors."""

import asyncio
from functools import partial
from typing import Any

from tallybook import errors
from tallybook._app import App
from tallybook._db.driver import DataError, InsufficientPrivilege, QueryCanceled
from tallybook._db.nodes import node_of
from tallybook.extra.dashboard.access import Access, Sessions
from tallybook.extra.dashboard.database import IN_THE_WAY
from tallybook.extra.dashboard.live import Live
from tallybook.extra.dashboard.nodes import Nodes
from tallybook.extra.dashboard.readings import Readings
from tallybook.extra.dashboard.render import address, environment
from tallybook.extra.dashboard.users import User

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
