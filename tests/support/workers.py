"""A worker in the test's own event loop, with short settings, and helpers that wait for its effects."""

import asyncio
import http.client
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar

from support.waiting import pauses
from tallybook import App, JobInfo
from tallybook._worker.life.worker import Worker
from tallybook._worker.settings import WorkerSettings, parse_queues

T = TypeVar("T")

# Longer than any test, so that polling has no effect. Behind a pooler there is only polling.
POOLED = bool(os.environ.get("TALLYBOOK_TEST_POOLER"))
SLEEPY = {"poll": timedelta(seconds=0.1) if POOLED else timedelta(seconds=60)}
# A worker is given up after two seconds without a heartbeat, and gives up others as quickly.
QUICK = {"lease": timedelta(seconds=2), "heartbeat": timedelta(seconds=0.4), "rescue_look": timedelta(seconds=0.3)}


@asynccontextmanager
async def working(app: App, dsn: str, queues: Any = None, **options: Any) -> AsyncIterator[Worker]:
    """Run a worker for the block, then stop it; raise the error that it died of."""
    worker = Worker(app, dsn, quick(queues, **options))
    async with living(worker, worker.claimer.stopping):
        yield worker


def quick(queues: Any = None, **options: Any) -> WorkerSettings:
    settings = {**QUICK, "stop_timeout": timedelta(seconds=10), "abort_timeout": timedelta(seconds=2), **options}
    return WorkerSettings(queues=parse_queues(queues), **settings)


@asynccontextmanager
async def living(worker: Any, stopping: asyncio.Event) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a worker of one node or of several for the block, then stop it; raise the error that it died of."""
    life = asyncio.create_task(worker.run())
    try:
        yield life
    finally:
        if not stopping.is_set():
            worker.stop()
        async with asyncio.timeout(60):
            await asyncio.gather(life, return_exceptions=True)
    if error := life.exception():
        raise error


async def eventually(condition: Callable[[], T], what: str, *, seconds: float = 60.0) -> T:
    """Return the first true value of `condition`, like `wait_until`; raise AssertionError with `what` at the limit."""
    wait = pauses(what, seconds)
    while not (value := condition()):  # noqa: ASYNC110 - most of what it waits for is in the database
        await asyncio.sleep(next(wait))
    return value


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Return status and text of the answer to one HTTP request."""
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        conn.request(method, path)
        answer = conn.getresponse()
        return answer.status, answer.read().decode()
    finally:
        conn.close()


async def given_up(db: Any, worker: int) -> None:
    """Have a living worker rescued as dead; wait for its running claims first, because a rescue skips it meanwhile."""

    def is_so() -> bool:
        with db.transaction():  # otherwise a heartbeat could come in between
            silent = "update tallybook.worker set seen_at = '-infinity' where id = %s and ended_at is null"
            db.execute(silent, (worker,))
            db.execute("select tallybook.rescue(only_worker => %s)", (worker,))
        row = db.execute("select ended_at is not null from tallybook.worker where id = %s", (worker,)).fetchone()
        return bool(row[0])

    await eventually(is_so, f"worker {worker} is given up")


class Jobs:
    """The states of jobs, read on the test's own connection."""

    def __init__(self, app: App, db: Any) -> None:
        self.app = app
        self.db = db

    def __call__(self, job: Any) -> JobInfo:
        return self.app.get(job).sync(self.db)

    async def ends(self, *jobs: Any, seconds: float = 60.0) -> list[JobInfo]:
        """Wait until all jobs are completed, cancelled or dead."""
        return [await self.becomes(job, "completed", "cancelled", "dead", seconds=seconds) for job in jobs]

    async def becomes(self, job: Any, *states: str, seconds: float = 60.0) -> JobInfo:
        """Wait until the job is in one of these states."""

        def there() -> JobInfo | None:
            found = self(job)
            return found if found.state in states else None

        return await eventually(there, f"{job} is {' or '.join(states)}", seconds=seconds)
