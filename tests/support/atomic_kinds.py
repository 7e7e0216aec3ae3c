"""One atomic task per library. Each writes, enqueues a follow-up job, and then does what the test sets."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
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
Then = Callable[[Any, Context], Any]
"""The handler's last step after its writes: it returns a value or raises."""


@dataclass
class Kind:
    """A library: the type of its transaction, which the handler declares, and how a statement is run on one."""

    name: str
    tx: Any
    execute: Callable[[Any, str], Any]
    atomic: bool | str = True

    def __call__(self, app: App, then: Then) -> Task[[int], Any]:
        """Declare the task on an app."""

        @app.task(queue="later")
        def follow(n: int) -> None: ...

        def effect(ctx: Context) -> str:
            return f"insert into effect values ({ctx.job_id}, {ctx.attempt})"  # noqa: S608  for five libraries

        def work(tx: Any, ctx: Context, n: int) -> Any:
            self.execute(tx, effect(ctx))
            follow.enqueue_sync(tx, n)
            return then(tx, ctx)

        async def work_async(tx: Any, ctx: Context, n: int) -> Any:
            await self.execute(tx, effect(ctx))
            await follow.enqueue(tx, n)
            return then(tx, ctx)

        handler = work_async if inspect.iscoroutinefunction(self.execute) else work
        handler.__annotations__["tx"] = self.tx
        return app.task(atomic=self.atomic, name="work", retry=Constant(timedelta(0)))(handler)


async def _on_asyncpg(tx: Any, statement: str) -> None:
    async with tx.transaction():  # a savepoint, as everywhere
        await tx.execute(statement)


def _on_session(tx: Any, statement: str) -> None:
    with tx.begin_nested():
        tx.execute(sa.text(statement))


async def _on_sqlalchemy(tx: Any, statement: str) -> None:
    await tx.execute(sa.text(statement))


def _on_django(tx: Any, statement: str) -> None:
    with tx.cursor() as cursor:
        cursor.execute(statement)


psycopg_async = Kind("psycopg_async", psycopg.AsyncConnection[Any], psycopg.AsyncConnection.execute)
psycopg_plain = Kind("psycopg_plain", psycopg.Connection[Any], psycopg.Connection.execute)
KINDS = [
    psycopg_async,
    psycopg_plain,
    Kind("asyncpg_connection", asyncpg.Connection, _on_asyncpg),
    Kind("session", Session, _on_session),
    Kind("connection", sa.Connection, lambda tx, statement: tx.execute(sa.text(statement))),
    Kind("async_session", AsyncSession, _on_sqlalchemy),
    Kind("async_connection", AsyncConnection, _on_sqlalchemy),
    Kind("django", BaseDatabaseWrapper, _on_django, atomic="shop"),
]
