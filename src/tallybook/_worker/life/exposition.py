"""The metrics that a worker shows, of itself and of the database."""

from __future__ import annotations

from typing import Protocol

from tallybook._db.link import Link
from tallybook._model.exposition import Sample
from tallybook._worker.claim.claimer import Claimer
from tallybook._worker.finish.finisher import Finisher
from tallybook._worker.jobs import Book
from tallybook._worker.life.watchdog import Watchdog
from tallybook._worker.run.runner import Runner
from tallybook._worker.settings import WorkerSettings

_ENDS = ("completed", "scheduled", "available", "cancelled", "dead", "moved", "refused")


class ShownWorker(Protocol):
    """A Worker, as its endpoint reads it."""

    settings: WorkerSettings
    book: Book
    claimer: Claimer
    runner: Runner
    finisher: Finisher
    links: dict[str, Link]
    watchdog: Watchdog | None

    def why_not_ready(self) -> str: ...


# Called from another thread than the loop's: each of these is one read of a number, or an atomic copy.


def of_the_process(worker: ShownWorker) -> dict[str, list[Sample]]:
    """Return the metrics that the workers of one process share."""
    slots, free = worker.settings.queues, dict(worker.book.free)
    return {
        "tallybook_worker_slots": [((queue,), float(n)) for queue, n in slots.items()],
        "tallybook_worker_slots_used": [((queue,), float(n - free[queue])) for queue, n in slots.items()],
        "tallybook_worker_loop_blocked_total": [((), float(worker.watchdog.blocked if worker.watchdog else 0))],
    }


def of_the_node(worker: ShownWorker) -> dict[str, list[Sample]]:
    """Return a worker's counts for its database."""
    ends = dict(worker.finisher.counts)
    return {
        "tallybook_worker_jobs_claimed_total": [((), float(worker.claimer.claimed))],
        "tallybook_worker_attempts_ended_total": [
            ((end,), float(ends.get(end, 0))) for end in sorted({*_ENDS, *ends})
        ],
        "tallybook_worker_ends_waiting": [((), float(worker.finisher.waiting))],
        "tallybook_worker_handlers_abandoned": [((), float(worker.runner.still_abandoned))],
        "tallybook_worker_connection_errors_total": [((what,), float(link.errors)) for what, link in worker.links.items()],
    }  # fmt: skip
