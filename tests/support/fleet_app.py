"""The application of the fleet's worker processes. Its handlers record their runs in the job's own node."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psycopg

from tallybook import App, Constant, Context

TABLES = """
create table if not exists ran (job_id bigint, attempt int, pid int, opened int, node text);
create table if not exists gate (open boolean)"""

app = App("shop")
_opened = 0


@app.lifespan
async def count(ctx: Context) -> AsyncIterator[None]:
    """Count how often the lifespan is opened in this process."""
    global _opened  # noqa: PLW0603
    _opened += 1
    ctx.state.opened = _opened
    yield


@app.task(atomic=True)
async def note(tx: psycopg.AsyncConnection[Any], ctx: Context) -> None:
    """Write a row in the node of the transaction."""
    row = (ctx.job_id, ctx.attempt, os.getpid(), ctx.state.opened, ctx.node)
    await tx.execute("insert into ran values (%s, %s, %s, %s, %s)", row)


@app.task(retry=Constant(timedelta(0)))
async def hold(ctx: Context) -> None:
    """Run until the gate of the job's node is open."""
    async with await psycopg.AsyncConnection.connect(ctx.app.conninfo(), autocommit=True) as conn:
        row = (ctx.job_id, ctx.attempt, os.getpid(), ctx.state.opened, ctx.node)
        await conn.execute("insert into ran values (%s, %s, %s, %s, %s)", row)
        while not await (await conn.execute("select from gate")).fetchall():  # noqa: ASYNC110  the gate is a table
            await asyncio.sleep(0.02)


@app.task
async def relay(ctx: Context) -> None:
    """Enqueue a note by the App."""
    await note.enqueue(ctx.app)


@app.task(process=True, env=("TALLYBOOK_DSN",))
def outside(ctx: Context) -> None:
    """Write a row with the home's name from a child process, by the DSN of its environment."""
    home = next(node.name for node in app.nodes.list().sync() if node.home)
    with psycopg.connect(os.environ["TALLYBOOK_DSN"], autocommit=True) as conn:
        row = (ctx.job_id, ctx.attempt, os.getpid(), 0, f"{ctx.node},{home}")
        conn.execute("insert into ran values (%s, %s, %s, %s, %s)", row)
