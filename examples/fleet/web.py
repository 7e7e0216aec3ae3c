"""The page: the job counts of each node, read in parallel. A node that does not answer is shown as such."""

from __future__ import annotations

import asyncio
from html import escape

import psycopg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from examples.fleet.jobs import app
from tallybook import Node

COUNTS = """\
select sum(scheduled + retrying + waiting + available), sum(running), sum(completed), sum(dead)
  from tallybook.counts()"""
PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="1"><title>The fleet</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root {{ color-scheme: light dark; font: 16px/1.6 system-ui }}
body {{ max-width: 44rem; margin: 2rem auto; padding: 0 .5rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: right; padding: .2rem .3rem; border-top: 1px solid #8884 }}
td:first-child, th:first-child {{ text-align: left }} .down td {{ color: #c33; text-align: left }}</style>
<h1>The fleet</h1><table><tr><th>Node<th>Waiting<th>Running<th>Completed<th>Dead</tr>{rows}</table></html>"""


async def row(node: Node) -> str:
    """Return the table row of a node, which has two seconds to answer."""
    name = f"<td>{escape(node.name)}"
    try:
        async with asyncio.timeout(2), await psycopg.AsyncConnection.connect(node.dsn) as conn:
            figures = await (await conn.execute(COUNTS)).fetchone() or ()
    except (psycopg.Error, TimeoutError):
        return f"<tr class='down'>{name}<td colspan='4'>does not answer</tr>"
    return f"<tr>{name}{''.join(f'<td>{figure or 0}' for figure in figures)}</tr>"


async def fleet(request: Request) -> HTMLResponse:
    """Return the page of all nodes."""
    rows = await asyncio.gather(*map(row, await app.nodes.list()))
    return HTMLResponse(PAGE.format(rows="".join(rows)))


web = Starlette(routes=[Route("/", fleet)])
