"""PgQueuer, configured as its performance guide advises: a separate connection for the worker, asyncpg, uvloop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import asyncpg
import driver
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

THROUGHPUT = {
    "batch_size": 500,  # With statistics: 20k jobs/s at 100, 23k at 500, 21k at 1,000; 4k at its default of 10.
    "log_aggregation_interval": timedelta(0),  # Else it folds its log every 30 s, and stalls for 1-2 s.
}


@dataclass
class PgQueuerWorker:
    """One worker process."""

    queuer: PgQueuer
    throughput: bool

    async def run(self) -> None:
        await self.queuer.run(**(THROUGHPUT if self.throughput else {}))

    def stop(self) -> None:
        self.queuer.shutdown.set()


class PgQueuerPeer:
    """The driver's interface to PgQueuer."""

    left = "select exists (select from pgqueuer)"

    async def install(self, dsn: str) -> None:
        connection = await asyncpg.connect(dsn)
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()  # The first item on its checklist for production.
        await connection.close()

    @asynccontextmanager
    async def enqueuer(self, dsn: str) -> AsyncIterator[driver.Enqueue]:
        connection = await asyncpg.connect(dsn)
        queries = Queries(AsyncpgDriver(connection))

        async def put(jobs: list[driver.Args]) -> None:
            payloads: list[bytes | None] = [json.dumps(job).encode() for job in jobs]
            if len(payloads) == 1:
                await queries.enqueue("noop", payloads[0])
            else:
                await queries.enqueue(["noop"] * len(payloads), payloads, [0] * len(payloads))

        yield put
        await connection.close()

    @asynccontextmanager
    async def worker(self, dsn: str, seen: driver.Seen, *, throughput: bool) -> AsyncIterator[driver.Worker]:
        connection = await asyncpg.connect(dsn)
        queuer = PgQueuer(AsyncpgDriver(connection))

        @queuer.entrypoint("noop")
        async def noop(job: Job) -> None:
            seen(lambda: json.loads(job.payload or b"")["n"])

        yield PgQueuerWorker(queuer, throughput)
        await connection.close()


if __name__ == "__main__":
    driver.main(PgQueuerPeer(), uvloop.run)
