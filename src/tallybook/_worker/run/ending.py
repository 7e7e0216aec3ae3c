"""The end of an attempt: maps a handler's result or exception to one of the finisher's verbs."""

import asyncio
import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tallybook._model.failure import describe, safe_text
from tallybook._model.outcome import Cancel, Dead, Outcome, Snooze
from tallybook._model.subject_outcome import Reject, SubjectOutcome
from tallybook._worker.finish.finisher import Finisher
from tallybook._worker.jobs import AnyTask, Running
from tallybook._worker.run.atomic import Ended
from tallybook._worker.run.children import ChildResult, FailedInChild, ProcessDied
from tallybook._worker.run.outcomes import LONGEST_REASON, Next, after_failure, end_of, given_up, put_off, rejected
from tallybook._worker.run.verbs import Postponed
from tallybook.errors import TallybookError, TransactionError

log = logging.getLogger("tallybook.worker")


@dataclass(eq=False)
class Ends:
    _finisher: Finisher
    keeps_error: bool = False
    """Whether to keep the first exception of a handler, for a drain; it keeps everything that its frames hold."""
    first_error: BaseException | None = None
    aborting: bool = False
    """A stop cancels handlers: their jobs are given back without a failure."""

    def returned(self, job: Running, known: AnyTask, value: Any) -> None:
        """End the attempt of a handler that returned, or raised an Outcome."""
        if isinstance(value, Outcome):
            self._outcome(job, known, value)
        elif isinstance(value, Ended):
            self._finisher.ended(job, value.verb, value.said, value.wake_in)
        elif job.in_doubt:
            verb = "ctx.complete" if job.own_end is None else "ctx.end"
            text = f"the handler returned, but the transaction in which it called {verb} is not committed"
            # It is a failure only if DoubtfulEnds finds that the transaction was not committed.
            error = TransactionError(text, hint="Commit it before the handler returns")
            error.no_retry = False  # nothing was committed
            self.failed(job, known, error, after_failure(job, known, error))
        else:
            if job.guard is not None and job.guard.timed_out:
                log.warning("%s %s completed after its deadline, when it was asked to stop", known.name, job.job_id)
            if isinstance(value, ChildResult):
                result = value.text if known.store_result else None
            else:
                result = None if value is None else known.result_text(value)
            self._finisher.complete(job, result)

    def failed(self, job: Running, known: AnyTask, error: BaseException, then: Next | None = None) -> None:
        job.raised = error
        described, then = describe(error, attempt=job.attempt, worker=job.worker_name), then or Next()
        self._finisher.fail(job, described, delay=then.delay, limit=known.max_attempts, final=then.final)

    def _outcome(self, job: Running, known: AnyTask, outcome: Outcome) -> None:
        match outcome:
            case Snooze():
                self._finisher.snooze(job, put_off(outcome))
            case Cancel():
                self._finisher.cancelled(job, safe_text(outcome.reason, LONGEST_REASON) or None)
            case Dead():
                self._finisher.fail(job, given_up(outcome, job.worker_name), delay=None, limit=None, final=True)
            case Reject():
                described, then = rejected(job, known, outcome)
                said = (known.name, job.job_id, job.attempt, described["message"])
                log.warning("%s %s: attempt %s was rejected: %s", *said)
                self._finisher.fail(job, described, delay=then.delay, limit=known.max_attempts, final=then.final)
            case Postponed():
                if not job.lost:
                    self._finisher.ended(job, "limit_take", "scheduled", timedelta(0))
            case SubjectOutcome():
                try:
                    end = end_of(job, known, outcome)
                except TallybookError as error:
                    self.raised(job, known, error)
                    return
                if end is None:
                    self._finisher.complete(job)
                elif isinstance(end, Dead):
                    self._outcome(job, known, end)
                else:
                    self._finisher.iterated(job, end)
            case _:
                raise TypeError(f"{type(outcome).__name__} is not Snooze, Cancel or Dead")

    def raised(self, job: Running, known: AnyTask, error: BaseException) -> None:
        """End the attempt of a handler that raised: cancelled, given back, crashed or failed."""
        if issubclass(type(error), asyncio.CancelledError):  # isinstance asks the error, which may raise anything
            if job.handle is not None:
                job.handle.uncancel()
            if job.cancel_reason is not None and not job.lost:
                self._finisher.cancelled(job, job.cancel_reason or None)
                return
            if self.aborting or job.lost:
                self._finisher.snooze(job, timedelta(0))
                return
        job.raised = error
        if type(error) is ProcessDied:
            log.error("%s %s: %s", known.name, job.job_id, error, extra={"event": "crashed", "job": job.job_id})
            self._finisher.crash(job, error.described(job))
            return
        if type(error) is FailedInChild:
            described, then = error.described, error.then or after_failure(job, known, error)
        else:
            described = describe(error, attempt=job.attempt, worker=job.worker_name)
            then = after_failure(job, known, error)
        if then.problem is not None:
            described["note"] = then.problem
        if self.keeps_error and self._finisher.first_failure is None:
            self.first_error = error
        log_failure(job, described)
        self._finisher.fail(job, described, delay=then.delay, limit=known.max_attempts, final=then.final)


def log_failure(job: Running, described: dict[str, Any]) -> None:
    log.warning(
        "%s %s: attempt %s failed: %s: %s",
        job.task_name, job.job_id, job.attempt, described["type"], described["message"],
        extra={"job": job.job_id, "task_name": job.task_name, "queue": job.queue, "attempt": job.attempt},
    )  # fmt: skip
