"""An agent: the client of the MCP SDK, which starts `tallybook mcp` and connects over stdio."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp import Client, StdioServerParameters

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
async def agent(dsn: str, *words: str, allow: tuple[str, ...] = (), mode: str = "auto") -> AsyncIterator[Agent]:
    """Connect an agent to this database for the block; `mode` is the client's way to initialize the session."""
    allowed = [word for verb in allow for word in ("--allow", verb)]
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "tallybook", "mcp", "--by", "helper@shop", *allowed, *words],
        env={"TALLYBOOK_DSN": dsn},
    )
    async with Client(command, mode=mode) as client:
        yield Agent(client)
