"""The crawler: a page is a subject that plans its own next visit; an item is a subject whose args pages update."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx2
import psycopg
from psycopg_pool import AsyncConnectionPool

from tallybook import App, Complete, Context, Exponential, Kill, Reject, Reschedule

app = App("harvester")

LINK = re.compile(r'href="(/page/\d+)"')
ITEM = re.compile(r'data-item="(\d+)" data-cents="(\d+)"')
MAX_AGE = re.compile(r"max-age=(\d+)")
SESSIONS = int(os.environ.get("SESSIONS", "3"))
SEEN = "insert into visit (url, iteration, etag, changed, worker) values (%s, %s, %s, %s, %s)"
PRICED = """\
insert into item (id, cents, url) values (%s, %s, %s)
on conflict (id) do update set cents = excluded.cents, url = excluded.url, checks = item.checks + 1"""


@app.lifespan
async def clients(ctx: Context) -> AsyncIterator[None]:
    """Give each worker one HTTP client that keeps its connections, and a few sessions that its visits share."""
    async with (
        httpx2.AsyncClient(base_url=os.environ["SITE"], timeout=20) as ctx.state.http,
        AsyncConnectionPool(app.conninfo(), min_size=SESSIONS, timeout=60) as ctx.state.pool,
    ):
        # Links that this worker has pushed. It only saves work (a second push does nothing), and grows with the site.
        ctx.state.known = set()
        yield


@app.task(queue="pages", version=2, retry=Exponential(timedelta(seconds=0.25)), timeout="2 min", summary="{url}")
async def visit(ctx: Context, url: str, found_on: str = "", etag: str = "") -> Kill | None:
    """Read a page. In one transaction, push its links and items, note the visit and plan the next one."""
    answer = await ctx.state.http.get(url, headers={"If-None-Match": etag})
    if answer.status_code == 404:
        return Kill("there is no such page any more")  # also with attempts left
    if answer.is_error:  # dead after five in a row, here in 4 s: to survive an outage, start with minutes
        raise Reject(f"status {answer.status_code}", {"found_on": found_on}, ref_id=answer.headers.get("X-Request-Id"))

    assert ctx.subject is not None
    body, seen = answer.text, answer.headers["ETag"]  # 304, not modified, has no body
    links = set(LINK.findall(body)) - ctx.state.known
    pages = [visit.subject(link).job(link, found_on=url) for link in links]
    soon = price.with_(delay="1 hour")  # after the last mention: each one changes the args and moves the time
    items = [soon.subject(f"item:{n}").job(int(n), int(cents), url) for n, cents in ITEM.findall(body)]
    age = max([3600, *map(int, MAX_AGE.findall(answer.headers.get("Cache-Control", "")))])  # max-age=0 would be a loop
    async with ctx.state.pool.connection() as conn:
        await conn.execute(SEEN, (url, ctx.subject.iterations, seen, answer.status_code == 200, ctx.worker))
        await app.subjects.push_many(pages).on(conn)  # known ones are left alone
        await app.subjects.upsert_many(items).on(conn)
        await ctx.end(conn, Reschedule(timedelta(seconds=age), args={"url": url, "found_on": found_on, "etag": seen}))
    ctx.state.known |= links  # after the commit
    return None


@visit.upgrade(1)
def from_1(args: dict[str, Any]) -> dict[str, Any]:
    """Return args of version 2; the previous release passed pages by number."""
    return {"url": f"/page/{args['page']}"}


@app.task(queue="items", atomic=True)
async def price(tx: psycopg.AsyncConnection, item: int, cents: int, url: str) -> Complete:
    """Note the current price of an item. The subject's name is kept: the next page that names it starts it again."""
    await tx.execute(PRICED, (item, cents, url))
    return Complete()
