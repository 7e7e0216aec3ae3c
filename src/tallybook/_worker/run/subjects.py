"""The end of a subject's iteration, from what its handler returned or raised."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tallybook._db.ends import SubjectEnd, subject_end
from tallybook._model.failure import safe_text
from tallybook._model.outcome import Complete, Dead, Kill, Reject, SubjectOutcome
from tallybook._model.payload import encode
from tallybook._model.subject import subject_of
from tallybook._worker.run.retrying import LONGEST_REASON
from tallybook.errors import NotASubject, PayloadError

if TYPE_CHECKING:
    from tallybook._worker.jobs import Running
    from tallybook._worker.run.served_task import ServedTask

_DETAILS_BYTES = 8_000


def end_of(job: Running, known: ServedTask, outcome: SubjectOutcome) -> SubjectEnd | Dead | None:
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


def rejection(job: Running, known: ServedTask, outcome: Reject) -> dict[str, Any]:
    message = safe_text(outcome.message, LONGEST_REASON)
    error: dict[str, Any] = {"type": "Reject", "message": message, "worker": job.worker_name}
    if outcome.details is not None:
        error["details"] = json.loads(details_text(outcome, known.name))
    if outcome.ref_id is not None:
        error["ref_id"] = outcome.ref_id
    return error


def details_text(outcome: Reject, task: str) -> str:
    """Return the details of a Reject as JSON text. Details that cannot be stored as JSON are stored as text."""
    try:
        return encode(outcome.details, task=task, what="details", max_bytes=_DETAILS_BYTES)
    except PayloadError:
        return encode(safe_text(outcome.details, _DETAILS_BYTES // 8), task=task, what="details")
