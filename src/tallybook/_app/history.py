"""app.history, app.services, app.audit and app.doctor: what keeps an installation in order."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from tallybook._db import audit, retention, services
from tallybook._db.verb import Beside, ListOf, Noun, Steps, Verb
from tallybook._model.audit import AuditRow
from tallybook._model.durations import parse_duration
from tallybook._model.finding import Finding
from tallybook._model.retention import HeldRange, RetentionInfo
from tallybook._model.service import ServiceInfo


class History(Noun):
    """How long what is kept, and what holds it."""

    def list(self) -> Verb[ListOf[RetentionInfo]]:
        """List how long what is kept: ended jobs by the class of their queue, dead letters, ticks of schedules.

        for kept in await app.history.list(): print(kept.name, kept.keep)
        """
        return self._verb(retention.retentions())

    def set(self, name: str, keep: str | timedelta) -> Verb[bool]:
        """Change how long something is kept, 1 minute to 100 years; False: it was so already.

        Running workers follow within a minute. With a shorter time goes what is past it, for ever. InvalidArgument for a class
        that there is not, or a time out of range; ConfigError for what is no duration.

            await app.history.set("default", "14 days")
        """
        return self._verb(retention.set_(name, parse_duration(keep, option="keep")))

    def held(self) -> Verb[ListOf[HeldRange]]:
        """List the ranges of history that stay although their time is over, and why.

        for held in await app.history.held(): print(held.name, held.open_jobs, held.why)
        """
        return self._verb(retention.held())


class Services(Noun):
    """The maintenance that workers do."""

    def list(self) -> Verb[ListOf[ServiceInfo]]:
        """List the services: how often each is looked after, and its last run, how long that took and what it did.

        for service in await app.services.list(): print(service.name, service.last_run_at)
        """
        return self._verb(services.services())

    def set(self, name: str, every: str | timedelta) -> Verb[bool]:
        """Change how often a service is looked after at least, 100 ms to 1 day; False: it was so already.

        Running workers follow at their next look, within 5 s. InvalidArgument for a service that there is not, or a time
        out of range; ConfigError for what is no duration.

            await app.services.set("rescue", "10 s")
        """
        return self._verb(services.service_every(name, parse_duration(every, option="every")))


class Audit(Noun):
    """What people have changed."""

    def list(
        self, *, actor: str | None = None, action: str | None = None, before: int | None = None, max_rows: int = 50
    ) -> Verb[ListOf[AuditRow]]:
        """List what people have changed by pages and by the API, newest first, at most `max_rows` (1 to 1000).

        `before` is the id of the last row of the page before. Rows go after 90 days, unless `app.history.set` says otherwise.

            for row in await app.audit.list(actor="ada"): print(row.at, row.action, row.target)
        """
        return self._verb(audit.audits(actor=actor, action=action, before=before, max_rows=max_rows))


class Doctor(Noun):
    """What is wrong, and what to do."""

    def run(self, *, dsn: str | None = None, verify: bool = False) -> Verb[ListOf[Finding]]:
        """Look at the database and say, check by check, what was found and what to do; on a connection of its own.

        `verify` recounts the counters whatever the size of the history, which can take minutes. QueueUnavailable: no server.

            wrong = [found for found in await app.doctor.run() if not found.good]
        """
        return self._verb(partial(self._run, dsn, verify), "doctor.run")

    def _run(self, dsn: str | None, verify: bool) -> Steps[list[Finding]]:
        from tallybook._db import doctor

        found: list[Finding] = yield Beside(partial(doctor.doctor, self._app.conninfo(dsn), verify=verify))
        return found
