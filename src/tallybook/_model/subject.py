"""A subject outside its handler: SubjectCall before a push, reports after it, and SubjectInfo from a view."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tallybook._model.options import Options, check_text


@dataclass(frozen=True, slots=True)
class Subject:
    """The value of `ctx.subject`: the name, the number of iterations before this one, and the end of the last one."""

    name: str
    iterations: int
    last_at: datetime | None


@dataclass(frozen=True, slots=True)
class SubjectCall:
    """A described subject that is not pushed yet, made by `task.subject(name).job(...)`: checked and encoded."""

    task: str
    name: str
    args: str
    """As JSON text."""
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectReport:
    """The effect of a push or an upsert on one subject; all datetimes are aware, in UTC."""

    subject: str
    job_id: int
    report: str
    """created, updated, unchanged, active (it runs and is not changed) or dead (also if it was killed)."""
    old_run_at: datetime | None = None
    new_run_at: datetime | None = None

    @property
    def created(self) -> bool:
        """Whether the subject is new."""
        return self.report == "created"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectInfo:
    """One subject as the view tallybook.subject shows it, at the moment of the query. Datetimes are aware, in UTC."""

    task: str
    subject: str
    job_id: int
    queue: str
    state: str
    """planned, pending, active, completed, killed or dead."""
    args: dict[str, Any]
    iterations: int
    """The number of ended iterations: rescheduled, completed or killed."""
    failures: int
    """Consecutive failures since then."""
    attempts: int
    """The number of starts since then."""
    next_run_at: datetime | None = None
    last_at: datetime | None = None
    """The end of the last iteration."""
    last_error: str | None = None
    """The message of the last failure since then."""
    priority: int | None = None
    ended_at: datetime | None = None
    """The time when it was completed, killed or died; for stopped subjects."""


@dataclass(frozen=True, slots=True)
class SubjectPage:
    """One page of a list of subjects."""

    subjects: list[SubjectInfo]
    next: str | None
    """The `after` of the next page; None: this is the last."""


def check_subject(name: object) -> str:
    """Raise ConfigError unless this can be a subject's name: a text of 1 to 512 bytes."""
    check_text("subject", name, 512, "a subject's name ", "Write str(...)" if isinstance(name, int) else None)
    return str(name)


def subject_of(options: dict[str, Any] | None) -> Subject | None:
    """Return the subject from a job's options as read by the claim; None for an ordinary job."""
    if not options or "subject" not in options:
        return None
    found, name = options["subject"], options.get("subject_name")
    if not isinstance(found, dict) or not isinstance(name, str):
        return None  # any program may have written the row
    iterations = found.get("iterations")
    return Subject(name, iterations if type(iterations) is int else 0, instant(found.get("last_at")))


def instant(text: object) -> datetime | None:
    """Parse a time in JSON that any program may have written; None if it is not valid."""
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
        return None if at is None else (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
