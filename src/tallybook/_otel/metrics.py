"""The metrics: what this process sends and runs, by the messaging conventions, and the jobs in the database."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from tallybook._db import numbers
from tallybook._db.driver import Error
from tallybook._db.numbers import COLUMNS, MOST, OTHERS, STATES, Numbers, Shown
from tallybook._db.policy import first_line

log = logging.getLogger("tallybook.telemetry")

# In seconds, from the conventions.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
Labels = dict[str, str]


class Metrics:
    """Counters and histograms of this process; gauges of the database, while a worker runs in it."""

    def __init__(self, meter: Meter) -> None:
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Jobs that this process has tried to enqueue."
        )
        self._took = meter.create_histogram(
            "messaging.client.operation.duration", "s", "How long enqueuing took.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )  # fmt: skip
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Attempts that this process has started."
        )
        self._processed = meter.create_histogram(
            "messaging.process.duration", "s", "How long handlers ran.", explicit_bucket_boundaries_advisory=_BUCKETS
        )
        meter.create_observable_gauge("tallybook.jobs", [self._jobs], "{job}", "Jobs in this state, in the database.")
        meter.create_observable_gauge(
            "tallybook.oldest_job.age", [self._ages], "s", "How long the oldest job in this state has been due to run."
        )
        self._known: set[tuple[str, str]] = set()
        self._shown: defaultdict[str | None, Shown] = defaultdict(Shown)
        self._workers: dict[str, tuple[str | None, str]] = {}
        """The node and the DSN of each worker, by its name."""
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._found: dict[str | None, Numbers] = {}
        """By node; the key is None with one database."""
        self._away: set[str | None] = set()

    def sent(self, jobs: Mapping[tuple[str, str], int], seconds: float, error: str | None) -> None:
        """Count jobs of these queues and tasks that one statement enqueued."""
        failed = {"error.type": error} if error else {}
        for (queue, task), count in jobs.items():
            self._sent.add(count, {**self._labels("send", queue, task), **failed})
        queues = {queue for queue, _ in jobs}
        at = self._labels("send", queues.pop() if len(queues) == 1 else None, None)
        self._took.record(seconds, {**at, **failed})

    def started(self, queue: str, task: str) -> None:
        self._consumed.add(1, self._labels("process", queue, task))

    def ended(self, queue: str, task: str, seconds: float, error: str | None) -> None:
        labels = self._labels("process", queue, task)
        self._processed.record(seconds, {**labels, "error.type": error} if error else labels)

    def _labels(self, operation: str, queue: str | None, task: str | None) -> Labels:
        if queue is not None and (pair := (queue, task or "")) not in self._known:
            if len(self._known) < 2 * MOST:  # with and without the task
                self._known.add(pair)
            else:
                queue, task = OTHERS, task and OTHERS
        labels = attributes(operation, queue)
        return labels if task is None else {**labels, "tallybook.task": task}

    def opened(self, dsn: str, name: str, node: str | None = None) -> None:
        self._workers[name] = (node, dsn)

    def closed(self, name: str) -> None:
        self._workers.pop(name, None)

    def _jobs(self, options: CallbackOptions) -> Iterable[Observation]:
        at = [(state, COLUMNS.index(state)) for state in STATES]
        for node, found in self._numbers().items():
            for (queue, task), row in self._shown[node].counts(found).items():
                labels = {"messaging.destination.name": queue, "tallybook.task": task, **_of(node)}
                for state, index in at:
                    yield Observation(row[index], {**labels, "tallybook.state": state})

    def _ages(self, options: CallbackOptions) -> Iterable[Observation]:
        for node, found in self._numbers().items():
            for (queue, state), age in self._shown[node].ages(found).items():
                yield Observation(age, {"messaging.destination.name": queue, "tallybook.state": state, **_of(node)})

    def _numbers(self) -> dict[str | None, Numbers]:
        """Return numbers at most a second old. Asks in the thread that reads the metrics, over its own connections."""
        with self._lock:
            nodes = {node: (dsn, name) for name, (node, dsn) in list(self._workers.items())}
            if nodes and time.monotonic() - self._asked_at >= numbers.FRESH:
                asked = {node: self._ask(node, *at) for node, at in nodes.items()}
                self._found = {node: found for node, found in asked.items() if found is not None}
                self._asked_at = time.monotonic()
            return self._found if nodes else {}

    def _ask(self, node: str | None, dsn: str, name: str) -> Numbers | None:
        """Return one database's answer; None, and one line in the log, if it does not answer."""
        try:
            found = numbers.ask_sync(dsn, name)
        except (Error, OSError) as error:
            if node not in self._away:
                who = f"node {node}" if node else "the database"
                log.warning("telemetry: %s does not answer: %s", who, first_line(error))
            self._away.add(node)
            return None
        self._away.discard(node)
        return found


def attributes(operation: str, queue: str | None) -> dict[str, Any]:
    """Return what spans and metrics of an operation have in common."""
    words = {"messaging.operation.name": operation, "messaging.operation.type": operation}
    place = {} if queue is None else {"messaging.destination.name": queue}
    return {"messaging.system": "tallybook", **words, **place}


def _of(node: str | None) -> Labels:
    return {"tallybook.node": node} if node else {}
