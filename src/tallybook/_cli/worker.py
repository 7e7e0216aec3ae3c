"""tallybook worker: run jobs until stopped."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tallybook._cli.common import dsn_option, duration, queues_option, text
from tallybook._cli.database import check_schema, conninfo
from tallybook._cli.loading import app_option, load_app
from tallybook._db.link import Link, aside
from tallybook._model.durations import format_duration
from tallybook._task.catalogue import check_tasks
from tallybook._worker import logs
from tallybook._worker.entry import app_queues, demand_tasks, prepared
from tallybook._worker.life import signals, supervisor
from tallybook._worker.life.stopping import WorkerReport
from tallybook._worker.life.telemetry import Telemetry
from tallybook._worker.run import children
from tallybook._worker.settings import WorkerSettings, parse_queues
from tallybook.errors import ConfigError

if TYPE_CHECKING:
    from tallybook._app import App

T = TypeVar("T")
log = logging.getLogger("tallybook.worker")
# Seconds that calls of asyncio.to_thread may still run after a stop.
_LAST_CALLS = 1.0
_AFTER_STOP = WorkerSettings.abort_timeout + timedelta(seconds=10)
_LEVELS = click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False)


@click.command()
@app_option
@dsn_option
@queues_option
@click.option("--nodes", metavar="LIST", help="Serve these nodes: all, or names like north,south. [one database]")
@click.option("--processes", type=click.IntRange(1, 512), default=1, show_default=True, help="Number of processes.")
@click.option("--name", help="Name of the worker. [host:pid:random]")
@click.option("--no-notify", is_flag=True, help="Poll only: keep no session open for notifications.")
@click.option("--no-maintenance", is_flag=True, help="Run jobs only; other workers must do the maintenance.")
@click.option(
    "--direct-dsn", metavar="DSN", type=text, help="DSN without the pooler, for notifications. [TALLYBOOK_DIRECT_DSN]"
)
@click.option("--poll", type=duration, help="Poll interval when idle. [1 s]")
@click.option("--slot-pause", type=duration, help="Pause of a slot after each job. [0 s]")
@click.option("--children", type=click.IntRange(1), help="Maximum child processes for process=True. [one per slot]")
@click.option("--heartbeat", type=duration, help="Heartbeat interval. [10 s]")
@click.option("--lease", type=duration, help="Time without a heartbeat before the worker is suspected dead. [30 s]")
@click.option("--stop-timeout", type=duration, help="How long a stop waits for running jobs. [25 s]")
@click.option("--metrics-port", type=click.IntRange(0, 65_535), help="Port for /metrics, /healthz and /readyz. [none]")
@click.option("--metrics-host", metavar="ADDRESS", help="Address for the metrics; there is no password. [127.0.0.1]")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-level", type=_LEVELS, default="info", show_default=True)
def worker(
    target: str, dsn: str | None, queues: str | None, nodes: str | None, processes: int, name: str | None, **more: Any
) -> None:
    """Run jobs until stopped.

    SIGTERM or Ctrl-C lets running jobs finish; a second one returns them to the queue.

    Exit code 0 after a stop, 2 if an option or setting is wrong or if the schema is missing or does not fit, 3 if a
    restart is needed because too many handlers did not end in time, 1 for any other error.
    """
    patience = (more["stop_timeout"] or WorkerSettings.stop_timeout) + _AFTER_STOP
    supervisor.watch_parent(patience)
    inherited = os.environ.pop(supervisor.DSN_OF_PARENT, None)
    dsn = dsn or inherited
    logs.setup(more.pop("log_format"), more.pop("log_level"))
    given: dict[str, Any] = {"name": name, "queues": parse_queues(queues), **more}
    given |= {word: not given.pop(f"no_{word}") for word in ("notify", "maintenance")}
    given["direct_dsn"] = conninfo(more["direct_dsn"]) if more["direct_dsn"] else None
    settings = WorkerSettings(**{option: value for option, value in given.items() if value is not None})
    metrics_port: int | None = more["metrics_port"]
    if dsn:
        conninfo(dsn)  # an error here, not N times below
    if metrics_port and metrics_port + processes - 1 > 65_535:
        raise ConfigError("metrics_port", metrics_port, f"leaves no port for each of {processes} processes")
    if processes > 1:
        whole = supervisor.supervise(_child_args(), name, processes, patience=patience, metrics_port=metrics_port)
        sys.exit(asyncio.run(whole))
    app = load_app(target)
    demand_tasks(app)
    for task in app.tasks.values():
        _ = task.wants_context  # SignatureError now, not at its first job
        children.check(task)
    check_tasks(app)
    if dsn:
        app.dsn = dsn  # a handler that enqueues with the app uses the database of its job
    if queues is None:
        settings = replace(settings, queues=parse_queues(app_queues(app)))  # the queues of all tasks, and default
    stop = signals.Stop()
    sys.exit(_live(_run(app, app.conninfo(), settings, nodes, stop), stop))


def _child_args() -> list[str]:
    """Return this command line's arguments without --processes, --name and --metrics-port, which differ per child."""
    context = click.get_current_context()
    words: list[str] = []
    for param in context.command.params:
        value = context.params.get(param.name or "")
        if param.name in ("processes", "name", "metrics_port") or value in (None, False, ()):
            continue
        words.append(param.opts[-1])
        if value is not True:
            words.append(format_duration(value) if isinstance(value, timedelta) else str(value))
    return words


def _live(run: Coroutine[Any, Any, int], stop: signals.Stop) -> int:
    """Run the worker on an event loop of its own; return the exit code.

    SystemExit in any asyncio task ends a loop. If that was not the worker's own task, the loop continues until the
    worker has stopped: the jobs of other handlers get their ends.
    """
    threads = _Threads()
    with asyncio.Runner() as runner:
        loop, code = runner.get_loop(), 0
        loop.set_default_executor(threads)
        main = loop.create_task(run)
        while not main.done():
            try:
                code = loop.run_until_complete(main) or code
            except SystemExit:
                if main.done():
                    raise
                log.critical("SystemExit was raised in an asyncio task: the worker stops", exc_info=True)
                if not code:
                    code = 1
                    loop.call_soon(stop)
    if threads.busy:  # the interpreter would wait for them
        log.warning("calls of asyncio.to_thread still run: the process ends without them")
        atexit._run_exitfuncs()  # flush logging, and what libraries have still to send
        with suppress(Exception):  # a closed pipe
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


class _Threads(ThreadPoolExecutor):
    """The threads of asyncio.to_thread. A shutdown waits only for a moment: their calls may never end.

    Handlers may use them all for long. The worker's connections do not wait for them: host names have a thread of
    their own.
    """

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="asyncio")
        self._names = ThreadPoolExecutor(1, "tallybook-names")

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if fn is socket.getaddrinfo:
            return self._names.submit(fn, *args, **kwargs)
        return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._names.shutdown(wait=False, cancel_futures=True)
        super().shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + _LAST_CALLS
        while wait and self.busy and time.monotonic() < until:
            time.sleep(0.01)

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads | self._names._threads)


async def _run(app: App, dsn: str, settings: WorkerSettings, nodes: str | None, stop: signals.Stop) -> int:
    with signals.stop_on(signals.BOTH, stop):
        if nodes is None:  # with --nodes each node waits separately
            await _reachable(dsn, settings, stop)
        if stop.told:
            log.info("stopped before it started")
            return 0
        worker = prepared(app, dsn=dsn, nodes=nodes, **vars(settings))
        stop.target = worker.stop
        report = await worker.run()
    each = "".join(f"; {name}: {_said(found)}" for name, found in report.nodes.items())
    log.info("stopped: %s%s", _said(report), each, extra={"event": "stopped"})
    return supervisor.WORN_OUT if report.worn_out else 0


def _said(report: WorkerReport) -> str:
    ends = f"{report.completed} completed, {report.failed} failed, {report.snoozed} snoozed, {report.dead} dead"
    return f"{ends}, {report.released} given back"


async def _reachable(dsn: str, settings: WorkerSettings, stop: signals.Stop) -> None:
    """Wait for the server without a limit and check its schema; return early on a stop.

    Meanwhile it serves probes: the process is alive, but not ready.
    """
    link = Link(dsn, settings.name)

    async def first() -> None:
        await link.first()
        await aside(check_schema, dsn)

    async with nullcontext() if settings.metrics_port is None else Telemetry(settings, dsn):
        waiting = asyncio.ensure_future(first())
        stop.target = waiting.cancel
        try:
            await waiting
        except asyncio.CancelledError:
            if not stop.told:
                raise
        finally:
            await link.close()
