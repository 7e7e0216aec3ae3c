"""The verb that enqueues jobs of which some wait for others, as a Call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tallybook._db import calls
from tallybook._db.declared import Call, Declared
from tallybook._db.texts import text_array
from tallybook._model.after import arranged
from tallybook._model.job import Job, JobCall

FAILED = "failed"
"""The parameter of a task that receives the parents that did not complete."""

_FAN_OUT = Declared(
    f"fan_out({calls.JOBS}, afters text[], on_parents text[], failed_as text[]) -> row (job_ids bigint[], created boolean[])",
    run_ats=calls.RUN_ATS,
)


def enqueue(job: JobCall, takes_failed: Callable[[str], bool]) -> Call[Job]:
    """Enqueue one job, whether it waits for others or not."""
    if not job.options.after:
        return calls.enqueue(job)
    many = fan_out([job], takes_failed)
    return Call("enqueue", many.sql, many.params, lambda found: many.row(found)[0])


def fan_out(jobs: Sequence[JobCall], takes_failed: Callable[[str], bool]) -> Call[list[Job]]:
    """Enqueue many jobs; without parents as calls.enqueue_many. `takes_failed` gets a task's name."""
    if not any(job.options.after for job in jobs):
        return calls.enqueue_many(jobs)
    found = arranged(jobs)
    many = calls.enqueue_many(found.jobs)
    on = [job.options.on_parent or "completed" if job.options.after else None for job in found.jobs]
    params = {
        **many.params,
        "afters": text_array(["{" + ",".join(map(str, ids)) + "}" if ids else None for ids in found.parents]),
        "on_parents": text_array(on),
        "failed_as": text_array(
            [
                FAILED if said == "any" and takes_failed(job.task) and FAILED not in json.loads(job.args) else None
                for said, job in zip(on, found.jobs, strict=True)
            ]
        ),
    }

    def as_given(report: str) -> list[Job]:
        put = many.row(report)
        return [put[place] for place in found.places]

    return Call("enqueue_many", _FAN_OUT.sql, params, as_given)  # for exactly_once, the same verb
