"""All tasks, scheduled and requested by people, and one table of the schedules."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, LiteralString
from zoneinfo import ZoneInfo

import httpx2
import psycopg
from psycopg_pool import AsyncConnectionPool

from tallybook import App, Cancel, Context, Exponential

app = App("portfolio")
app.retry_policy("standard", Exponential(timedelta(seconds=10), cap=timedelta(minutes=10)))

PATIENCE = timedelta(seconds=2)  # for one answer from outside
ZONES = {"tokyo": "Asia/Tokyo", "frankfurt": "Europe/Berlin", "newyork": "America/New_York"}
NOT_VALUED = """\
select p.id from portfolio p where p.market = %s and exists (select from holding h where h.portfolio = p.id)
   and not exists (select from valuation v where v.portfolio = p.id and v.day = %s) order by p.id"""
STATED = "select owner, amount from valued where portfolio = %s and day = %s"
QUOTED = """\
update instrument i set quote = said.price::numeric, quoted_at = now()
  from jsonb_each_text(%s) said (symbol, price) where i.symbol = said.symbol"""
RATED = """\
insert into rate (currency, per_dollar)
select currency, per_dollar::numeric from jsonb_each_text(%s) said (currency, per_dollar)
on conflict (currency) do update set per_dollar = excluded.per_dollar, rated_at = now()"""
WALLETS = "select 'wallet:' || portfolio as key, jsonb_build_object('portfolio', portfolio) as args from public.wallet"


class WrongPrices(ValueError):
    """The market's data must be wrong: a retry asks again; after the last attempt a person must look into it."""


@app.lifespan
async def outside(ctx: Context) -> AsyncIterator[None]:
    """Give each worker one HTTP client and one connection pool."""
    http = httpx2.AsyncClient(base_url=os.environ["MARKET_URL"], timeout=None)  # each task has its own deadline
    pool = AsyncConnectionPool(app.conninfo(), max_size=4, open=False, kwargs={"prepare_threshold": None})
    async with http as ctx.state.http, pool as ctx.state.pool:
        yield


async def rows(ctx: Context, query: LiteralString, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query."""
    async with ctx.state.pool.connection() as conn:
        return await (await conn.execute(query, values)).fetchall()


@app.task(atomic=True, retry="standard", summary="{market} has closed")
async def close_market(tx: psycopg.AsyncConnection, ctx: Context, market: str) -> int:
    """Enqueue a valuation of each portfolio of a market without one, in the transaction that ends this job.

    Return their number.
    """
    day = (ctx.tick or datetime.now(UTC)).astimezone(ZoneInfo(ZONES[market])).date()
    await tx.execute("insert into closing (market, day) values (%s, %s) on conflict do nothing", (market, day))
    found = await (await tx.execute(NOT_VALUED, (market, day))).fetchall()
    await app.enqueue_many(tx, [value.job(portfolio, day) for (portfolio,) in found])
    return len(found)


@app.task(unique=True, retry="standard", max_attempts=4, timeout=PATIENCE, summary="Value {portfolio} on {day}")
async def value(ctx: Context, portfolio: int, day: date) -> None:
    """Value a portfolio at the day's closing prices. One transaction stores the amount and completes the job."""
    held = await rows(ctx, "select symbol, quantity, quote from held where portfolio = %s", portfolio)
    prices = await closing_prices(ctx, day, {symbol: quote for symbol, _, quote in held})
    cents = round(sum(quantity * prices[symbol] * 100 for symbol, quantity, _ in held))
    noted = "insert into valuation (portfolio, day, amount, worker) values (%s, %s, %s, %s) on conflict do nothing"
    async with ctx.state.pool.connection() as conn:  # only now: no connection was held during the market's call
        await conn.execute(noted, (portfolio, day, cents, ctx.worker))
        await ctx.complete(conn)


async def closing_prices(ctx: Context, day: date, quotes: dict[str, Decimal]) -> dict[str, Decimal]:
    """Return the day's price of each symbol.

    Raises WrongPrices if a price is missing, of another day, or far from the newest quote.
    """
    answer = await ctx.state.http.get(f"/close/{day}", params={"symbols": ",".join(quotes)})
    answer.raise_for_status()  # a Retry-After delays the retry
    said = answer.json()
    if said["day"] != day.isoformat():
        raise WrongPrices(f"prices of {said['day']} instead of {day}")
    prices = {symbol: Decimal(said["prices"].get(symbol, "0")) for symbol in quotes}
    for symbol, price in prices.items():
        if not quotes[symbol] / 3 < price < quotes[symbol] * 3:
            raise WrongPrices(f"{symbol} at {price}, but it was quoted at {quotes[symbol]}")
    return prices


@app.task(retry="standard", max_attempts=6, timeout=PATIENCE, summary="Statement of {portfolio} on {day}")
async def send_statement(ctx: Context, portfolio: int, day: date) -> None:
    """Mail the portfolio's worth to the owner. The key is the same in every attempt, so there is one mail."""
    ((owner, amount),) = await rows(ctx, STATED, portfolio, day)
    mail = {"to": owner, "text": f"On {day} your portfolio {portfolio} was worth {Decimal(amount) / 100:,.2f}."}
    answer = await ctx.state.http.post("/mail", json=mail, headers={"Idempotency-Key": f"statement-{portfolio}-{day}"})
    answer.raise_for_status()
    noted = "insert into statement (portfolio, day) values (%s, %s) on conflict do nothing"
    async with ctx.state.pool.connection() as conn:
        await conn.execute(noted, (portfolio, day))
        await ctx.complete(conn)


@app.task(retry="standard", timeout=timedelta(seconds=30), summary="Quotes of all instruments")
async def refresh_quotes(ctx: Context) -> None:
    """Fetch the newest prices of all instruments. If this takes longer than the interval, a tick is skipped."""
    await fetch(ctx, "/quotes", QUOTED)


@app.task(retry="standard", timeout=PATIENCE, summary="Exchange rates")
async def refresh_rates(ctx: Context) -> None:
    """Fetch exchange rates of the dollar, for owners with another currency."""
    await fetch(ctx, "/rates", RATED)


async def fetch(ctx: Context, path: str, statement: LiteralString) -> None:
    """Write the market's answer with one statement that takes its JSON, in the transaction that completes the job."""
    answer = await ctx.state.http.get(path)
    answer.raise_for_status()
    async with ctx.state.pool.connection() as conn:
        await conn.execute(statement, (answer.text,))
        await ctx.complete(conn)


@app.task(retry="standard", max_attempts=6, timeout=PATIENCE, summary="Wallet of {portfolio}")
async def sync_wallet(ctx: Context, portfolio: int) -> None:
    """Fetch a wallet's balance from the chain: every hour, and when its owner asks."""
    ((address,),) = await rows(ctx, "select address from wallet where portfolio = %s", portfolio)
    answer = await ctx.state.http.get("/wallet", params={"address": address})
    answer.raise_for_status()
    synced = "update wallet set balance = %s, synced_at = now() where portfolio = %s"
    async with ctx.state.pool.connection() as conn:
        await conn.execute(synced, (Decimal(answer.json()["balance"]), portfolio))
        await ctx.complete(conn)


@app.task(priority=1, retry="standard", max_attempts=4, timeout=timedelta(minutes=1), summary="Import {request}")
async def import_holdings(ctx: Context, request: int) -> Cancel | None:
    """Replace a portfolio's holdings with lines of `symbol,quantity`; return the symbols unknown to the market."""
    ((portfolio, content),) = await rows(ctx, "select portfolio, content from request where id = %s", request)
    try:
        wanted = {symbol: Decimal(many) for symbol, many in (line.split(",") for line in content.split())}
        if not 0 < min(wanted.values()) <= max(wanted.values()) < 10**9:
            raise ValueError("quantities")
    except (ValueError, ArithmeticError):
        return Cancel("the file must have lines like ADA,12.5")
    known = []
    for n, (symbol, many) in enumerate(wanted.items()):
        await ctx.progress(n / len(wanted), f"line {n + 1} of {len(wanted)}")
        answer = await ctx.state.http.get("/instrument", params={"symbol": symbol})
        if answer.status_code != 404:
            known.append((symbol, answer.raise_for_status().json()["price"], many))
    listed = "insert into instrument (symbol, quote) values (%s, %s) on conflict do nothing"
    async with ctx.state.pool.connection() as conn, conn.cursor() as cursor:
        await conn.execute("delete from holding where portfolio = %s", (portfolio,))
        await cursor.executemany(listed, [(symbol, quote) for symbol, quote, _ in sorted(known)])
        held = [(portfolio, symbol, many) for symbol, _, many in known]
        await cursor.executemany("insert into holding values (%s, %s, %s)", held)
        await conn.execute("update request set done_at = now() where id = %s", (request,))
        unknown = sorted(wanted.keys() - {symbol for symbol, _, _ in known})
        await ctx.complete(conn, result={"imported": len(known), "unknown": unknown})
    return None


@app.task(priority=1, retry="standard", max_attempts=4, timeout=timedelta(minutes=1), summary="Screenshot {request}")
async def read_screenshot(ctx: Context, request: int) -> Cancel | None:
    """Have the holdings read from a picture, and enqueue their import in the transaction that completes this job."""
    ((picture,),) = await rows(ctx, "select picture from request where id = %s", request)
    answer = await ctx.state.http.post("/read", content=picture, headers={"Idempotency-Key": f"screenshot-{request}"})
    if answer.status_code == 422:
        return Cancel("there are no holdings in this picture")
    answer.raise_for_status()
    async with ctx.state.pool.connection() as conn:
        job = await import_holdings.enqueue(conn, request)
        read = "update request set content = %s, picture = null, job_id = %s where id = %s"
        await conn.execute(read, (answer.json()["lines"], job.id, request))
        await ctx.complete(conn)
    return None


@app.task(atomic=True, priority=1, retry="standard", summary="Export {request}")
async def export_holdings(tx: psycopg.AsyncConnection, request: int) -> None:
    """Write a portfolio's holdings to a file that its owner can download."""
    query = "select h.symbol, h.quantity from holding h join request r using (portfolio) where r.id = %s order by 1"
    file = "".join([f"{symbol},{many}\n" async for symbol, many in await tx.execute(query, (request,))])
    await tx.execute("update request set content = %s, done_at = now() where id = %s", (file, request))


# All schedules. Workers store them when they start: new and changed ones, and the removal of old ones.
# A schedule never has two jobs at a time, with any number of workers: while one is open, ticks are skipped and counted.
SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "close-tokyo": (close_market.job("tokyo"), {"cron": "30 15 * * MON-FRI", "tz": ZONES["tokyo"]}),
    "close-frankfurt": (close_market.job("frankfurt"), {"cron": "45 17 * * MON-FRI", "tz": ZONES["frankfurt"]}),
    "close-newyork": (close_market.job("newyork"), {"cron": "15 16 * * MON-FRI", "tz": ZONES["newyork"]}),
    "quotes": (refresh_quotes.job(), {"every": os.environ.get("QUOTES_EVERY", "15 min")}),
    "rates": (refresh_rates.job(), {"every": "1 h"}),
    "wallets": (sync_wallet, {"every": "1 h", "query": WALLETS}),
    "statements": (send_statement, {"cron": "0 7 * * *", "query": "select key, args from public.unstated"}),
}
for name, (job, timing) in SCHEDULES.items():
    app.schedule(name, job, **timing)
