"""The endpoint of a worker of several nodes: one port, and each node's metrics with its name as the label `node`."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeAlias

from tallybook._model.exposition import Sample, Shown, of_nodes, of_the_database, text
from tallybook._worker.life.telemetry import Database, ShownWorker, Telemetry, of_the_node, of_the_process
from tallybook._worker.settings import WorkerSettings

Nodes: TypeAlias = "Mapping[str, tuple[str, ShownWorker | None]]"
"""The address of each node, and its worker if it has one now."""


class FleetTelemetry(Telemetry):
    """Ready while any node is. A node that is away is named, and delays a scrape by its time limit at most."""

    def __init__(self, settings: WorkerSettings, dsn: str, nodes: Callable[[], Nodes]) -> None:
        super().__init__(settings, dsn)
        self._nodes = nodes
        self._databases: dict[str, tuple[str, Database, Shown]] = {}

    def why_not_ready(self) -> str:
        """Return why no node takes jobs; empty: some node does."""
        if why := self.why_not_alive():
            return why
        found = {name: _why_not(worker) for name, (_, worker) in self._nodes().items()}
        if not all(found.values()):
            return ""
        return "; ".join(f"{name}: {why}" for name, why in found.items()) or "no list of nodes yet"

    async def _metrics(self) -> str:
        nodes = self._nodes()
        for name, (dsn, _) in nodes.items():
            if name not in self._databases or self._databases[name][0] != dsn:
                self._databases[name] = (dsn, Database(dsn, self._settings.name), Shown())
        asked = [self._databases[name] for name in nodes]
        numbers = await asyncio.gather(*(database.numbers() for _, database, _ in asked))
        found: dict[str, dict[str, list[Sample]]] = {}
        for (name, (_, worker)), (_, _, shown), answer in zip(nodes.items(), asked, numbers, strict=True):
            found[name] = of_the_database(answer, shown) | (of_the_node(worker) if worker else {})
            found[name]["tallybook_worker_ready"] = [((), float(not _why_not(worker)))]
        first = next((worker for _, worker in nodes.values() if worker), None)
        return text(of_nodes(found) | self._of_itself() | (of_the_process(first) if first else {}))

    async def _close_databases(self) -> None:
        await super()._close_databases()
        for _, database, _ in self._databases.values():
            await database.close()


def _why_not(worker: ShownWorker | None) -> str:
    return worker.why_not_ready() if worker else "no worker now: see the log"
