"""A subject from outside of its handler: SubjectCall before, reports after, SubjectInfo from the view tallybook.subject."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tallybook._model.options import Options, check_text


@dataclass(frozen=True, slots=True)
class Subject:
    """What `ctx.subject` says: the name, how many iterations have ended before this one, and when the last one did."""

    name: str
    iterations: int
    last_at: datetime | None


@dataclass(frozen=True, slots=True)
class SubjectCall:
    """A subject that is described and not put in yet, made by `task.subject(name).job(...)`: checked and encoded."""

    task: str
    name: str
    args: str
    """As JSON text."""
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectReport:
    """What a push or an upsert did to one subject; all instants are aware, in UTC."""

    subject: str
    job_id: int
    report: str
    """created, updated, unchanged, active (its handler runs: not touched) or dead."""
    old_run_at: datetime | None = None
    new_run_at: datetime | None = None

    @property
    def created(self) -> bool:
        """Whether there was no such subject before."""
        return self.report == "created"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectInfo:
    """One subject as the view tallybook.subject shows it, at the moment of asking. All instants are aware, in UTC."""

    task: str
    subject: str
    job_id: int
    queue: str
    state: str
    """planned, pending, active, completed, killed or dead."""
    args: dict[str, Any]
    iterations: int
    """How often it was done: rescheduled, completed or killed."""
    failures: int
    """In a row, since then."""
    attempts: int
    """How often it was started since then."""
    next_run_at: datetime | None = None
    last_at: datetime | None = None
    """When the last iteration ended."""
    last_error: str | None = None
    """The message of the last failure since then."""
    priority: int | None = None
    ended_at: datetime | None = None
    """When it was completed, killed or died, of one that has stopped."""


@dataclass(frozen=True, slots=True)
class SubjectPage:
    """One page of a list of subjects."""

    subjects: list[SubjectInfo]
    next: str | None
    """The `after` of the page behind this one; None: this is the last."""


def check_subject(name: object) -> str:
    """ConfigError unless this can be a subject's name: a text of 1 to 512 bytes."""
    check_text("subject", name, 512, "a subject's name", "Write str(...)" if isinstance(name, int) else None)
    return str(name)


def subject_of(options: dict[str, Any] | None) -> Subject | None:
    """What a job's options, as the claim reads them, say of its subject; None: an ordinary job."""
    if not options or "subject" not in options:
        return None
    found, name = options["subject"], options.get("subject_name")
    if not isinstance(found, dict) or not isinstance(name, str):
        return None  # any program may have written the row
    iterations = found.get("iterations")
    return Subject(name, iterations if type(iterations) is int else 0, _instant(found.get("last_at")))


def _instant(text: object) -> datetime | None:
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
        return None if at is None else (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
