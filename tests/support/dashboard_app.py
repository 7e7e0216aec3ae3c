"""An App with hostile names, args, errors and results, and a database filled with its jobs.

Its worker process is `tallybook worker -A support.dashboard_app:app`.
"""

import asyncio
from datetime import timedelta

import psycopg

from tallybook import App, Cancel, Context

# Texts that would run in a page without escaping: markup, the end of an attribute, the end of a script.
IMG = "<img src=x onerror=fired()>"
HOSTILE = f"\"'></pre></script><script>fired()</script>{IMG}"
SECRET = "hunter2-never-shown"
QUEUE = f"q{IMG}"
LONG = ("a-name-without-any-space-" * 8)[:190]

app = App("shop")


@app.task(queue="mail", max_attempts=1)
async def send(to: str, **more: object) -> dict[str, object]:
    if to == "nobody":
        raise ValueError(HOSTILE)
    return {"said": HOSTILE, "password": SECRET}


@app.task(name=f"task {IMG}", queue=QUEUE, max_attempts=1, summary="For {who}")
async def hostile(who: str, api_key: str = SECRET) -> None:
    raise type(f"Error{IMG}", (Exception,), {})(HOSTILE)


@app.task(queue="slow")
async def stay(ctx: Context, n: int) -> None:
    """Run until cancelled."""
    await ctx.progress(0.5, HOSTILE)
    await asyncio.sleep(3600)


@app.task(queue="mail")
async def refuse(n: int) -> Cancel:
    return Cancel(HOSTILE)


@app.task(queue="feeds")
async def fetch(url: str) -> str:
    return url


@app.task(queue="mail", schedule=timedelta(hours=1))
async def digest() -> None: ...


async def furnish(dsn: str, *, drain: bool = True) -> None:
    """Fill a database with jobs in all states, schedules, subjects, limits, breakers and providers."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None) as conn:
        for n in range(12):
            await send.enqueue(conn, f"user{n}@example.org", api_key=SECRET, html=HOSTILE)
        for _ in range(3):
            await send.with_(links={"customer": HOSTILE}, headers={"note": HOSTILE}).enqueue(conn, "nobody")
        await hostile.with_(links={"customer": HOSTILE}).enqueue(conn, HOSTILE)
        await hostile.with_(unique=f"key {IMG}", delay="1 h", order_key=f"order {IMG}").enqueue(conn, HOSTILE)
        await refuse.enqueue(conn, 1)
        first = await send.with_(delay="2 h").enqueue(conn, "later@example.org")
        await send.with_(after=first).enqueue(conn, "after@example.org")
        for name in (f"https://example.org/{IMG}", LONG):
            await fetch.with_(limits=("feed:{url}",)).subject(name).push(url=name).on(conn)
        await app.schedules.set(f"nightly {IMG}", send.job(HOSTILE), cron="0 3 * * *", tz="Asia/Kolkata").on(conn)
        await app.concurrency_limits.set(f"limit {IMG}", 3).on(conn)
        await app.concurrency_limits.set(f"queue:{QUEUE}", 2).on(conn)
        await app.rate_limits.set("acme", 8, per="1 min").on(conn)
        await app.breakers.set(f"breaker {IMG}", 5, per="1 min", open_for="30 s").on(conn)
        await app.queues.set(LONG[:60], by=IMG).on(conn)
        await app.queues.pause(LONG[:60], by=IMG).on(conn)
        await app.providers.set("acme", kind=f"feed {IMG}", settings={"base_url": HOSTILE}, conn=conn)
        await app.providers.route("equity", "acme", conn=conn)
        await conn.execute(
            "select tallybook.audit_add('ada', 'cli', 'queue.pause', jsonb_build_object('queue', %s::text))", [IMG]
        )
    if drain:
        app.dsn = dsn
        await app.drain(queues={"mail": 5, QUEUE: 5, "feeds": 5})
