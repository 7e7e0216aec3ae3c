"""The app, the same as on one database. A worker of several nodes runs each job on the job's node."""

from __future__ import annotations

from datetime import timedelta

import psycopg

from tallybook import App, Constant

app = App("fleet")


@app.task(queue="mail", atomic=True, max_attempts=50, retry=Constant(timedelta(seconds=0.5)))
async def confirm(tx: psycopg.AsyncConnection, tenant: int, number: int) -> None:
    """Confirm an order on its node, in the transaction that completes the job."""
    await tx.execute("update orders set confirmed = confirmed + 1 where tenant = %s and number = %s", (tenant, number))
