"""What follows a failure: another attempt and its time, or none."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tallybook._model.backoff import Backoff, delay_after, from_json, is_final
from tallybook._model.failure import safe_text
from tallybook._model.outcome import Dead, Reject, Snooze
from tallybook._model.retry_after import retry_after
from tallybook._worker.jobs import Running
from tallybook._worker.run.served_task import ServedTask
from tallybook.errors import ConfigError

log = logging.getLogger("tallybook.worker")

# "Forever" has to be an instant that PostgreSQL knows.
_LONGEST = timedelta(days=36_500)
LONGEST_REASON = 4000


@dataclass(frozen=True, slots=True)
class Next:
    """What follows. `final`: no other attempt. Else one after `delay`; None: after the server's own backoff.

    `problem`: why the policy that the job names was not used, for people who read the failure.
    """

    delay: timedelta | None = None
    final: bool = False
    problem: str | None = None


_NEVER = Next(final=True)


def _policy(job: Running, known: ServedTask) -> tuple[Backoff, str | None]:
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


def after_failure(job: Running, known: ServedTask, error: BaseException) -> Next:
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


def after_rejection(job: Running, known: ServedTask, outcome: Reject) -> Next:
    """Return the delay that the handler asks for, else apply the retry policy."""
    return after_failure(job, known, outcome) if outcome.retry_in is None else Next(outcome.retry_in)
