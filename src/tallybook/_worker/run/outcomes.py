"""What follows an attempt: after a failure another one and its time, or none; in a subject, its next iteration."""

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tallybook._db.ends import SubjectEnd, subject_end
from tallybook._model.backoff import Backoff, delay_after, from_json, is_final
from tallybook._model.failure import safe_text
from tallybook._model.outcome import Dead, Snooze
from tallybook._model.payload import encode
from tallybook._model.retry_after import retry_after
from tallybook._model.subject import subject_of
from tallybook._model.subject_outcome import Complete, Kill, Reject, SubjectOutcome
from tallybook._worker.jobs import AnyTask, Running
from tallybook.errors import ConfigError, NotASubject, PayloadError

log = logging.getLogger("tallybook.worker")

# "Forever" has to be an instant that PostgreSQL knows.
_LONGEST = timedelta(days=36_500)
LONGEST_REASON = 4000
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
    """Decide with the retry policy what follows this failure, no earlier than the error's Retry-After; never raise.

    If a user's policy raises, or returns nonsense, the server's own backoff applies.
    """
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


def put_off(outcome: Snooze) -> timedelta:
    """Return the delay that it asks for, from now on."""
    delay = outcome.delay if outcome.until is None else max(timedelta(0), outcome.until - datetime.now(UTC))
    return min(delay or timedelta(0), _LONGEST)


def given_up(outcome: Dead, worker: str) -> dict[str, Any]:
    message = safe_text(outcome.reason, LONGEST_REASON) or "the handler gave up"
    return {"type": "Dead", "message": message, "worker": worker}


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
        outcome = Kill(safe_text(outcome.reason, LONGEST_REASON))
    return subject_end(outcome, args, known.contract.version)


def rejected(job: Running, known: AnyTask, outcome: Reject) -> tuple[dict[str, Any], Next]:
    """Return the error to store, and what follows: the delay that the handler asks for, else by the retry policy."""
    message = safe_text(outcome.message, LONGEST_REASON)
    error: dict[str, Any] = {"type": "Reject", "message": message, "worker": job.worker_name}
    if outcome.details is not None:
        error["details"] = json.loads(details_text(outcome, known.name))
    if outcome.ref_id is not None:
        error["ref_id"] = outcome.ref_id
    return error, after_failure(job, known, outcome) if outcome.retry_in is None else Next(outcome.retry_in)


def details_text(outcome: Reject, task: str) -> str:
    """Return the details of a Reject as JSON text. Details that cannot be stored as JSON are stored as text."""
    try:
        return encode(outcome.details, task=task, what="details", max_bytes=_DETAILS_BYTES)
    except PayloadError:
        return encode(safe_text(outcome.details, _DETAILS_BYTES // 8), task=task, what="details")
