"""Worker processes of two releases of one program side by side, as in a rolling deploy.

`python -m support.releases DSN '{"release": 1, ...}'` is a worker of one release.
"""

import asyncio
import sys
from typing import Any

import psycopg

from support.worker_process import Workers, read
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


class Releases(Workers):
    """Workers of both releases: `start(release=1)`."""

    def __init__(self, dsn: str, db: Any) -> None:
        super().__init__(dsn, db, module="support.releases")
        db.execute(TABLE)

    def said(self) -> list[tuple[int, str]]:
        """Return the sent messages, in order."""
        return self.db.execute("select n, said from mail").fetchall()

    def most_moves(self) -> int:
        """Return the largest number of times that a job was set aside."""
        moves = "select count(*) from tallybook.outcome where state = 'moved' group by job_id"
        return max((n for (n,) in self.db.execute(moves)), default=0)


def main(dsn: str, settings: str) -> None:
    """Run a worker of one release with one slot, so that messages are sent in the order of the claims."""
    from tallybook._worker.entry import run_worker

    options = {**read(settings), "lease": "5 s", "heartbeat": "1 s"}
    asyncio.run(run_worker(release(options.pop("release"), dsn), dsn=dsn, queues={"default": 1}, **options))


if __name__ == "__main__":
    main(*sys.argv[1:])
