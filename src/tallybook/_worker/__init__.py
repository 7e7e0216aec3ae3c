"""The worker: one claimer, one runner, one finisher, one heartbeat, and the upkeep that any worker does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tallybook._worker.drain import DrainReport
from tallybook._worker.drain import drain as _drain
from tallybook._worker.settings import WorkerSettings, app_queues, parse_queues
from tallybook._worker.worker import Worker, WorkerReport, signals

if TYPE_CHECKING:
    from tallybook._app import App

__all__ = ["DrainReport", "WorkerReport", "WorkerSettings", "drain", "run_worker"]


def _dsn(app: App, dsn: str | None) -> str:
    if dsn is not None:
        app.dsn = dsn  # what its handlers enqueue by the app goes to the same database
    return app.conninfo(dsn)


def _served(app: App, queues: Mapping[str, int] | Iterable[str] | str | None) -> dict[str, int]:
    """What was asked for, else every queue that the app's tasks name, and default."""
    return parse_queues(app_queues(app) if queues is None else queues)


async def run_worker(
    app: App,
    *,
    dsn: str | None = None,
    queues: Mapping[str, int] | Iterable[str] | str | None = None,
    install_signals: bool = True,
    **options: Any,
) -> WorkerReport:
    """Run a worker in this process until SIGTERM or SIGINT; `options` are those of WorkerSettings."""
    worker = Worker(app, _dsn(app, dsn), WorkerSettings(queues=_served(app, queues), **options))
    if not install_signals:
        return await worker.run()
    with signals(worker):
        return await worker.run()


async def drain(
    app: App,
    *,
    dsn: str | None = None,
    queues: Mapping[str, int] | Iterable[str] | str | None = None,
    max_jobs: int | None = None,
    max_seconds: float | timedelta | None = None,
) -> DrainReport:
    """Run all that is due, then return; never waits for what is due later. At most so many jobs, so many seconds."""
    seconds = max_seconds.total_seconds() if isinstance(max_seconds, timedelta) else max_seconds
    settings = WorkerSettings(queues=_served(app, queues), notify=False)
    return await _drain(app, _dsn(app, dsn), settings, max_jobs, seconds)
