"""An agent: the client of the MCP SDK, connected to a server in this process or to `tallybook mcp` over stdio."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from mcp import Client, StdioServerParameters

from tallybook import App
from tallybook.extra.mcp.server import Tools
from tallybook.extra.operator.routes import OPERATIONS

VERBS = tuple(one.name for one in OPERATIONS if one.changes is not None)


class Agent:
    """A connected client."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def said(self, tool: str, **arguments: Any) -> tuple[bool, str]:
        """Call a tool; return whether it was refused, and the text of the answer."""
        answer = await self.client.call_tool(tool, arguments)
        (text,) = answer.content
        assert text.type == "text"
        return answer.is_error, text.text

    async def call(self, tool: str, **arguments: Any) -> Any:
        """Call a tool, which must not refuse; return the document of the answer."""
        refused, text = await self.said(tool, **arguments)
        assert not refused, text
        return json.loads(text)

    async def refused(self, tool: str, **arguments: Any) -> str:
        """Call a tool, which must refuse; return the text of the refusal."""
        refused, text = await self.said(tool, **arguments)
        assert refused, text
        return text


@asynccontextmanager
async def agent(dsn: str, *, allow: tuple[str, ...] = ()) -> AsyncIterator[Agent]:
    """Connect an agent to a server of this database in this process."""
    tools = Tools(App("shop", dsn=dsn), by="helper@shop", allow=allow, lifetime=timedelta(minutes=10))
    try:
        async with Client(tools.server()) as client:
            yield Agent(client)
    finally:
        await tools.close()


@asynccontextmanager
async def agent_of_process(dsn: str, *words: str, mode: str = "auto") -> AsyncIterator[Agent]:
    """Connect an agent to a process `tallybook mcp` over stdio; `mode` is the client's way to start the session."""
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "tallybook", "mcp", "--by", "helper@shop", *words],
        env={"TALLYBOOK_DSN": dsn},
    )
    async with Client(command, mode=mode) as client:
        yield Agent(client)
