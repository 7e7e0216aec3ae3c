"""The verbs over history, as pure values."""

from __future__ import annotations

from datetime import timedelta

from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.stored import loads
from tallybook._db.texts import record, records
from tallybook._model.durations import format_duration
from tallybook._model.retention import HeldRange, RetentionInfo

_RETENTIONS = """\
select cast(coalesce(json_agg(json_build_object('name', r.class, 'keep', extract(epoch from r.keep), 'what', r.what)
  order by r.keep, r.class), '[]') as text) from tallybook.retentions as r"""
_SET = Declared("retention_set(class text, keep interval) -> boolean")


retentions = Call("retentions", _RETENTIONS, {}, records(RetentionInfo, seconds=["keep"]))


def set_(name: str, keep: timedelta) -> Call[bool]:
    return _SET.call(bool, **{"class": name, "keep": format_duration(keep)})


def _ranges(found: str) -> list[HeldRange]:
    rows = (row | {"lower": int(row["lower"]), "upper": row["upper"] and int(row["upper"])} for row in loads(found))
    return [record(HeldRange, row, "due_at", **{"class": "name"}) for row in rows]


held = Simple("""
  held_ranges() -> rows (class text, lower xid8, upper xid8, due_at timestamptz, open_jobs bigint, why text)
                   order by r.class, r.lower""", _ranges)  # fmt: skip
