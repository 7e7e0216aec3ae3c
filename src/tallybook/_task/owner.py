"""What a task needs of its App."""

from __future__ import annotations

from tallybook._db.declared import Call
from tallybook._db.source import Source
from tallybook._model.backoff import Backoff
from tallybook._model.job import Job, JobCall


class Owner(Source):
    """The base of App: its tasks use its connections and its traces as any Source's, its retry policies and its verbs."""

    def _policy(self, name: str, *, task: str | None = None) -> Backoff:
        raise NotImplementedError

    def _putting(self, job: JobCall) -> Call[Job]:
        raise NotImplementedError
