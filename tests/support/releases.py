"""Worker processes of two releases of one program side by side, as in a rolling deploy.

`python -m support.releases DSN RELEASE NAME` is a worker of one release.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Self

import psycopg

from support.paths import ROOT
from support.waiting import wait_until
from tallybook import App, Context

TABLE = "create table if not exists mail (n int, said text, worker text, job_id bigint, attempt int)"


def release(number: int, dsn: str = "") -> App:
    """Return the program: release 1 has `send(n, to)`, release 2 `send(n, address, lang)` and `tidy` as `clean_up`."""
    app = App("shop")

    async def note(ctx: Context, n: int, said: str) -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            row = (n, said, ctx.worker, ctx.job_id, ctx.attempt)
            await conn.execute("insert into mail values (%s, %s, %s, %s, %s)", row)

    if number == 1:

        @app.task(name="send")
        async def send(ctx: Context, n: int, to: str) -> None:
            await note(ctx, n, to)

        @app.task(name="tidy")
        async def tidy(ctx: Context, n: int) -> None:
            await note(ctx, n, "tidy")

        return app

    @app.task(name="send", version=2)
    async def send2(ctx: Context, n: int, address: str, lang: str) -> None:
        await note(ctx, n, f"{address} {lang}")

    @send2.upgrade(1)
    def _(args: dict[str, Any]) -> dict[str, Any]:
        return {"n": args["n"], "address": args["to"], "lang": "en"}

    @app.task(name="clean_up", aliases=("tidy",))
    async def clean_up(ctx: Context, n: int) -> None:
        await note(ctx, n, "clean")

    return app


class Releases:
    """Workers of both releases, which are killed at the end of the block."""

    def __init__(self, dsn: str, db: Any) -> None:
        self.dsn, self.db = dsn, db
        self._stack = ExitStack()
        db.execute(TABLE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, number: int, name: str) -> subprocess.Popen[str]:
        """Start a worker of this release, and wait until it is registered."""
        process = subprocess.Popen(
            [sys.executable, "-m", "support.releases", self.dsn, str(number), name],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])},
            stderr=subprocess.PIPE,
            text=True,
        )

        def end() -> None:
            process.kill()
            sys.stderr.write(f"--- {name}\n{process.communicate()[1][-3000:]}\n")

        self._stack.callback(end)
        known = "select from tallybook.worker where name = %s and ended_at is null"
        wait_until(lambda: self.db.execute(known, (name,)).fetchall(), f"{name} is registered")
        return process

    def said(self) -> list[tuple[int, str]]:
        """Return the sent messages, in order."""
        return self.db.execute("select n, said from mail").fetchall()

    def most_moves(self) -> int:
        """Return the largest number of times that a job was set aside."""
        (most,) = self.db.execute(
            "select coalesce(max(n), 0)"
            " from (select count(*) n from tallybook.outcome where state = 'moved' group by job_id) m"
        ).fetchone()
        return int(most)


def main(dsn: str, number: str, name: str) -> None:
    """Run a worker of one release with one slot, so that messages are sent in the order of the claims."""
    from tallybook._worker.entry import run_worker

    settings: dict[str, Any] = {"lease": timedelta(seconds=5), "heartbeat": timedelta(seconds=1)}
    asyncio.run(run_worker(release(int(number), dsn), dsn=dsn, queues={"default": 1}, name=name, **settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
