"""The end of an attempt: maps a handler's result or exception to one of the finisher's verbs.

After a failure there is another attempt and its time, or none; in a subject, its next iteration.
"""

import asyncio
import json
import logging
import signal
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tallybook._db.ends import VERBS, SubjectEnd, subject_end
from tallybook._model.backoff import Backoff, delay_after, from_json, is_final
from tallybook._model.failure import describe, safe_text
from tallybook._model.outcome import Cancel, Complete, Dead, Kill, Outcome, Reject, Snooze, SubjectOutcome
from tallybook._model.payload import encode
from tallybook._model.retry_after import retry_after
from tallybook._model.subject import subject_of
from tallybook._worker.finish.finisher import Finisher, How, cancel, crash, fail, snooze
from tallybook._worker.jobs import AnyTask, Running
from tallybook._worker.run.verbs import Postponed
from tallybook.errors import ConfigError, NotASubject, PayloadError, TallybookError, TransactionError

log = logging.getLogger("tallybook.worker")

# "Forever" has to be an instant that PostgreSQL knows.
_LONGEST = timedelta(days=36_500)
_LONGEST_REASON = 4000
_DETAILS_BYTES = 8_000


@dataclass(frozen=True, slots=True)
class Next:
    """What follows. `final`: no other attempt. Else one after `delay`; None: after the server's own backoff.

    `problem`: why the policy that the job names was not used, for people who read the failure.
    """

    delay: timedelta | None = None
    final: bool = False
    problem: str | None = None


_NEVER = Next(final=True)


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of an atomic handler's run for the runner: its end is in the database."""

    verb: str
    said: str
    wake_in: timedelta | None = None


@dataclass(frozen=True, slots=True)
class ChildResult:
    """A handler's result in its process, as JSON text, or "!" and the reason for having none; None: nothing."""

    text: str | None


class FailedInChild(Exception):
    """A handler's exception in its process; `described` is the part that is stored.

    `then` is what follows, if the process decided it: a policy may look at the exception itself. Otherwise
    `retry_after` is the wait that the exception asks for, in seconds.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        self.described: dict[str, Any] = answer["error"]
        super().__init__(f"{self.described.get('type')}: {self.described.get('message')}")
        self.retry_after: float | None = answer.get("retry_after")
        self.then: Next | None = None
        if (then := answer.get("then")) is not None:
            seconds = then["delay"]
            self.then = Next(None if seconds is None else timedelta(seconds=seconds), then["final"], then["problem"])


def exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class ProcessDied(Exception):
    """The process died while it ran its job: `code` is its exit code, or the negative number of the signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"its process {exit_text(code)}")
        self.code = code

    def described(self, job: Running) -> dict[str, Any]:
        return {"type": "ProcessDied", "message": str(self), "exit_code": self.code, "worker": job.worker_name}


def _policy(job: Running, known: AnyTask) -> tuple[Backoff, str | None]:
    """Return the job's own policy, else its task's. If the job's policy is invalid, the task's and the problem."""
    said = job.options.get("retry") if job.options else None
    if said is None:
        return known.retry, None
    try:
        return (known.app._policy(said) if isinstance(said, str) else from_json(said)), None
    except ConfigError as error:  # any program may have written the row
        problem = f"the retry policy that the job asks for is not used: {error}"
        log.error("%s %s: %s", known.name, job.job_id, problem)
        return known.retry, problem


def after_failure(job: Running, known: AnyTask, error: BaseException) -> Next:
    """Return what follows, by the retry policy (if it fails, the server's) and the error's Retry-After; never raise."""
    if is_final(error, known.no_retry):
        return _NEVER
    delay: timedelta | None = None
    problem: str | None = None
    try:
        policy, problem = _policy(job, known)
        delay = delay_after(policy, job.failures + 1, error)
    except BaseException:  # even sys.exit() in it: this runs on the worker's loop
        log.exception("the retry policy of task %r failed", known.name)
    else:
        if delay is None:
            return Next(final=True, problem=problem)
        if not isinstance(delay, timedelta):
            log.error("the retry policy of task %r returned a %s, not a timedelta", known.name, type(delay).__name__)
            delay = None
    wait = retry_after(error, datetime.now(UTC))
    if wait is not None:
        # With a broken policy, the server's backoff would ignore the wait.
        delay = wait if delay is None else max(delay, wait)
    return Next(None if delay is None else min(max(delay, timedelta(0)), _LONGEST), problem=problem)


def end_of(job: Running, known: AnyTask, outcome: SubjectOutcome) -> SubjectEnd | Dead | None:
    """Return the end that an outcome other than Reject asks for; None: completed, like a handler that returns nothing.

    An ordinary job may also end with Complete and Kill, which mean the same there. Raises NotASubject for other
    outcomes, and SignatureError and PayloadError for new args that do not fit the task.
    """
    new_args = outcome.new_args
    if subject_of(job.options) is None:
        if new_args is None and isinstance(outcome, Kill):
            return Dead(outcome.reason)
        if new_args is not None or not isinstance(outcome, Complete):
            name = type(outcome).__name__
            raise NotASubject(job.job_id, name if new_args is None else f"{name}(args=...)")
    args = None
    if new_args is not None:
        args = encode(known.args.bind_named(new_args), task=known.name)
        known.args.load(json.loads(args))  # what a row holds is what the next iteration can read
    if isinstance(outcome, Complete) and args is None:
        return None
    if isinstance(outcome, Kill):
        outcome = Kill(safe_text(outcome.reason, _LONGEST_REASON))
    return subject_end(outcome, args, known.contract.version)


def how_to_end(job: Running, known: AnyTask, outcome: Outcome) -> How | None:
    """Return the verb for an outcome; None: completed. Raises the errors of `end_of`."""
    match outcome:
        case Snooze():
            delay = outcome.delay if outcome.until is None else max(timedelta(0), outcome.until - datetime.now(UTC))
            return snooze(min(delay or timedelta(0), _LONGEST))
        case Cancel():
            return cancel(safe_text(outcome.reason, _LONGEST_REASON) or None)
        case Dead():
            message = safe_text(outcome.reason, _LONGEST_REASON) or "the handler gave up"
            return fail({"type": "Dead", "message": message, "worker": job.worker_name}, final=True)
        case Reject():
            error: dict[str, Any] = {"type": "Reject", "message": safe_text(outcome.message, _LONGEST_REASON)}
            error["worker"] = job.worker_name
            if outcome.details is not None:
                error["details"] = json.loads(details_text(outcome, known.name))
            if outcome.ref_id is not None:
                error["ref_id"] = outcome.ref_id
            then = after_failure(job, known, outcome) if outcome.retry_in is None else Next(outcome.retry_in)
            return fail(error, then.delay, known.max_attempts, final=then.final)
        case SubjectOutcome():
            end = end_of(job, known, outcome)
            if isinstance(end, Dead):
                return how_to_end(job, known, end)
            return None if end is None else How(end.verb, VERBS[end.verb], end.values, end.wake_in)
        case _:
            raise TypeError(f"{type(outcome).__name__} is not Snooze, Cancel or Dead")


def details_text(outcome: Reject, task: str) -> str:
    """Return the details of a Reject as JSON text. Details that cannot be stored as JSON are stored as text."""
    try:
        return encode(outcome.details, task=task, what="details", max_bytes=_DETAILS_BYTES)
    except PayloadError:
        return encode(safe_text(outcome.details, _DETAILS_BYTES // 8), task=task, what="details")


@dataclass(eq=False)
class Ends:
    _finisher: Finisher
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
        self._finisher.end(job, fail(described, then.delay, known.max_attempts, final=then.final))

    def _outcome(self, job: Running, known: AnyTask, outcome: Outcome) -> None:
        if isinstance(outcome, Postponed):
            if not job.lost:
                self._finisher.ended(job, "limit_take", "scheduled", timedelta(0))
            return
        try:
            how = how_to_end(job, known, outcome)
        except TallybookError as error:
            self.raised(job, known, error)
            return
        if isinstance(outcome, Reject) and how is not None and how.error is not None:
            said = (known.name, job.job_id, job.attempt, how.error["message"])
            log.warning("%s %s: attempt %s was rejected: %s", *said)
        self._finisher.complete(job) if how is None else self._finisher.end(job, how)

    def raised(self, job: Running, known: AnyTask, error: BaseException) -> None:
        """End the attempt of a handler that raised: cancelled, given back, crashed or failed."""
        if issubclass(type(error), asyncio.CancelledError):  # isinstance asks the error, which may raise anything
            if job.handle is not None:
                job.handle.uncancel()
            if job.cancel_reason is not None and not job.lost:
                self._finisher.end(job, cancel(job.cancel_reason or None))
                return
            if self.aborting or job.lost:
                self._finisher.end(job, snooze(timedelta(0)))
                return
        job.raised = error
        if type(error) is ProcessDied:
            log.error("%s %s: %s", known.name, job.job_id, error, extra={"event": "crashed", "job": job.job_id})
            self._finisher.end(job, crash(error.described(job)))
            return
        if type(error) is FailedInChild:
            described, then = error.described, error.then or after_failure(job, known, error)
        else:
            described = describe(error, attempt=job.attempt, worker=job.worker_name)
            then = after_failure(job, known, error)
        if then.problem is not None:
            described["note"] = then.problem
        log_failure(job, described)
        self._finisher.end(job, fail(described, then.delay, known.max_attempts, final=then.final))


def log_failure(job: Running, described: dict[str, Any]) -> None:
    log.warning(
        "%s %s: attempt %s failed: %s: %s",
        job.task_name, job.job_id, job.attempt, described["type"], described["message"],
        extra={"job": job.job_id, "task_name": job.task_name, "queue": job.queue, "attempt": job.attempt},
    )  # fmt: skip
