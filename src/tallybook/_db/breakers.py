"""The verbs over circuit breakers, as pure values."""

from __future__ import annotations

from datetime import datetime, timedelta

from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.stored import loads
from tallybook._db.texts import at, records
from tallybook._model.breaker import BreakerInfo, BreakerRule
from tallybook._model.durations import format_duration, parse_duration
from tallybook._model.options import check_name

_SET = Declared("breaker_set(name text, failures int, per interval, open_for interval) -> text")
_OPEN = Declared("breaker_open(name text, duration interval) -> timestamptz")
drop = Simple("breaker_drop(name text) -> boolean", bool, names={"name": ("name", 200)})
close = Simple("breaker_close(name text) -> boolean", bool, names={"name": ("name", 200)})
_BREAKERS = """\
select cast(coalesce(json_agg(json_build_object(
  'name', b.name, 'rule', b.rule, 'failures', b.failures, 'per', extract(epoch from b.per), 'state', b.state,
  'open_for', extract(epoch from b.open_for), 'failed_in_window', b.failed_in_window, 'changed_at', b.changed_at,
  'open_until', b.open_until, 'probe', b.probe, 'waiting', b.waiting) order by b.name), '[]') as text)
  from tallybook.breaker as b"""


def set_(rule: BreakerRule) -> Call[str]:
    return _SET.call(str, **named(rule))


def named(rule: BreakerRule) -> dict[str, str]:
    return {
        "name": rule.name,
        "failures": str(rule.failures),
        "per": format_duration(rule.per),
        "open_for": format_duration(rule.open_for),
    }


def open_(name: str, duration: timedelta | str | None) -> Call[datetime]:
    check_name("name", name, 200)
    text = None if duration is None else format_duration(parse_duration(duration, option="duration"))
    return _OPEN.call(lambda text: at(loads(text)), name=name, duration=text)


_read = records(BreakerInfo, "changed_at", "open_until", seconds=["per", "open_for"])
breakers = Call("breakers", _BREAKERS, {}, _read)
"""All used keys, and the rules without a used key of their own name."""
