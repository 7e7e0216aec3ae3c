"""The tasks, which fetch a price and notify the admin of a failure; the schedule that selects prices every minute."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx2
import psycopg
from psycopg.types.json import Jsonb
from psycopg_pool import AsyncConnectionPool

from examples.price_feed.collectors import ask
from examples.price_feed.money import PriceRefused, minor_units
from tallybook import App, Cancel, Constant, Context, JobCall
from tallybook.extra.tasks import email

app = App("prices")
app.include(email)

ADMIN = os.environ.get("ADMIN_EMAIL", "admin@example.org")
Json = dict[str, Any]
TIMEOUT = float(os.environ.get("PROVIDER_TIMEOUT", "10"))


@app.lifespan
async def clients(ctx: Context) -> AsyncIterator[None]:
    """Give each worker an HTTP client and a few connections. It does not start without the keys of the secrets."""
    await ctx.app.providers.load()
    unprepared = {"prepare_threshold": None}  # a pooler may be in between
    connections = AsyncConnectionPool(ctx.app.conninfo(), min_size=1, max_size=4, open=False, kwargs=unprepared)
    async with httpx2.AsyncClient(timeout=TIMEOUT) as ctx.state.http, connections as ctx.state.connections:
        yield


@app.task(atomic=True, queue="mail")
async def price_fetch_failed(
    conn: psycopg.AsyncConnection[Any], ctx: Context, job: int, task: str, args: Json, failures: int, error: Json
) -> None:
    """Store the event PRICE_FETCH_FAILED, stop the asset and mail the admin, in one transaction."""
    said = {"assetId": args["asset_id"], "symbol": args["symbol"], "retries": failures, "error": error["message"]}
    happened = "insert into event (job_id, name, body) values (%s, 'PRICE_FETCH_FAILED', %s)"
    await conn.execute(happened, (ctx.job_id, Jsonb({**said, "job": job})))
    await conn.execute("update asset set stopped = true where id = %s", (args["asset_id"],))
    subject = f"No price of {args['symbol']} after {failures} attempts"
    text = f"{error['type']}: {error['message']}\n\nTo retry it, go to /stopped."
    await email.with_(queue="mail").enqueue(conn, "mail", ADMIN, subject, text, headers={"X-Event": str(ctx.job_id)})


@app.task(
    queue="prices", max_attempts=3, retry=Constant(timedelta(seconds=30)),
    timeout="1 min",  # the HTTP client limits each read
    on_dead=price_fetch_failed, summary="Price of {symbol}",
)  # fmt: skip
async def fetch_price(
    ctx: Context, asset_id: int, symbol: str, data_type: str, currency: str, decimals: int
) -> Cancel | None:
    """Fetch the price from the provider of the current route, within its limit.

    One transaction stores the price and completes the job.
    """
    provider = await ctx.providers.resolve(data_type, symbol)
    if provider is None:
        return Cancel(f"no active route for {data_type} {symbol}")
    # If its turn is not near, or after a 429, this attempt ends here without a failure, and another one runs in time.
    async with ctx.provider(provider):
        found = await ask(ctx.state.http, provider, symbol)
    if found.currency != currency:
        raise PriceRefused(f"{provider.name} answered in {found.currency}, not in {currency}")
    amount = minor_units(found.price, decimals)
    async with ctx.state.connections.connection() as conn:
        price = "insert into price (job_id, asset, amount, provider) values (%s, %s, %s, %s)"
        await conn.execute(price, (ctx.job_id, asset_id, amount, provider.name))
        await conn.execute("update asset set stopped = false where id = %s and stopped", (asset_id,))
        await ctx.complete(conn)
    return None


def fetch_now(asset: dict[str, Any]) -> JobCall:
    """Describe the job that a person waits for. If the schedule has enqueued it already, its priority is raised."""
    now = fetch_price.with_(priority=1, unique=f"price:{asset['id']}", on_conflict="raise_priority")
    return now.job(asset["id"], asset["symbol"], asset["data_type"], asset["currency"], asset["decimals"])


# Every minute: assets without a price, and assets viewed within 48 hours without a price of the last 24.
app.schedule(
    "wanted-prices",
    fetch_price,
    cron="* * * * *",
    query="""
      select 'price:' || a.id as key, jsonb_build_object('asset_id', a.id, 'symbol', a.symbol, 'data_type', a.data_type,
               'currency', a.currency, 'decimals', a.decimals) as args
        from public.asset_now a
       where a.fetched and a.stale and (a.priced_at is null or a.viewed_at > now() - interval '48 h')
         and exists (select from public.holding h where h.asset = a.id and h.active)
       order by a.viewed_at desc nulls last, a.id""",
)
