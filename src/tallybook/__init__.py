"""Tallybook: a background-job queue that lives inside your own PostgreSQL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import psycopg as _psycopg  # noqa: F401 - first of all, so that a missing libpq is told with what to do
except ImportError as error:  # pragma: no cover - told to people
    raise ImportError(f"{error}\nTo get psycopg with its own libpq: pip install 'tallybook[binary]'") from error

from tallybook._app import App, Task
from tallybook._model.backoff import Constant, Exponential, Linear

if TYPE_CHECKING:
    from tallybook._db.migrate import migrate
    from tallybook._db.nodes import Node
    from tallybook._model.counting import Counts, Difference, Level, Throughput, Timings
    from tallybook._model.job import Job, JobCall
    from tallybook._model.job_info import (
        Cancelled,
        DeadLetter,
        JobDone,
        JobInfo,
        JobLine,
        JobPage,
        Reason,
        Retried,
        TraceEvent,
    )
    from tallybook._model.maintenance import AuditRow, Finding, HeldRange, RetentionInfo, ServiceInfo
    from tallybook._model.outcome import Cancel, Complete, Dead, Drop, Kill, Reject, Reschedule, Snooze
    from tallybook._model.provider import Provider, Secret
    from tallybook._model.queue import QueueInfo, TopJob, Truncated
    from tallybook._model.rate import BreakerInfo, ConcurrencyInfo, RateInfo
    from tallybook._model.schedule import Fire, Fired, ScheduleInfo
    from tallybook._model.subject import Subject, SubjectCall, SubjectInfo, SubjectPage, SubjectReport
    from tallybook._worker.run.context import Context

__version__ = "0.1.0"

__all__ = [
    "App", "AuditRow", "BreakerInfo", "Cancel", "Cancelled", "Complete", "ConcurrencyInfo", "Constant", "Context",
    "Counts", "Dead", "DeadLetter", "Difference", "Drop", "Exponential", "Finding", "Fire", "Fired", "HeldRange", "Job",
    "JobCall", "JobDone", "JobInfo", "JobLine", "JobPage", "Kill", "Level", "Linear", "Node", "Provider", "QueueInfo",
    "RateInfo", "Reason", "Reject", "Reschedule", "RetentionInfo", "Retried", "ScheduleInfo", "Secret", "ServiceInfo",
    "Snooze", "Subject", "SubjectCall", "SubjectInfo", "SubjectPage", "SubjectReport", "Task", "Throughput", "Timings",
    "TopJob", "TraceEvent", "Truncated", "__version__", "migrate",
]  # fmt: skip

_LATER = {
    "_db.migrate": "migrate",
    "_db.nodes": "Node",
    "_model.counting": "Counts Difference Level Throughput Timings",
    "_model.maintenance": "AuditRow Finding HeldRange RetentionInfo ServiceInfo",
    "_model.job": "Job JobCall",
    "_model.job_info": "Cancelled DeadLetter JobDone JobInfo JobLine JobPage Reason Retried TraceEvent",
    "_model.outcome": "Cancel Complete Dead Drop Kill Reject Reschedule Snooze",
    "_model.provider": "Provider Secret",
    "_model.queue": "QueueInfo TopJob Truncated",
    "_model.rate": "BreakerInfo ConcurrencyInfo RateInfo",
    "_model.schedule": "Fire Fired ScheduleInfo",
    "_model.subject": "Subject SubjectCall SubjectInfo SubjectPage SubjectReport",
    "_worker.run.context": "Context",
}
"""Optional names are imported on first access: most programs use few of them."""


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names.split():
            found = globals()[name] = getattr(import_module(f"tallybook.{module}"), name)
            return found
    raise AttributeError(f"module 'tallybook' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
