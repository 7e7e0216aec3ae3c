"""The producer beside Graphile Worker: its SQL function `add_job`, called as a Python application would.

Only `produce` is here; the rest of its driver is node/graphile_peer.mjs.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import driver
import psycopg


class GraphileProducer:
    """The driver's interface for enqueuing into Graphile Worker."""

    left = "select exists (select from graphile_worker._private_jobs)"

    async def install(self, dsn: str) -> None:
        raise NotImplementedError("in node/graphile_peer.mjs")

    @asynccontextmanager
    async def enqueuer(self, dsn: str) -> AsyncIterator[driver.Enqueue]:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:

            async def put(jobs: list[driver.Args]) -> None:
                async with connection.cursor() as cursor:
                    for job in jobs:
                        await cursor.execute("select graphile_worker.add_job('noop', %s::json)", (json.dumps(job),))

            yield put

    def worker(self, dsn: str, seen: driver.Seen, *, throughput: bool) -> AbstractAsyncContextManager[driver.Worker]:
        raise NotImplementedError("in node/graphile_peer.mjs")


if __name__ == "__main__":
    driver.main(GraphileProducer())
