"""The server: the handling of one call.

A reading is a read-only transaction. The preview of a verb makes the change and rolls it back, so it shows the real
outcome. The confirmation makes the change again, compares the outcomes, and commits together with the audit row.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from secrets import token_hex
from typing import Any

from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams, TextContent

from tallybook import __version__
from tallybook._app import App
from tallybook._model.durations import format_duration
from tallybook.errors import CommitUnknown, QueueUnavailable
from tallybook.extra.dashboard.database import Database
from tallybook.extra.dashboard.redact import bounded, redact, shown
from tallybook.extra.mcp.preview import AGAIN, Previews, carried_out
from tallybook.extra.mcp.tools import HOSTILE, OPERATION, VERBS, checked, given, listed
from tallybook.extra.operator.fields import read
from tallybook.extra.operator.keys import Key
from tallybook.extra.operator.operations import Ask, Operation
from tallybook.extra.operator.problems import Problem, problem_of

MOST = 40_000
"""The maximum length of an answer in characters."""
_ABOUT = (
    "Tallybook is a queue of background jobs in PostgreSQL. "
    "For a job that does not run, ask why; for its past, trace; for the whole database, doctor."
)


class Tools:
    """The tools of one agent."""

    def __init__(self, app: App, *, by: str, allow: Collection[str] = (), lifetime: timedelta) -> None:
        """`by` is the agent's name in the audit. ConfigError if it is not valid, or for an unknown verb."""
        self._app = app
        self._allowed = checked(allow)
        self._key = Key(by, token_hex(32), ("admin",))  # never used to sign: it carries the name and the rights
        self._lifetime = lifetime
        self._previews = Previews(lifetime)
        self._database = Database(app, max_size=2)

    async def serve(self) -> None:
        """Serve the client on stdin and stdout until it disconnects."""
        server: Server[Any] = Server(
            "tallybook", version=__version__, instructions=f"{_ABOUT} {HOSTILE}",
            on_list_tools=self._list, on_call_tool=self._call,
        )  # fmt: skip
        try:
            async with stdio_server() as (from_client, to_client):
                await server.run(from_client, to_client, server.create_initialization_options())
        finally:
            await self._database.close()

    async def _list(self, _: ServerRequestContext[Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=listed(self._allowed))

    async def _call(self, _: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        try:
            answer = await self._answer(params.name, dict(params.arguments or {}))
            return _said(shown(bounded(redact(answer)), MOST, indent=None))
        except Exception as error:
            problem = problem_of(error)
            hint = f" {problem.hint}." if problem.hint else ""
            return _said(f"{problem.code}: {problem.detail[:2000]}.{hint}", is_error=True)

    async def _answer(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        operation = OPERATION.get(name)
        if operation is None:
            raise Problem("unknown", "there is no such tool")
        if name in VERBS and name not in self._allowed:
            raise Problem("scope", f"{name} is not allowed here", hint=f"Its owner can allow it with --allow {name}")
        token = arguments.pop("confirm", None) if name in VERBS else None
        ask = Ask(self._app, self._key, read(given(operation), arguments))
        if operation.reads is not None:
            async with self._database.read() as conn:
                return await operation.reads(ask, conn)
        if token is None:
            return await self._preview(operation, ask, arguments)
        return await self._confirm(operation, ask, arguments, token)

    async def _preview(self, operation: Operation, ask: Ask, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self._database.act(operation.name) as conn, conn.transaction(force_rollback=True):
                outcome, changed = await carried_out(operation, ask, conn)
        except CommitUnknown as error:  # everything was rolled back
            raise QueueUnavailable(error.server or "", "the connection was lost") from error
        found = {"would": outcome.would, "now": outcome.now}
        if changed.action is None:
            return {"preview": "nothing would change", **found}
        token = self._previews.add(operation.name, arguments, outcome)
        within = format_duration(self._lifetime)
        return {"preview": "nothing was changed yet", "confirm": token, "within": within, **found}

    async def _confirm(
        self, operation: Operation, ask: Ask, arguments: dict[str, Any], token: object
    ) -> dict[str, Any]:
        previewed = self._previews.take(token, operation.name, arguments)
        async with self._database.act(operation.name) as conn:
            outcome, changed = await carried_out(operation, ask, conn)
            if outcome != previewed:
                reason = "the outcome has changed since the preview, and nothing was done"
                raise Problem("conflict", reason, hint=AGAIN)
        return {"done": changed.answer}


def _said(text: str, *, is_error: bool = False) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)
