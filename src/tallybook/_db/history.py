"""The verbs over history and services, as pure values."""

from tallybook._db.declared import Call, Simple
from tallybook._db.texts import loads, record, records
from tallybook._model.maintenance import HeldRange, RetentionInfo, ServiceInfo

_RETENTIONS = """\
select cast(coalesce(json_agg(json_build_object('name', r.class, 'keep', extract(epoch from r.keep), 'what', r.what)
  order by r.keep, r.class), '[]') as text) from tallybook.retentions as r"""
retentions = Call("retentions", _RETENTIONS, {}, records(RetentionInfo))
retention_set = Simple("retention_set(class text, keep interval) -> boolean", bool)


def _ranges(found: str) -> list[HeldRange]:
    rows = (row | {"lower": int(row["lower"]), "upper": row["upper"] and int(row["upper"])} for row in loads(found))
    return [record(HeldRange, row, **{"class": "name"}) for row in rows]


held = Simple("""
  held_ranges() -> rows (class text, lower xid8, upper xid8, due_at timestamptz, open_jobs bigint, why text)
                   order by r.class, r.lower""", _ranges)  # fmt: skip

# Durations as numbers, because the format of an interval depends on the user's settings.
_SERVICES = """\
select cast(coalesce(json_agg(to_jsonb(s) || jsonb_build_object(
  'every', extract(epoch from s.every), 'last_took', extract(epoch from s.last_took)) order by s.name), '[]') as text)
  from tallybook.services as s"""
services = Call("services", _SERVICES, {}, records(ServiceInfo))
service_every = Simple("service_every(service text, every interval) -> boolean", bool)
