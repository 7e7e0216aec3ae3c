"""The server: the handling of one call.

A reading is a read-only transaction. The preview of a verb makes the change and rolls it back, so it shows the real
outcome. The confirmation makes the change again, compares the outcomes, and commits together with the audit row. Its
token is valid once, for a limited time, for the same call.
"""

import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from hashlib import sha256
from secrets import token_hex, token_urlsafe
from typing import Any

from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams, TextContent

from tallybook import __version__
from tallybook._app import App
from tallybook._model.durations import format_duration
from tallybook.extra.dashboard.database import Conn, Database
from tallybook.extra.dashboard.redact import bounded, redact, shown
from tallybook.extra.mcp.tools import HOSTILE, OPERATION, VERBS, checked, given, listed
from tallybook.extra.operator.fields import read
from tallybook.extra.operator.keys import Key
from tallybook.extra.operator.operations import Ask, Changed, Operation
from tallybook.extra.operator.problems import Problem, problem_of

MOST = 40_000
"""The maximum length of an answer in characters."""
_MOST_PREVIEWS = 100
"""Previews that are stored; the oldest is dropped first."""
_SEEN = ("queue", "task", "state", "priority", "attempt", "failures", "crashes", "run_at")
_AGAIN = "Call it again without confirm for a new preview"
_ABOUT = (
    "Tallybook is a queue of background jobs in PostgreSQL. "
    "For a job that does not run, ask why; for its past, trace; for the whole database, doctor."
)


Outcome = dict[str, Any]
"""What a change would do, and its object as it is now."""


class Previews:
    """The previews that can be confirmed."""

    def __init__(self, lifetime: timedelta) -> None:
        self._lifetime = lifetime.total_seconds()
        self._by_token: dict[str, tuple[tuple[str, Mapping[str, Any]], Outcome, float]] = {}

    def add(self, verb: str, arguments: Mapping[str, Any], outcome: Outcome) -> str:
        while len(self._by_token) >= _MOST_PREVIEWS:
            del self._by_token[next(iter(self._by_token))]
        token = token_urlsafe(18)
        self._by_token[token] = (verb, arguments), outcome, time.monotonic() + self._lifetime
        return token

    def take(self, token: object, verb: str, arguments: Mapping[str, Any]) -> Outcome:
        """Use up a token and return its preview. A Problem unless the token is valid for this call."""
        found = self._by_token.pop(token, None) if isinstance(token, str) else None
        if found is None:
            raise Problem("conflict", "there is no such preview, or it was confirmed before", hint=_AGAIN)
        call, outcome, until = found
        if time.monotonic() >= until:
            raise Problem("conflict", "the preview has expired, and nothing was done", hint=_AGAIN)
        if call != (verb, arguments):
            raise Problem("conflict", "the preview was of another call, and nothing was done", hint=_AGAIN)
        return outcome


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

    def server(self) -> Server[Any]:
        """Make a server with these tools, not connected to a client yet."""
        return Server(
            "tallybook", version=__version__, instructions=f"{_ABOUT} {HOSTILE}",
            on_list_tools=self._list, on_call_tool=self._call,
        )  # fmt: skip

    async def serve(self) -> None:
        """Serve the client on stdin and stdout until it disconnects."""
        server = self.server()
        try:
            async with stdio_server() as (from_client, to_client):
                await server.run(from_client, to_client, server.create_initialization_options())
        finally:
            await self.close()

    async def close(self) -> None:
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
            async with self._database.act(None) as conn, conn.transaction(force_rollback=True):
                outcome, changed = await _carried_out(operation, ask, conn)
            if changed.action is None:
                return {"preview": "nothing would change", **outcome}
            token, within = self._previews.add(operation.name, arguments, outcome), format_duration(self._lifetime)
            return {"preview": "nothing was changed yet", "confirm": token, "within": within, **outcome}
        previewed = self._previews.take(token, operation.name, arguments)
        async with self._database.act(operation.name) as conn:
            outcome, changed = await _carried_out(operation, ask, conn)
            if outcome != previewed:
                reason = "the outcome has changed since the preview, and nothing was done"
                raise Problem("conflict", reason, hint=_AGAIN)
        return {"done": changed.answer}


def _said(text: str, *, is_error: bool = False) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)


async def _carried_out(operation: Operation, ask: Ask, conn: Conn) -> tuple[Outcome, Changed]:
    """Make the change in the caller's transaction and return its outcome. A preview rolls it back."""
    now = {}
    if operation.path.startswith("/jobs/"):
        reads = OPERATION["get_job"].reads
        assert reads is not None
        found = await reads(ask, conn)
        now = {name: found[name] for name in _SEEN}
    changed = await operation.change(ask, conn, "mcp")
    if operation.path.startswith("/dead-letters/"):  # all of them as a hash, and the oldest
        every = sha256(repr(changed.letters).encode()).hexdigest()
        now = {"matched": len(changed.letters), "oldest": changed.letters[:20], "sha256": every}
    # A new job gets another id each time.
    would = {name: value for name, value in changed.answer.items() if name != "job" or "job" in ask.values}
    return {"would": would, "now": now}, changed
