"""The verbs over history and services, as pure values."""

from tallybook._db.declared import Simple, View
from tallybook._db.texts import loads, record, records
from tallybook._model.maintenance import HeldRange, RetentionInfo, ServiceInfo

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
