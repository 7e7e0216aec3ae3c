"""The part of an App that a task needs."""

from __future__ import annotations

from tallybook._db.declared import Call
from tallybook._db.source import Source
from tallybook._model.backoff import Backoff
from tallybook._model.job import Job, JobCall


class Owner(Source):
    """The base of App: tasks use its connections, traces, retry policies and verbs."""

    def _policy(self, name: str, *, task: str | None = None) -> Backoff:
        raise NotImplementedError

    def _putting(self, job: JobCall) -> Call[Job]:
        raise NotImplementedError
