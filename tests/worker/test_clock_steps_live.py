"""The clock of a live server steps: its workers notice, and everything runs again within 30 s."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.workers import eventually, working
from tallybook import App, Context
from tallybook._db.migrate import migrate
from tallybook._embedded.binaries import environment
from tallybook.embedded import Server, temporary_server

pytestmark = pytest.mark.direct("a server of its own")
LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
Step = Callable[[timedelta], None]


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Step]]:
    """Yield a server, and a function that sets its clock's offset."""
    if LIBRARY is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("libfaketime is missing: apt-get install faketime")
    with tempfile.TemporaryDirectory(prefix="tallybook-clock-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # if the tests run as root, the server runs as another user

        def step(by: timedelta) -> None:
            (folder / "new").write_text(f"{by.total_seconds():+.0f}s")
            (folder / "new").rename(folder / "offset")  # never read half written

        step(timedelta(0))
        faked = {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(folder / "offset"),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # as on a real system: setting the clock leaves it alone
        }
        monkeypatch.setattr("tallybook._embedded.guard.environment", lambda: environment() | faked)
        with temporary_server(int(os.environ.get("TALLYBOOK_TEST_PG") or 18)) as server:
            yield server, step


@pytest.mark.slow
async def test_everything_runs_on_after_a_step_back_and_forward(stepped: tuple[Server, Step]) -> None:
    """Limits, schedules, rescue and services run within 30 s of a step of an hour, either way; it is on record."""
    recorded = "select count(*) from tallybook.clock_step"
    late = """
select array_agg(name) from tallybook.service
 where name <> 'schedules' and (last_run_at is null or last_run_at not between %s and clock_timestamp())"""
    worker = """
select gone.worker from (select tallybook.worker_start('gone', '{elsewhere}', lease => '2 s') as worker) gone,
       lateral tallybook.claim(gone.worker, '{elsewhere}', '{1}', gen_random_uuid())"""
    hour = timedelta(hours=1)
    server, step = stepped
    dsn = server.create_database("clock")
    app = App("clock")
    app.rate_limit("api", 60, per=timedelta(minutes=1))

    @app.task(limits=("api",))
    async def call(ctx: Context) -> None:
        pass

    @app.task(schedule=timedelta(seconds=2))
    async def tick(ctx: Context) -> None:
        pass

    with psycopg.connect(dsn, autocommit=True) as db:
        migrate(db)

        def one(query: str, *params: object) -> Any:
            row = db.execute(query, params).fetchone()  # type: ignore[arg-type]
            return row[0] if row else None

        def done(task: str) -> int:
            found: int = one("select count(*) from tallybook.job where task = %s and state = 'completed'", task)
            return found

        def rescued() -> int:
            found: int = one("select count(*) from tallybook.outcome where state = 'lost'")
            return found

        async with working(app, dsn, lease=timedelta(seconds=30), heartbeat=timedelta(seconds=10)):
            offset = timedelta(0)
            for n, by in enumerate((-hour, hour), 1):
                await eventually(lambda n=n: done(tick.name) >= n, "it ticks")  # type: ignore[misc]
                one("select tallybook.enqueue('elsewhere', 'nobody')")
                one(worker)
                for _ in range(5):
                    call.enqueue_sync(db)
                await eventually(lambda n=n: done(call.name) > 5 * (n - 1), "the first call")  # type: ignore[misc]
                ticks, before = done(tick.name), one("select clock_timestamp()")
                offset += by
                step(offset)
                after = one("select clock_timestamp()")
                assert abs(after - before - by) < timedelta(seconds=10), "the server's clock has stepped"
                until = time.monotonic() + 30
                for what, is_so in {
                    "limited jobs": lambda n=n: done(call.name) == 5 * n,  # type: ignore[misc]
                    "schedules": lambda ticks=ticks: done(tick.name) > ticks + 1,  # type: ignore[misc]
                    "a dead worker's job": lambda n=n: rescued() == n,  # type: ignore[misc]
                    "services": lambda after=after: one(late, after) is None,  # type: ignore[misc]
                    "on record": lambda n=n: one(recorded) == n,  # type: ignore[misc]
                }.items():
                    await eventually(is_so, what, seconds=until - time.monotonic())
            steps = [row[0] for row in db.execute("select by from tallybook.clock_step order by id")]
            assert [round(found / hour, 1) for found in steps] == [-1, 1]
            assert one("select count(*) from tallybook.worker where name <> 'gone'") == 1, "nobody was taken for dead"
            most = one("select max(n) from (select count(*) over (order by called_at range '59.9 s' preceding) as n"
                       " from tallybook.rate_call) w")  # fmt: skip
            assert most <= 60
