"""Procrastinate, with concurrency 10: it fetches job by job, and a higher concurrency does not make that faster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import driver
from procrastinate import App, PsycopgConnector

CONCURRENCY = 10


@dataclass
class ProcrastinateWorker:
    """One worker process."""

    app: App
    _running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._running = asyncio.create_task(self.app.run_worker_async(concurrency=CONCURRENCY))
        await asyncio.wait((self._running,))
        if not self._running.cancelled():
            self._running.result()

    def stop(self) -> None:
        if self._running:
            self._running.cancel()


class ProcrastinatePeer:
    """The driver's interface to Procrastinate."""

    left = "select exists (select from procrastinate_jobs where status in ('todo', 'doing'))"

    @asynccontextmanager
    async def app(self, dsn: str) -> AsyncIterator[App]:
        # One connection per concurrent job, one to fetch with and one spare; its default pool has four.
        app = App(connector=PsycopgConnector(conninfo=dsn, min_size=1, max_size=CONCURRENCY + 2))
        async with app.open_async():
            yield app

    async def install(self, dsn: str) -> None:
        async with self.app(dsn) as app:
            await app.schema_manager.apply_schema_async()

    @asynccontextmanager
    async def enqueuer(self, dsn: str) -> AsyncIterator[driver.Enqueue]:
        async with self.app(dsn) as app:
            task = app.configure_task("noop")

            async def put(jobs: list[driver.Args]) -> None:
                if len(jobs) == 1:
                    await task.defer_async(**jobs[0])
                else:
                    await task.batch_defer_async(*jobs)

            yield put

    @asynccontextmanager
    async def worker(self, dsn: str, seen: driver.Seen, *, throughput: bool) -> AsyncIterator[driver.Worker]:
        async with self.app(dsn) as app:

            @app.task(name="noop")
            async def noop(to: str, n: int) -> None:
                seen(lambda: n)

            yield ProcrastinateWorker(app)


if __name__ == "__main__":
    driver.main(ProcrastinatePeer())
