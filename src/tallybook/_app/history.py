"""app.history, app.services, app.audit and app.doctor: retention, maintenance, the audit log and health checks."""

import json
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

from tallybook._db.declared import Call, Declared, Simple, View
from tallybook._db.texts import loads, record, records
from tallybook._db.verb import ListOf, Noun, Verb, beside
from tallybook._model.durations import parse_duration
from tallybook._model.maintenance import AuditRow, Finding, HeldRange, RetentionInfo, ServiceInfo
from tallybook._model.options import text_problem, whole
from tallybook.errors import ConfigError

Details = Mapping[str, object] | None

_CLASS = {"class": "name"}
_RETENTIONS = View(
    "retentions", "retentions", records(RetentionInfo, **_CLASS), order="r.keep, r.class", seconds=["keep"]
)()
_RETENTION_SET = Simple("retention_set(class text, keep interval) -> boolean", bool)


def _ranges(found: str) -> list[HeldRange]:
    rows = (row | {"lower": int(row["lower"]), "upper": row["upper"] and int(row["upper"])} for row in loads(found))
    return [record(HeldRange, row, **_CLASS) for row in rows]


_HELD = Simple("""
  held_ranges() -> rows (class text, lower xid8, upper xid8, due_at timestamptz, open_jobs bigint, why text)
                   order by r.class, r.lower""", _ranges)  # fmt: skip

_SERVICES = View("services", "services", records(ServiceInfo), seconds=["every", "last_took"])()
_SERVICE_EVERY = Simple("service_every(service text, every interval) -> boolean", bool)

_ADD = Declared("audit_add(actor text, via text, action text, target jsonb, done jsonb) -> bigint")
NONCE_TAKE = Simple("nonce_take(key text, nonce text, signed_at timestamptz) -> text", str)
"""Checks a signed request: "fresh" (this uses its nonce up, with the transaction), "used", "late" or "early"."""

# Each combination of filters has its own form of the statement, so that each can use its index.
_AUDITS = """\
select cast(coalesce(json_agg(a order by a.id desc), '[]') as text) from (
  select x.* from tallybook.audits as x
   where x.id < cast(cast(%(before)s as text) as bigint){filters}
   order by x.id desc limit cast(cast(%(max_rows)s as text) as int)) as a"""


def audit_add(actor: str, via: str, action: str, target: Details = None, done: Details = None) -> Call[int]:
    """Record a change; returns the row's id."""
    target_text, done_text = json.dumps(dict(target or {})), json.dumps(dict(done or {}))
    return _ADD.call(int, actor=actor, via=via, action=action, target=target_text, done=done_text)


class History(Noun):
    """Retention periods, and history that is held beyond them."""

    def list(self) -> Verb[ListOf[RetentionInfo]]:
        """List the retention periods: of ended jobs (by class of their queue), dead letters, ticks and the audit log.

        for kept in await app.history.list(): print(kept.name, kept.keep)
        """
        return self._verb(_RETENTIONS)

    def set(self, name: str, keep: str | timedelta) -> Verb[bool]:
        """Change a retention period, 1 minute to 100 years; False: nothing changed.

        Running workers apply it within a minute. A shorter period deletes older history permanently. Raises
        InvalidArgument for an unknown class or a period out of range, ConfigError for an invalid duration.

            await app.history.set("default", "14 days")
        """
        return self._verb(_RETENTION_SET(name, parse_duration(keep, option="keep")))

    def held(self) -> Verb[ListOf[HeldRange]]:
        """List the ranges of history that are past their retention but still held, and why.

        for held in await app.history.held(): print(held.name, held.open_jobs, held.why)
        """
        return self._verb(_HELD())


class Services(Noun):
    """The maintenance services of workers."""

    def list(self) -> Verb[ListOf[ServiceInfo]]:
        """List the services: their interval, their last run, its duration and its result.

        for service in await app.services.list(): print(service.name, service.last_run_at)
        """
        return self._verb(_SERVICES)

    def set(self, name: str, every: str | timedelta) -> Verb[bool]:
        """Change the maximum interval of a service, 100 ms to 1 day; False: nothing changed.

        Running workers apply it within 5 s. Raises InvalidArgument for an unknown service or an interval out of range,
        ConfigError for an invalid duration.

            await app.services.set("rescue", "10 s")
        """
        return self._verb(_SERVICE_EVERY(name, parse_duration(every, option="every")))


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
        given = {name: value for name, value in (("actor", actor), ("action", action)) if value is not None}
        for option, value in given.items():
            if not isinstance(value, str) or text_problem(value):
                raise ConfigError(option, value, "not a valid name")
        if before is not None and (isinstance(before, bool) or not isinstance(before, int)):
            raise ConfigError("before", before, "must be the id of a row")
        last = 2**63 - 1
        start = str(last if before is None else max(min(before, last), -last))
        params = {**given, "before": start, "max_rows": str(whole("max_rows", max_rows, 1, 1000))}
        filters = "".join(f" and x.{name} = cast(%({name})s as text)" for name in given)
        return self._verb(Call("audits", _AUDITS.format(filters=filters), params, records(AuditRow)))


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
