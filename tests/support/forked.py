"""A program that opens everything and then forks, as gunicorn does with preloading: `python -m support.forked DSN`.

The child uses the app that it has inherited, and exits normally; the parent continues to use its own. Prints "ok".
"""

import asyncio
import os
import signal
import sys
from datetime import timedelta

from tallybook import App
from tallybook._worker.life import signals

app = App("shop", dsn=sys.argv[1])


@app.task
async def note(n: int) -> None:
    """Do nothing."""


async def child() -> None:
    assert app._own_pool() is None, "the parent's pool is not the child's"
    await note.enqueue(app, 1)
    await asyncio.to_thread(note.enqueue_sync, app, 2)
    async with app.open():
        assert app._own_pool() is not None
        await note.enqueue(app, 3)
    report = asyncio.create_task(app.run_worker(poll=timedelta(milliseconds=50)))
    while [row for n in (1, 2, 3) for row in await _open(n)]:  # noqa: ASYNC110  another process's table
        await asyncio.sleep(0.02)
    assert signals.unclaimed() == (), "the worker has taken them"
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await report).completed >= 3


async def _open(n: int) -> list[object]:
    import psycopg

    async with await psycopg.AsyncConnection.connect(sys.argv[1], autocommit=True) as conn:
        query = "select from tallybook.job where args = jsonb_build_object('n', %s::int) and state <> 'completed'"
        return list(await (await conn.execute(query, (n,))).fetchall())


async def parent() -> None:
    async with app.open():
        await note.enqueue(app, 0)
        inside = os.fork()
        if inside == 0:
            # Fork inside the running loop, so that the child has the same loop object.
            code = 1
            try:
                asyncio.events._set_running_loop(None)  # the child inherits the running loop
                asyncio.run(child())
                code = 0
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, inside, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "the child failed"
        for n in range(10, 30):
            await note.enqueue(app, n)


async def _put(n: int) -> None:
    await note.enqueue(app, n)


def between() -> None:
    """Fork between two loops with a pool that was never closed; the child exits normally, with all finalizers."""
    opened = app.open()
    runner = asyncio.Runner()
    runner.run(opened.__aenter__())
    runner.run(_put(0))
    inside = os.fork()
    if inside == 0:
        asyncio.run(child())
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1]) == 0, "the child failed"
    runner.run(_put(4))
    runner.run(opened.__aexit__(None, None, None))
    runner.close()


if __name__ == "__main__":
    if sys.argv[2] == "inside":
        asyncio.run(parent())
    else:
        between()
    print("ok")
