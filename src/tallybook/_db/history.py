"""The verbs over history, services, the audit and the nonces of signed requests, as pure values."""

import json
from collections.abc import Mapping

from tallybook._db.declared import Call, Declared, Simple, View
from tallybook._db.texts import loads, record, records
from tallybook._model.maintenance import AuditRow, HeldRange, RetentionInfo, ServiceInfo
from tallybook._model.options import text_problem, whole
from tallybook.errors import ConfigError

Details = Mapping[str, object] | None

_CLASS = {"class": "name"}
retentions = View(
    "retentions", "retentions", records(RetentionInfo, **_CLASS), order="r.keep, r.class", seconds=["keep"]
)()
retention_set = Simple("retention_set(class text, keep interval) -> boolean", bool)


def _ranges(found: str) -> list[HeldRange]:
    rows = (row | {"lower": int(row["lower"]), "upper": row["upper"] and int(row["upper"])} for row in loads(found))
    return [record(HeldRange, row, **_CLASS) for row in rows]


held = Simple("""
  held_ranges() -> rows (class text, lower xid8, upper xid8, due_at timestamptz, open_jobs bigint, why text)
                   order by r.class, r.lower""", _ranges)  # fmt: skip

services = View("services", "services", records(ServiceInfo), seconds=["every", "last_took"])()
service_every = Simple("service_every(service text, every interval) -> boolean", bool)

_ADD = Declared("audit_add(actor text, via text, action text, target jsonb, done jsonb) -> bigint")
nonce_take = Simple("nonce_take(key text, nonce text, signed_at timestamptz) -> text", str)
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


def audits(*, actor: str | None, action: str | None, before: int | None, max_rows: int) -> Call[list[AuditRow]]:
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
    return Call("audits", _AUDITS.format(filters=filters), params, records(AuditRow))
