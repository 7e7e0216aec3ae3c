"""The demo's application, as you would write it: form submissions, each sent to the customer's webhook.

Read `save` and `deliver`. The other modules of this folder run the demo: the receiver, the display, the kill.
"""

import os
import time
from collections.abc import AsyncIterator
from datetime import timedelta

import psycopg
from psycopg.types.json import Jsonb
from psycopg_pool import AsyncConnectionPool

from tallybook import App, Cancel, Context, Exponential, Job
from tallybook.extra.demo.client import Client

app = App("demo")

TABLE = """create table submission (
  id bigint generated always as identity primary key, data jsonb not null,
  saved_at timestamptz not null default now())"""


def save(conn: psycopg.Connection, data: dict[str, str]) -> Job:
    """Save a submission and enqueue its delivery in one transaction, as a web handler would."""
    with conn.transaction():
        row = conn.execute("insert into submission (data) values (%s) returning id", [Jsonb(data)]).fetchone()
        assert row is not None
        return deliver.enqueue_sync(conn, row[0])


@app.task(queue="webhooks", retry=Exponential(timedelta(milliseconds=500)), max_attempts=10)
async def deliver(ctx: Context, submission_id: int) -> Cancel | None:
    """Send one submission to the webhook. An error is a failure: the job is retried after a backoff."""
    started_at = time.time()
    async with ctx.state.db.connection() as conn:
        found = await conn.execute("select data::text from submission where id = %s", [submission_id])
        row = await found.fetchone()
    if row is None:
        return Cancel("the submission was deleted")
    # A worker may die after the webhook was accepted and before that is recorded. The job then sends it once more, and
    # the receiver recognises it by this key, which is the same at every attempt.
    key = f"submission-{submission_id}"
    await ctx.state.http.post(row[0], {"Idempotency-Key": key, "Attempt": ctx.attempt, "Started-At": started_at})
    return None


@app.lifespan
async def clients(ctx: Context) -> AsyncIterator[None]:
    """Open the clients once per worker process; all of its jobs share them."""
    dsn, url = os.environ["TALLYBOOK_DSN"], os.environ["WEBHOOK_URL"]
    ctx.state.http = Client(url)
    async with AsyncConnectionPool(dsn, open=False) as ctx.state.db:
        yield
