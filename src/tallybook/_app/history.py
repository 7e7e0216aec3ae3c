"""app.history, app.services, app.audit and app.doctor: retention, maintenance, the audit log and health checks."""

from datetime import timedelta
from functools import partial

from tallybook._db import history
from tallybook._db.verb import ListOf, Noun, Verb, beside
from tallybook._model.durations import parse_duration
from tallybook._model.maintenance import AuditRow, Finding, HeldRange, RetentionInfo, ServiceInfo


class History(Noun):
    """Retention periods, and history that is held beyond them."""

    def list(self) -> Verb[ListOf[RetentionInfo]]:
        """List the retention periods: of ended jobs (by class of their queue), dead letters, ticks and the audit log.

        for kept in await app.history.list(): print(kept.name, kept.keep)
        """
        return self._verb(history.retentions)

    def set(self, name: str, keep: str | timedelta) -> Verb[bool]:
        """Change a retention period, 1 minute to 100 years; False: nothing changed.

        Running workers apply it within a minute. A shorter period deletes older history permanently. Raises
        InvalidArgument for an unknown class or a period out of range, ConfigError for an invalid duration.

            await app.history.set("default", "14 days")
        """
        return self._verb(history.retention_set(name, parse_duration(keep, option="keep")))

    def held(self) -> Verb[ListOf[HeldRange]]:
        """List the ranges of history that are past their retention but still held, and why.

        for held in await app.history.held(): print(held.name, held.open_jobs, held.why)
        """
        return self._verb(history.held())


class Services(Noun):
    """The maintenance services of workers."""

    def list(self) -> Verb[ListOf[ServiceInfo]]:
        """List the services: their interval, their last run, its duration and its result.

        for service in await app.services.list(): print(service.name, service.last_run_at)
        """
        return self._verb(history.services)

    def set(self, name: str, every: str | timedelta) -> Verb[bool]:
        """Change the maximum interval of a service, 100 ms to 1 day; False: nothing changed.

        Running workers apply it within 5 s. Raises InvalidArgument for an unknown service or an interval out of range,
        ConfigError for an invalid duration.

            await app.services.set("rescue", "10 s")
        """
        return self._verb(history.service_every(name, parse_duration(every, option="every")))


class Audit(Noun):
    """The audit log: changes made in pages, through the operator API, in Django's admin and by agents over MCP."""

    def list(
        self, *, actor: str | None = None, action: str | None = None, before: int | None = None, max_rows: int = 50
    ) -> Verb[ListOf[AuditRow]]:
        """List the changes of the audit log, newest first, at most `max_rows` (1 to 1000).

        The command line and the verbs of an App write no audit rows. `before` is the id of the last row of the previous
        page. Rows are kept for 90 days; `app.history.set("audit", ...)` changes that.

            for row in await app.audit.list(actor="ada"): print(row.at, row.action, row.target)
        """
        return self._verb(history.audits(actor=actor, action=action, before=before, max_rows=max_rows))


class Doctor(Noun):
    """Health checks of the database."""

    def run(self, *, dsn: str | None = None, verify: bool = False) -> Verb[ListOf[Finding]]:
        """Check the database on a separate connection; return the findings, with a remedy where one is needed.

        `verify` recounts the counters even for a large history, which can take minutes. Raises QueueUnavailable.

            wrong = [found for found in await app.doctor.run() if not found.good]
        """
        from tallybook._db import doctor

        look = partial(beside, lambda: doctor.doctor(self._app.conninfo(dsn), verify=verify))
        return self._verb(look, "doctor.run")
