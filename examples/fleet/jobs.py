"""The app, the same as on one database. A worker of several nodes runs each job on the job's node."""

from __future__ import annotations

import psycopg

from tallybook import App

app = App("fleet")


@app.task(queue="mail", atomic=True)
async def confirm(tx: psycopg.AsyncConnection, tenant: int, number: int) -> None:
    """Confirm an order on its node, in the transaction that completes the job."""
    await tx.execute("update orders set confirmed = confirmed + 1 where tenant = %s and number = %s", (tenant, number))
