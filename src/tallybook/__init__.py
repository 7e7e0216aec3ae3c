"""Tallybook: a background-job queue that lives inside your own PostgreSQL."""

from tallybook._app import App
from tallybook._db.schedules import Fire, Fired, ScheduleInfo
from tallybook._model.backoff import Constant, Exponential, Linear
from tallybook._model.job import Cancelled, DeadLetter, Job, JobCall, JobInfo, Retried
from tallybook._model.outcome import Cancel, Dead, Snooze
from tallybook._task import Task
from tallybook._worker.context import Context

__version__ = "0.1.0"

__all__ = [
    "App",
    "Cancel",
    "Cancelled",
    "Constant",
    "Context",
    "Dead",
    "DeadLetter",
    "Exponential",
    "Fire",
    "Fired",
    "Job",
    "JobCall",
    "JobInfo",
    "Linear",
    "Retried",
    "ScheduleInfo",
    "Snooze",
    "Task",
    "__version__",
]
