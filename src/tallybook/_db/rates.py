"""The verbs over rate limits, as pure values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime

from tallybook._db import breakers
from tallybook._db.declared import Call, Declared
from tallybook._db.stored import loads
from tallybook._db.texts import at, records
from tallybook._model.breaker import BreakerRule
from tallybook._model.durations import format_duration
from tallybook._model.options import check_instant, check_name
from tallybook._model.rate import ConcurrencyInfo, ConcurrencyRule, RateInfo, RateRule

_SET = Declared("rate_limit_set(name text, calls int, per interval, burst int) -> text")
_DROP = Declared("rate_limit_drop(name text) -> boolean")
PUSH = Declared("rate_limit_push(name text, until timestamptz) -> timestamptz")
_SET_CONCURRENCY = Declared("concurrency_limit_set(name text, most int) -> text")
_DROP_CONCURRENCY = Declared("concurrency_limit_drop(name text) -> boolean")
# Durations as numbers, because the format of an interval depends on the user's settings.
_RATES = """\
select cast(coalesce(json_agg(json_build_object(
  'name', r.name, 'rule', r.rule, 'calls', r.calls, 'per', extract(epoch from r.per), 'burst', r.burst, 'calls_ever', r.calls_ever,
  'calls_in_window', r.calls_in_window, 'waiting', r.waiting, 'last_call_at', r.last_call_at, 'next_call_at', r.next_call_at,
  'pushed_to', r.pushed_to) order by r.name), '[]') as text)
  from tallybook.rate as r where cast(%(name)s as text) is null or r.name = cast(%(name)s as text)"""
NAMES = Declared("_limit_names() -> text[]")
REGISTER = Declared("_limits_register(p_app text, p_rules jsonb) -> void")
_CONCURRENCY = """\
select cast(coalesce(json_agg(json_build_object(
  'name', c.name, 'rule', c.rule, 'most', c.most, 'held', c.held, 'waiting', c.waiting) order by c.name), '[]') as text)
  from tallybook.concurrency as c where cast(%(name)s as text) is null or c.name = cast(%(name)s as text)"""


def set_(rule: RateRule) -> Call[str]:
    return _SET.call(str, name=rule.name, calls=rule.calls, per=format_duration(rule.per), burst=rule.burst)


def drop(name: str) -> Call[bool]:
    check_name("name", name, 200)
    return _DROP.call(bool, name=name)


def push(name: str, until: datetime) -> Call[datetime]:
    """Allow no call of a key before `until`; returns when the next one may start."""
    check_name("name", name, 200)
    check_instant("until", until)
    return PUSH.call(lambda text: at(loads(text)), name=name, until=until.astimezone(UTC).isoformat())


def rates(name: str | None = None) -> Call[list[RateInfo]]:
    """Return all keys in use, and rules without a used key of their own name; or the one of this name."""
    return Call(
        "rates", _RATES, {"name": name}, records(RateInfo, "last_call_at", "next_call_at", "pushed_to", seconds=["per"])
    )


def set_concurrency(rule: ConcurrencyRule) -> Call[str]:
    return _SET_CONCURRENCY.call(str, name=rule.name, most=rule.most)


def drop_concurrency(name: str) -> Call[bool]:
    check_name("name", name, 200)
    return _DROP_CONCURRENCY.call(bool, name=name)


def concurrency(name: str | None = None) -> Call[list[ConcurrencyInfo]]:
    """Return all keys in use, and rules without a used key of their own name; or the one of this name."""
    return Call("concurrency", _CONCURRENCY, {"name": name}, records(ConcurrencyInfo))


def registered(
    rates: Iterable[RateRule], concurrency: Iterable[ConcurrencyRule], breaker_rules: Iterable[BreakerRule]
) -> str:
    """Return the rules that a worker registers at its start, from its app's code, as JSON."""
    of_rates = [
        {"name": rule.name, "calls": rule.calls, "per": format_duration(rule.per), "burst": rule.burst}
        for rule in rates
    ]
    of_breakers = breakers.registered(breaker_rules)
    return json.dumps(
        {
            "rates": of_rates,
            "concurrency": [{"name": rule.name, "most": rule.most, "skips": rule.skips} for rule in concurrency],
            "breakers": of_breakers,
        }
    )
