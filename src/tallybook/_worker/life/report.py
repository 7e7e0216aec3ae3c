"""What a worker did in its life."""

from __future__ import annotations

from dataclasses import dataclass

from tallybook._worker.finish.finisher import Finisher

__all__ = ["WorkerReport"]


@dataclass(frozen=True)
class WorkerReport:
    """What a worker did in its life."""

    completed: int
    failed: int
    """Attempts that failed and go on after a backoff."""
    dead: int
    released: int
    """Jobs that were given back unfinished at the stop."""
    abandoned: int = 0
    """Handlers that did not end after their deadline and the grace."""
    worn_out: bool = False
    """It stopped by itself, since too many abandoned handlers were left: start the process again."""
    snoozed: int = 0
    """Attempts that were put off, by their handlers or by a limit; they count as no attempts."""

    @classmethod
    def of(cls, finisher: Finisher, *, released: int, abandoned: int, worn_out: bool) -> WorkerReport:
        """The report of a worker with this finisher; `released`: jobs that were given back while they ran."""
        counts, failed = finisher.counts, finisher.failed
        return cls(
            completed=counts["completed"],
            failed=failed["scheduled"] + failed["available"],
            snoozed=counts["scheduled"] - failed["scheduled"],
            dead=counts["dead"],
            released=released + counts["available"] - failed["available"],
            abandoned=abandoned,
            worn_out=worn_out,
        )
