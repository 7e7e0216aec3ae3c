"""The verbs over history, as pure values."""

from __future__ import annotations

from datetime import timedelta

from tallybook._db.declared import Call
from tallybook._db.stored import loads
from tallybook._db.texts import instant
from tallybook._model.durations import format_duration
from tallybook._model.retention import HeldRange, RetentionInfo

__all__ = ["held", "retentions", "set_"]

_RETENTIONS = """\
select cast(coalesce(json_agg(json_build_object('name', r.class, 'keep', extract(epoch from r.keep), 'what', r.what)
  order by r.keep, r.class), '[]') as text) from tallybook.retentions as r"""
_SET = """\
select tallybook.retention_set(class => cast(%(name)s as text), keep => cast(cast(%(keep)s as text) as interval))"""
_HELD = """\
select cast(coalesce(json_agg(json_build_object('name', h.class, 'lower', cast(h.lower as text), 'upper', cast(h.upper as text),
  'due_at', h.due_at, 'open_jobs', h.open_jobs, 'why', h.why) order by h.class, h.lower), '[]') as text)
  from tallybook.held_ranges() as h"""


def retentions() -> Call[list[RetentionInfo]]:
    """How long what is kept, the shortest first."""
    return Call("retentions", _RETENTIONS, {}, _infos)


def _infos(found: str) -> list[RetentionInfo]:
    return [
        RetentionInfo(name=row["name"], keep=timedelta(seconds=row["keep"]), what=row["what"]) for row in loads(found)
    ]


def set_(name: str, keep: timedelta) -> Call[bool]:
    """Change how long something is kept; False: it was so already."""
    return Call("retention_set", _SET, {"name": name, "keep": format_duration(keep)}, bool)


def held() -> Call[list[HeldRange]]:
    """The ranges of history that stay although their time is over."""
    return Call("held_ranges", _HELD, {}, _ranges)


def _ranges(found: str) -> list[HeldRange]:
    return [
        HeldRange(
            name=row["name"],
            lower=int(row["lower"]),
            upper=None if row["upper"] is None else int(row["upper"]),
            due_at=instant(row["due_at"]),
            open_jobs=row["open_jobs"],
            why=row["why"],
        )
        for row in loads(found)
    ]
