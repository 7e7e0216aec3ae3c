"""Entry points of a worker or a drain: `run_worker`, `drain`, and `prepared` for a worker that does not run yet."""

import os
from contextlib import nullcontext
from typing import Any

from tallybook._task.task import Owner
from tallybook._worker.life import signals
from tallybook._worker.life.drain import DrainReport
from tallybook._worker.life.drain import drain as _drain
from tallybook._worker.life.fleet import Fleet, drain_nodes
from tallybook._worker.life.stopping import WorkerReport
from tallybook._worker.life.worker import Worker
from tallybook._worker.settings import Queues, WorkerSettings, parse_queues
from tallybook.errors import ConfigError


def _dsn(app: Owner, dsn: str | None) -> str:
    if dsn is not None:
        app.dsn = dsn  # handlers that enqueue through the app use the same database
    return app.conninfo(dsn)


def app_queues(app: Owner) -> list[str]:
    """Return every queue that the app or its tasks name, and default: the queues that a worker serves by default."""
    return sorted({"default", *app._also_serves, *(task.queue for task in app.tasks.values())})


def demand_tasks(app: Owner) -> None:
    if not app.tasks:
        hint = "Import the module that declares them where the App is made, or app.include(...) them"
        raise ConfigError("app", app.name, "it has no tasks, so there is nothing to run", hint=hint)


def prepared(
    app: Owner, *, dsn: str | None = None, queues: Queues = None, nodes: str | None = None, **options: Any
) -> Worker | Fleet:
    """Return a worker that does not run yet; `nodes` as in App.run_worker, `options` are those of WorkerSettings."""
    dsn = _dsn(app, dsn)
    if direct := options.get("direct_dsn") or os.environ.get("TALLYBOOK_DIRECT_DSN"):
        options["direct_dsn"] = app.conninfo(direct)
    settings = WorkerSettings(queues=parse_queues(app_queues(app) if queues is None else queues), **options)
    return Worker(app, dsn, settings) if nodes is None else Fleet(app, dsn, nodes, settings)


async def run_worker(app: Owner, *, install_signals: bool | None = None, **options: Any) -> WorkerReport:
    """Run a worker in this process until it is stopped; `options` are those of `prepared`.

    `install_signals`: True: SIGTERM and SIGINT stop the worker. None: only those of the two that nothing else in this
    process handles, so that a web server around the worker keeps its own handlers. False: neither.
    """
    demand_tasks(app)
    worker = prepared(app, **options)
    caught = (signals.BOTH if install_signals else signals.unclaimed()) if install_signals is not False else ()
    with signals.stop_on(caught, worker.stop) if caught else nullcontext():
        return await worker.run()


async def drain(app: Owner, dsn: str | None, queues: Queues, nodes: str | None, **limits: Any) -> DrainReport:
    """Drain one database, or the nodes in turn; `limits` are those of App.drain."""
    settings = WorkerSettings(queues=parse_queues(app_queues(app) if queues is None else queues), notify=False)
    if nodes is not None:
        return await drain_nodes(app, _dsn(app, dsn), nodes, settings, **limits)
    return await _drain(app, _dsn(app, dsn), settings, **limits)
