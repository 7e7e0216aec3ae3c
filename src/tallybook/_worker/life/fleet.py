"""One process for several nodes: a Worker for each, in one event loop.

The workers share slots, threads and lifespans, and do not wait for each other. If a node is down or slow, or refuses
its worker (an older schema), it is retried while the others work. The list of nodes is read again now and then. New
nodes get a worker, the workers of removed nodes stop, and limits are divided again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast, get_type_hints

from tallybook._db.link import Link, aside
from tallybook._db.nodes import Node, asked, chosen, nodes, numbered
from tallybook._db.policy import first_line
from tallybook._maintenance.service import ends_or, happens
from tallybook._model.at_node import At, at_node
from tallybook._model.rate import ConcurrencyRule, RateRule
from tallybook._task.catalogue import check_tasks
from tallybook._task.task import Owner
from tallybook._worker.claim.shares import Shares
from tallybook._worker.life import on_record
from tallybook._worker.life.drain import DrainReport, drain
from tallybook._worker.life.on_record import Part
from tallybook._worker.life.stopping import WorkerReport
from tallybook._worker.life.telemetry import Telemetry
from tallybook._worker.life.watchdog import Watchdog
from tallybook._worker.life.worker import Place, Worker
from tallybook._worker.run.calling import Common
from tallybook._worker.run.context import Context
from tallybook._worker.run.verbs import Verbs
from tallybook._worker.settings import LOOPBACK, WorkerSettings
from tallybook.errors import ConfigError, QueueUnavailable, SchemaError, UnknownNode

log = logging.getLogger("tallybook.worker")

Found: TypeAlias = tuple[Sequence[Node], Sequence[Node]]
"""All nodes, and the nodes that this process serves."""

AGAIN = 30.0
"""Seconds until the list of nodes is read again, and until a node that refused its worker is tried again."""


class Life:
    """The workers of one node, one after the other: mostly there is only one."""

    def __init__(self, fleet: Fleet, node: Node, part: Part) -> None:
        self._fleet = fleet
        self.node = node
        self.part = part
        self.worker: Worker | None = None
        self.error: Exception | None = None
        """The error that ended its last worker."""
        self.served = False
        """Whether any of its workers was registered."""
        self.stopping = asyncio.Event()
        self._context = contextvars.copy_context()
        self._context.run(at_node.set, At(node.name, node.dsn, fleet.dsn))
        self.task = asyncio.get_running_loop().create_task(
            self._run(), name=f"tallybook-node-{node.name}", context=self._context
        )

    async def _run(self) -> None:
        while not self.stopping.is_set():
            book = self._fleet.shares.book()
            try:
                place = Place(book, self._fleet.common, self._fleet.watchdog, self._fleet.wear_out)
                self.worker = Worker(self._fleet.app, self.node.dsn, self._fleet.each, part=self.part, place=place)
                self._fleet.reported(self.node.name, await self.worker.run())
                self.error = None
            except Exception as error:
                self.error = error
                command = f"`tallybook migrate --nodes {self.node.name}`"  # without --nodes: the database of the DSN
                text = first_line(error).removesuffix(".").replace("`tallybook migrate`", command)
                log.error("%s; trying this node again in %g s", text, AGAIN)
            finally:
                self.served |= bool(self.worker and self.worker.heartbeat and self.worker.heartbeat.worker_id)
                self.worker = None
                self._fleet.shares.leave(book)
            if self.error is not None:
                self._fleet.refused()
                await happens(self.stopping, AGAIN)

    def stop(self) -> None:
        self.stopping.set()
        if self.worker is not None:
            self._context.run(self.worker.stop)

    def told(self, part: Part) -> None:
        """Set the node's part of the limits and schedules from now on, without waiting until its server knows."""
        self.part = part
        if self.worker is not None:
            telling = self._take_part(self.worker)
            self._telling = asyncio.get_running_loop().create_task(telling, context=self._context)

    async def _take_part(self, worker: Worker) -> None:
        with contextlib.suppress(QueueUnavailable):  # the worker stops: the next one uses the part
            await worker.take_part(self.part)


class Fleet:
    """The worker of several nodes: `which` is "all", or names separated by commas. `run` lasts until `stop`."""

    def __init__(self, app: Owner, dsn: str, which: str, settings: WorkerSettings) -> None:
        _check(app, settings)
        check_tasks(app)
        self.app = app
        self.settings = settings
        self.each = replace(settings, metrics_port=None, metrics_host=LOOPBACK)
        self.shares = Shares(settings.queues)
        self.common = Common(app, settings)
        self.lives: dict[str, Life] = {}
        self.stopping = asyncio.Event()
        self.telemetry = Telemetry(settings, dsn, nodes=self.shown) if settings.metrics_port is not None else None
        self.dsn, self._which = dsn, which
        self._link = Link(dsn, settings.name)
        self._fatal: Exception | None = None
        self._worn_out = False
        self._reports: dict[str, WorkerReport] = {}

    async def run(self) -> WorkerReport:
        """Serve all nodes until stopped. ConfigError: a wrong list of nodes, or a limit too small to divide."""
        self.watchdog = Watchdog(asyncio.get_running_loop())
        async with self.telemetry or contextlib.nullcontext():
            self.watchdog.start()
            try:
                await self._live()
            except QueueUnavailable:
                if not self.stopping.is_set():
                    raise
            finally:
                self.watchdog.stop()
                tasks = [life.task for life in self.lives.values()]
                for task in tasks:  # some still run if this task was cancelled or has failed
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self.common.close()
                await self._link.close()
        if self._fatal is not None:
            raise self._fatal
        return replace(added(*self._reports.values()), worn_out=self._worn_out, nodes=self._reports)

    async def _live(self) -> None:
        found = await self._first()
        parts = parts_of(self.app, found[0])
        await self._open()
        self._tell(found[0], parts)
        while not self.stopping.is_set():
            await self._serve(found[1], parts)
            await happens(self.stopping, AGAIN)
            if self.stopping.is_set():
                break
            try:
                now = await self._looked(again=True)
                parts = parts_of(self.app, now[0])
            except Exception as error:  # its database is away, or it is wrong, or too long to divide a limit
                if not self.stopping.is_set():
                    log.warning("the list of nodes cannot be used, so the former one stays: %s", first_line(error))
                continue
            if _known(found[0]) != _known(now[0]):
                self._tell(now[0], parts)
            found = now
        await asyncio.gather(*(life.task for life in self.lives.values()))

    async def _first(self) -> Found:
        """Wait for the database that has the list. Raises ConfigError if two nodes have one number."""
        while True:
            try:
                return await self._looked()
            except UnknownNode as error:  # ConfigError: the supervisor does not start it again
                raise ConfigError("nodes", self._which, first_line(error)) from error
            except QueueUnavailable:
                if self.stopping.is_set():
                    raise
                await self._link.first()  # raises where waiting does not help

    async def _looked(self, *, again: bool = False) -> Found:
        """Return `_look`'s result. Raises QueueUnavailable at a stop, which does not wait for a silent server."""
        looking = asyncio.ensure_future(aside(self._look, again))
        try:
            await ends_or(looking, self.stopping)
        finally:
            looking.cancel()  # unless it is done
        if not looking.done():
            raise QueueUnavailable("the database of the list of nodes", "stopped")
        return looking.result()

    def _look(self, again: bool = False) -> Found:
        """Read the list. Raises ConfigError if two nodes have one number, for example after one was cloned."""
        every = nodes(self.dsn)  # a single reading: a node that is added between two would have a worker but no part
        numbered(every)
        return every, chosen(every, self._which, again=again)

    def _tell(self, every: Sequence[Node], parts: dict[str, Part]) -> None:
        home = next((node.name for node in every if node.home), None)
        log.info("%s nodes: %s; schedules of the code are on %s", len(every), ", ".join(parts), home or "none")
        if len(every) == 1:
            return
        rates, rooms = self.app._rate_rules.values(), self.app._concurrency_rules.values()
        rules: list[RateRule | ConcurrencyRule] = [*rates, *rooms]
        for rule in rules:
            if not rule.per_node:
                each = [rule.part(part.at, part.of).size for part in parts.values()]
                shown = ", ".join(f"{name} {size}" for name, size in zip(parts, each, strict=True))
                log.info("limit %r of %s is divided among the nodes: %s", rule.name, rule.size, shown)

    async def _open(self) -> None:
        """Open the lifespans, once for all nodes; a stop does not wait for them."""
        verbs = Verbs(self._link)
        verbs.loop = asyncio.get_running_loop()
        context = Context(self.common.state, verbs=verbs, app=cast(Any, self.app))
        opening = asyncio.create_task(self.common.open(context), name="tallybook-start")
        try:
            await ends_or(opening, self.stopping)
        finally:
            opening.cancel()  # unless it is done
        with contextlib.suppress(asyncio.CancelledError):
            await opening

    async def _serve(self, served: Sequence[Node], parts: dict[str, Part]) -> None:
        """Give each of these nodes a worker and its part; stop the workers of other nodes and of changed addresses."""
        wanted = {node.name: node for node in served}
        for name, life in list(self.lives.items()):
            if life.stopping.is_set() or name not in wanted or wanted[name].dsn != life.node.dsn:
                if not life.stopping.is_set():
                    log.info("node %s is no longer served", name)
                    life.stop()
                if not life.task.done():
                    wanted.pop(name, None)  # its worker ends first
                    continue
                del self.lives[name]
        for name, node in wanted.items():
            if (known := self.lives.get(name)) is None:
                self.reported(name, _NONE)
                self.lives[name] = Life(self, node, parts[name])
            else:
                known.told(parts[name])

    def shown(self) -> dict[str, tuple[str, Worker | None]]:
        """Return the address and the worker of each node, for the telemetry."""
        return {name: (life.node.dsn, life.worker) for name, life in list(self.lives.items())}

    def reported(self, name: str, report: WorkerReport) -> None:
        """Add the report of a node's worker to those of its former ones."""
        self._reports[name] = added(self._reports.get(name, _NONE), report)

    def refused(self) -> None:
        """Stop for good if every node has refused its worker and none ever served: waiting does not help then."""
        if self.lives and all(life.error is not None and not life.served for life in self.lives.values()):
            self._fatal = next(life.error for life in self.lives.values())
            self._stop_once()

    def wear_out(self) -> None:
        """Stop, to be started again: too many abandoned handlers are left."""
        self._worn_out = True
        self._stop_once()

    def stop(self) -> None:
        """Claim nothing more and finish the running jobs, on all nodes; on a second call, abort them."""
        again = self.stopping.is_set()
        self.stopping.set()
        self._link.giving_up.set()
        for life in self.lives.values():
            if again or not life.stopping.is_set():
                life.stop()

    def _stop_once(self) -> None:
        if not self.stopping.is_set():
            self.stop()


def parts_of(app: Owner, every: Sequence[Node]) -> dict[str, Part]:
    """Return the part of each node. Raises ConfigError for a limit that is too small to divide."""
    parts = {node.name: Part(at, len(every), node.home, node.number) for at, node in enumerate(every)}
    for part in parts.values():
        on_record.limits(app, part)
    return parts


async def drain_nodes(
    app: Owner,
    dsn: str,
    which: str,
    settings: WorkerSettings,
    max_jobs: int | None,
    max_seconds: float | None,
    *,
    raise_on_failure: bool,
) -> DrainReport:
    """Drain one node after the other: each gets all slots, and what remains of `max_jobs` and `max_seconds`.

    A node that is away when its turn comes, is lost until the limit, or has no schema that this release can use, is in
    the report, and the others are drained.
    """
    _check(app, settings)
    until = math.inf if max_seconds is None else time.monotonic() + max_seconds
    most = math.inf if max_jobs is None else max_jobs
    every = await aside(nodes, dsn)
    parts, total = parts_of(app, every), DrainReport(0, 0, 0, 0, 0, 0)
    for node in chosen(every, which):
        # Ask first: a drain without a time limit would wait for a node that is away.
        (answer,) = await aside(asked, [node], lambda conn: conn.execute("select").rowcount)
        error = answer.error
        if error is None and (jobs := most - total.processed) > 0 and (seconds := until - time.monotonic()) > 0:
            token = at_node.set(At(node.name, node.dsn, dsn))
            try:
                left = (None if max_jobs is None else int(jobs), None if max_seconds is None else seconds)
                at = app, node.dsn, settings
                total += await drain(*at, *left, raise_on_failure=raise_on_failure, part=parts[node.name])
            except (QueueUnavailable, SchemaError) as lost:
                error = first_line(lost)
            finally:
                at_node.reset(token)
        if error is not None:
            log.warning("node %s was not drained: %s", node.name, error)
            total = replace(total, unreachable=(*total.unreachable, node.name))
    return total


def _check(app: Owner, settings: WorkerSettings) -> None:
    """Raise ConfigError for settings that lead to one database only."""
    if settings.direct_dsn:
        raise ConfigError("direct_dsn", "(not shown)", "it leads to one node only", hint="Leave it out with --nodes")
    for task in app.tasks.values():
        if not task.atomic:
            continue
        if task.transaction == "django" or (app._sessions and "sqlalchemy" in task.transaction):
            hint = "Make the task not atomic, or run a worker for each node"
            raise ConfigError("nodes", task.name, "its transactions are begun by the program, on one node", hint=hint)


def _known(found: Sequence[Node]) -> list[tuple[str, str, bool]]:
    return [(node.name, node.state, node.home) for node in found]


_NONE = WorkerReport(0, 0, 0, 0)
_SUMS = [name for name, kind in get_type_hints(WorkerReport).items() if kind is int]


def added(*reports: WorkerReport) -> WorkerReport:
    return WorkerReport(**{name: sum(getattr(report, name) for report in reports) for name in _SUMS})
