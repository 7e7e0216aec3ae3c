"""Subjects in SQL, for tests: each verb with named arguments, and the rows of the view."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from psycopg.rows import dict_row

from support.database import Connection, Row, call, one
from support.hands import Hands, Job


def push(db: Connection, subject: str, **more: Any) -> tuple[int, bool]:
    """Push a subject; return the job's id, and whether it was made."""
    ((job, created),) = call(db, "subject_push", **{"queue": "q", "task": "t", "subject": subject, **more})
    return job, created


def upsert(db: Connection, subject: str, **more: Any) -> Row:
    """Upsert a subject; return job_id, report, old_run_at, new_run_at."""
    (row,) = call(db, "subject_upsert", **{"queue": "q", "task": "t", "subject": subject, **more})
    return row


def many(db: Connection, verb: str, subjects: Sequence[str], **more: Any) -> list[Row]:
    """Call subject_push_many or subject_upsert_many; return rows of subject, job_id, report, old_run_at, new_run_at."""
    args = more.pop("args", ["{}"] * len(subjects))
    return call(db, verb, **{"queue": "q", "task": "t", "subjects": list(subjects), "args": args, **more})


def forget(db: Connection, subject: str, task: str = "t") -> str:
    ((said,),) = call(db, "subject_forget", task=task, subject=subject)
    return str(said)


def end(hands: Hands, verb: str, job: Job, **more: Any) -> Any:
    """End an attempt with this verb; return the verb's result."""
    ((said,),) = call(hands.db, verb, **{"lease": job.lease, "job_id": job.id, "attempt": job.attempt, **more})
    return said


def subject(db: Connection, name: str, task: str = "t") -> dict[str, Any] | None:
    """Return the subject's row of the view, or None."""
    with db.cursor(row_factory=dict_row) as cursor:
        query = "select * from tallybook.subject where task = %s and subject = %s"
        rows = cursor.execute(query, (task, name)).fetchall()
    assert len(rows) <= 1, rows
    return rows[0] if rows else None


def seen(db: Connection, name: str = "a") -> dict[str, Any]:
    """Return the subject's row of the view, which must exist."""
    found = subject(db, name)
    assert found is not None, f"there is no subject {name}"
    return found


def state(db: Connection, name: str, task: str = "t") -> str | None:
    found = subject(db, name, task)
    return None if found is None else str(found["state"])


def clock(db: Connection, ahead: str = "0") -> datetime:
    """Return the server's time plus `ahead`."""
    return one(db, "select clock_timestamp() + %s::interval", ahead)


def promote(db: Connection, ahead: str = "0") -> int:
    """Promote all jobs due by then; return their number."""
    return int(one(db, "select promoted from tallybook.promote(at => %s)", clock(db, ahead)))


def start_one(hands: Hands, ahead: str = "0") -> Job:
    """Start the only job that may run by then, and return it."""
    promote(hands.db, ahead)
    (job,) = hands.start()
    return job
