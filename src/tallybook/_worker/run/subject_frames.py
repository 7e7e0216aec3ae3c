"""How the outcome of a subject travels from a child process to its worker."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from tallybook._model.failure import safe_text
from tallybook._model.payload import encode
from tallybook._model.subject_outcome import Complete, Drop, Kill, Reject, Reschedule, SubjectOutcome
from tallybook._worker.run.subjects import details_text

__all__ = ["from_frame", "to_frame"]


def to_frame(outcome: SubjectOutcome, task: str) -> dict[str, Any]:
    """As JSON values. PayloadError for args that cannot be stored; whether they fit the task its worker finds out."""
    frame: dict[str, Any] = {"kind": type(outcome).__name__}
    if outcome.new_args is not None:
        frame["args"] = json.loads(encode(outcome.new_args, task=task))
    match outcome:
        case Reschedule():
            run_at, run_in = outcome.run_at, outcome.run_in
            frame["run_at"] = None if run_at is None else run_at.isoformat()
            frame["run_in"] = None if run_in is None else _parts(run_in)
        case Kill():
            frame["reason"] = safe_text(outcome.reason)
        case Reject():
            frame["message"] = safe_text(outcome.message)
            frame["details"] = json.loads(details_text(outcome, task))
            frame["ref_id"] = outcome.ref_id
            frame["retry_in"] = None if outcome.retry_in is None else _parts(outcome.retry_in)
        case Complete() | Drop():
            pass
        case _:
            raise TypeError(f"{type(outcome).__name__} is none of Reschedule, Complete, Drop, Kill, Reject")
    return frame


def from_frame(frame: dict[str, Any]) -> SubjectOutcome:
    """The outcome again."""
    args = frame.get("args")
    match frame["kind"]:
        case "Reschedule":
            if frame["run_at"] is not None:
                return Reschedule(datetime.fromisoformat(frame["run_at"]), args=args)
            return Reschedule(timedelta(*frame["run_in"]), args=args)
        case "Complete":
            return Complete(args=args)
        case "Drop":
            return Drop()
        case "Kill":
            return Kill(frame["reason"], args=args)
        case _:
            retry_in = None if frame["retry_in"] is None else timedelta(*frame["retry_in"])
            return Reject(frame["message"], frame["details"], ref_id=frame["ref_id"], retry_in=retry_in)


def _parts(duration: timedelta) -> list[int]:
    return [duration.days, duration.seconds, duration.microseconds]
