"""A worker process with atomic tasks, started by `Workers(dsn, db, module="support.atomic_process")`.

Its option `die` is the point where it kills itself, at the first atomic job that reaches it.
"""

import asyncio
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import psycopg
from sqlalchemy.orm import Session

from support.worker_process import read
from tallybook import App, Constant, Context
from tallybook._db.transactions import Begun, Psycopg

TABLES = """
create table if not exists effect (job_id bigint, n int, attempt int, worker text,
                                   constraint "one effect a job" primary key (job_id));
create table if not exists began (job_id bigint, attempt int, worker text);
create table if not exists gate (open boolean);
"""

app = App("shop")


@app.task(queue="later")
def follow(n: int) -> None:
    """Never run, because no worker serves its queue."""


@app.task(atomic=True, max_attempts=30, retry=Constant(timedelta(milliseconds=100)))
async def pay(tx: psycopg.AsyncConnection[Any], ctx: Context, n: int) -> None:
    """Write one effect and enqueue one job."""
    await tx.execute("insert into effect values (%s, %s, %s, %s)", (ctx.job_id, n, ctx.attempt, ctx.worker))
    await follow.enqueue(tx, n)


@app.task(atomic=True, max_attempts=30, retry=Constant(timedelta(milliseconds=100)))
def pay_in_thread(tx: Session, ctx: Context, n: int) -> None:
    """Do the same in a thread, by SQLAlchemy."""
    row = {"job": ctx.job_id, "n": n, "attempt": ctx.attempt, "worker": ctx.worker}
    tx.connection().exec_driver_sql("insert into effect values (%(job)s, %(n)s, %(attempt)s, %(worker)s)", row)
    follow.enqueue_sync(tx, n)


@app.task(atomic=True)
async def pay_slowly(tx: psycopg.AsyncConnection[Any], ctx: Context, n: int) -> None:
    """Record the start, and write the effect when the gate is open."""
    row = (ctx.job_id, ctx.attempt, ctx.worker)
    # No prepared statements, as needed behind a pooler in transaction mode.
    options: Any = {"autocommit": True, "prepare_threshold": None}
    async with await psycopg.AsyncConnection.connect(sys.argv[1], **options) as other:
        await other.execute("insert into began values (%s, %s, %s)", row)
        while not await (await other.execute("select from gate")).fetchall():  # noqa: ASYNC110  the gate is a table
            await asyncio.sleep(0.02)
    await tx.execute("insert into effect values (%s, %s, %s, %s)", (ctx.job_id, n, ctx.attempt, ctx.worker))


def die(where: str) -> None:
    """Kill this process before or after the COMMIT of the first atomic job."""
    commit = Psycopg.commit

    async def deadly(self: Psycopg, begun: Begun) -> None:
        if where == "after":
            await commit(self, begun)
        os.kill(os.getpid(), signal.SIGKILL)

    Psycopg.commit = deadly  # type: ignore[method-assign]


def main(dsn: str, settings: str) -> None:
    from tallybook._worker.entry import run_worker

    options = read(settings)
    if where := options.pop("die", None):
        die(str(where))
    asyncio.run(run_worker(app, dsn=dsn, queues="default", **options))


if __name__ == "__main__":
    main(*sys.argv[1:])
