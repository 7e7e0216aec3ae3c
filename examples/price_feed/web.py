"""The pages: a person's holdings, the stopped assets, and the dashboard of the queue."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, LiteralString
from urllib.parse import urlsplit

import psycopg
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.security import HTTPBasic
from fastapi.templating import Jinja2Templates
from psycopg.rows import dict_row

from examples.price_feed.jobs import app, fetch_now
from examples.price_feed.money import shown
from tallybook.contrib.fastapi import in_transaction, lifespan
from tallybook.errors import InvalidArgument, UnknownJob
from tallybook.web import User, dashboard

basic = HTTPBasic(auto_error=False)
pages = Jinja2Templates(Path(__file__).parent / "templates")
pages.env.filters["money"] = shown
Transaction = Annotated[psycopg.AsyncConnection[Any], in_transaction()]
api = FastAPI(title="Holdings", lifespan=lifespan(app))

HOLDINGS = """\
select a.*, h.units from holding h join asset_now a on a.id = h.asset
 where h.owner = %s and h.active order by a.data_type, a.symbol"""
VIEWED = """\
update asset set viewed_at = now()
 where id in (select id from asset where id = any(%s) for no key update skip locked)"""
STOPPED = """\
select distinct on (a.id) a.symbol, e.at, e.body
  from asset a join event e on (e.body ->> 'assetId')::bigint = a.id where a.stopped order by a.id, e.at desc"""


@api.get("/holdings/{owner}", response_class=HTMLResponse)
async def holdings(request: Request, conn: Transaction, owner: str) -> Any:
    """Show the known prices at once and enqueue missing or stale ones, which show when the page is loaded again."""
    found = await rows(conn, HOLDINGS, owner)
    if not found:
        raise HTTPException(404, "no holdings of this owner")
    wanted = [one for one in found if one["fetched"] and one["stale"]]
    await app.enqueue_many(conn, [fetch_now(one) for one in wanted])
    await conn.execute(VIEWED, ([one["id"] for one in found],))  # skips rows that another viewer is updating
    totals: Counter[tuple[str, int]] = Counter()
    for one in found:
        totals[one["currency"], one["decimals"]] += (one["amount"] or 0) * one["units"]
    return pages.TemplateResponse(request, "holdings.html", {"owner": owner, "holdings": found, "totals": totals})


async def rows(conn: psycopg.AsyncConnection[Any], query: LiteralString, *values: object) -> list[dict[str, Any]]:
    return await (await conn.cursor(row_factory=dict_row).execute(query, values)).fetchall()


async def who(request: Request) -> User | None:
    """Return the user of the stopped page and the dashboard. This uses HTTP Basic; use your own login here."""
    given = await basic(request)
    if given and secrets.compare_digest(given.password.encode(), os.environ["ADMIN_PASSWORD"].encode()):
        return User(given.username or "admin", operate=True)
    return None


async def admin(request: Request) -> None:
    """Require such a user, and reject forms from another site."""
    if await who(request) is None:
        raise HTTPException(401, headers={"WWW-Authenticate": "Basic"})
    origin = request.headers.get("origin")
    if request.method != "GET" and origin and urlsplit(origin).netloc != request.headers["host"]:
        raise HTTPException(403, "this was sent from another site")


@api.get("/stopped", response_class=HTMLResponse, dependencies=[Depends(admin)])
async def stopped(request: Request, conn: Transaction) -> Any:
    """Show the assets whose price could not be fetched, with the error."""
    return pages.TemplateResponse(request, "stopped.html", {"stopped": await rows(conn, STOPPED)})


@api.post("/stopped/{job}/retry", dependencies=[Depends(admin)])
async def retry(conn: Transaction, job: int) -> RedirectResponse:
    """Retry a dead job at once, with the provider of the current route."""
    try:
        await app.retry(job).on(conn)
    except UnknownJob as error:
        raise HTTPException(404, str(error)) from error
    except InvalidArgument as error:  # another user was faster
        raise HTTPException(409, str(error)) from error
    return RedirectResponse("/stopped", 303)


api.mount("/queue", dashboard(app, authenticate=who))
