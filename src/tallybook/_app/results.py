"""app.result: wait for a job's end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tallybook._db import filters
from tallybook._db.verb import Pause, Steps
from tallybook._model.durations import parse_duration
from tallybook._task import Task
from tallybook.errors import JobCancelled, JobDied, ResultMissing, ResultTimeout

_FIRST_LOOK, _SLOWEST_LOOK = 0.01, 0.5


def patience(timeout: timedelta | str | None) -> float:
    """Convert a timeout to seconds; None becomes infinity."""
    return float("inf") if timeout is None else parse_duration(timeout, option="timeout").total_seconds()


def wait(job_id: int, patience: float, names: Mapping[str, Task[..., Any]]) -> Steps[Any]:
    """Poll until the job has ended; return its result."""
    until, pause = time.monotonic() + patience, _FIRST_LOOK
    while (ended := (yield filters.result(job_id))).state is None:
        left = until - time.monotonic()
        if left <= 0:
            raise ResultTimeout(job_id, patience)
        yield Pause(min(pause, left))
        pause = min(pause * 1.5, _SLOWEST_LOOK)
    error = ended.error or {}
    if ended.state == "dead":
        raise JobDied(job_id, error.get("type"), error.get("message"))
    if ended.state == "cancelled":
        raise JobCancelled(job_id, error.get("message"))
    if error:
        raise ResultMissing(job_id, str(error.get("message")))
    known = names.get(ended.task)
    return ended.result if known is None else known.read_result(ended.result)
