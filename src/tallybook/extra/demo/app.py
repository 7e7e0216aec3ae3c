"""The demo's application, as you would write it: form submissions, each sent on to the customer's webhook.

Read `save` and `deliver`. All else in this folder is the stage around them: the receiver, the display, the kill.
"""

from __future__ import annotations

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
  id bigint generated always as identity primary key, data jsonb not null, saved_at timestamptz not null default now())"""


def save(conn: psycopg.Connection, data: dict[str, str]) -> Job:
    """What the web handler does: save a submission and enqueue its delivery, both in one transaction or neither."""
    with conn.transaction():
        row = conn.execute("insert into submission (data) values (%s) returning id", [Jsonb(data)]).fetchone()
        assert row is not None
        return deliver.enqueue_sync(conn, row[0])


@app.task(queue="webhooks", retry=Exponential(timedelta(milliseconds=500)), max_attempts=10)
async def deliver(ctx: Context, submission_id: int) -> Cancel | None:
    """Send one submission to the webhook. What is raised here is a failure: tried again later, after a backoff."""
    started_at = time.time()
    async with ctx.state.db.connection() as conn:
        found = await conn.execute("select data::text from submission where id = %s", [submission_id])
        row = await found.fetchone()
    if row is None:
        return Cancel("the submission was deleted")
    # A worker may die after the webhook has been taken and before that is on record: the job is then sent once more,
    # and the receiver tells it by this key, which is the same on every attempt.
    key = f"submission-{submission_id}"
    await ctx.state.http.post(row[0], {"Idempotency-Key": key, "Attempt": ctx.attempt, "Started-At": started_at})
    return None


@app.lifespan
async def clients(ctx: Context) -> AsyncIterator[None]:
    """Opened once per worker process, shared by all of its jobs."""
    dsn, url = os.environ["TALLYBOOK_DSN"], os.environ["WEBHOOK_URL"]
    ctx.state.http = Client(url)
    async with AsyncConnectionPool(dsn, open=False) as ctx.state.db:
        yield
