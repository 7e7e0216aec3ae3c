"""One atomic task per library. Each writes, enqueues a follow-up job, and then does what the test sets."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg
import sqlalchemy as sa
from django.db.backends.base.base import BaseDatabaseWrapper
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from tallybook import App, Constant, Context, Task

TABLE = "create table effect (job_id bigint primary key, attempt int)"
AT_ONCE: dict[str, Any] = {"atomic": True, "name": "work", "retry": Constant(timedelta(0))}
Then = Callable[[Any, Context], Any]
"""The handler's last step after its writes: it returns a value or raises."""


def follow(app: App) -> Task[[int], None]:
    @app.task(queue="later")
    def follow(n: int) -> None:
        pass

    return follow


def _effect(ctx: Context) -> str:
    return f"insert into effect values ({ctx.job_id}, {ctx.attempt})"  # noqa: S608  two numbers, for five libraries


def psycopg_async(app: App, then: Then) -> Task[[int], Any]:
    after = follow(app)

    @app.task(**AT_ONCE)
    async def work(tx: psycopg.AsyncConnection[Any], ctx: Context, n: int) -> Any:
        await tx.execute(_effect(ctx))
        await after.enqueue(tx, n)
        return then(tx, ctx)

    return work


def psycopg_plain(app: App, then: Then) -> Task[[int], Any]:
    after = follow(app)

    @app.task(**AT_ONCE)
    def work(tx: psycopg.Connection[Any], ctx: Context, n: int) -> Any:
        tx.execute(_effect(ctx))
        after.enqueue_sync(tx, n)
        return then(tx, ctx)

    return work


def asyncpg_connection(app: App, then: Then) -> Task[[int], Any]:
    after = follow(app)

    @app.task(**AT_ONCE)
    async def work(tx: asyncpg.Connection, ctx: Context, n: int) -> Any:
        async with tx.transaction():  # a savepoint, as everywhere
            await tx.execute(_effect(ctx))
        await after.enqueue(tx, n)
        return then(tx, ctx)

    return work


def session(app: App, then: Then) -> Task[[int], Any]:
    after = follow(app)

    @app.task(**AT_ONCE)
    def work(tx: Session, ctx: Context, n: int) -> Any:
        with tx.begin_nested():
            tx.execute(sa.text(_effect(ctx)))
        after.enqueue_sync(tx, n)
        return then(tx, ctx)

    return work


def connection(app: App, then: Then) -> Task[[int], Any]:
    after = follow(app)

    @app.task(**AT_ONCE)
    def work(tx: sa.Connection, ctx: Context, n: int) -> Any:
        tx.execute(sa.text(_effect(ctx)))
        after.enqueue_sync(tx, n)
        return then(tx, ctx)

    return work


def async_session(app: App, then: Then) -> Task[[int], Any]:
    after = follow(app)

    @app.task(**AT_ONCE)
    async def work(tx: AsyncSession, ctx: Context, n: int) -> Any:
        await tx.execute(sa.text(_effect(ctx)))
        await after.enqueue(tx, n)
        return then(tx, ctx)

    return work


def async_connection(app: App, then: Then) -> Task[[int], Any]:
    after = follow(app)

    @app.task(**AT_ONCE)
    async def work(tx: AsyncConnection, ctx: Context, n: int) -> Any:
        await tx.execute(sa.text(_effect(ctx)))
        await after.enqueue(tx, n)
        return then(tx, ctx)

    return work


def django(app: App, then: Then) -> Task[[int], Any]:
    after = follow(app)

    @app.task(**{**AT_ONCE, "atomic": "shop"})
    def work(tx: BaseDatabaseWrapper, ctx: Context, n: int) -> Any:
        with tx.cursor() as cursor:
            cursor.execute(_effect(ctx))
        after.enqueue_sync(tx, n)
        return then(tx, ctx)

    return work


KINDS = [psycopg_async, psycopg_plain, asyncpg_connection, session, connection, async_session, async_connection, django]
