"""The verbs over rate limits, concurrency limits and circuit breakers, as pure values."""

import json
from collections.abc import Iterable
from datetime import datetime, timedelta

from tallybook._db.declared import Call, Declared, Simple, View
from tallybook._db.texts import at, loads, records, utc
from tallybook._model.durations import format_duration, parse_duration
from tallybook._model.options import check_instant, check_name
from tallybook._model.rate import BreakerInfo, BreakerRule, ConcurrencyInfo, ConcurrencyRule, RateInfo, RateRule
from tallybook.errors import InvalidArgument

_NAME = {"name": ("name", 200)}
_SET = Declared("rate_limit_set(name text, calls int, per interval, burst int) -> text")
drop = Simple("rate_limit_drop(name text) -> boolean", bool, names=_NAME)
PUSH = Declared("rate_limit_push(name text, until timestamptz) -> timestamptz")
# By the server's clock: that of an operator's machine may be wrong.
_FROM_NOW = "clock_timestamp() + cast(cast(%(until)s as text) as interval)"
_PUSH_FOR = f"select cast(to_json({PUSH.called(until=_FROM_NOW)}) as text)"
_LONGEST_PUSH = timedelta(days=36525)
_SET_CONCURRENCY = Declared("concurrency_limit_set(name text, most int) -> text")
drop_concurrency = Simple("concurrency_limit_drop(name text) -> boolean", bool, names=_NAME)
NAMES = Declared("_limit_names() -> text[]")
REGISTER = Declared("_limits_register(p_app text, p_rules jsonb) -> void")
# All keys in use, and rules without a used key of their own name; or the one of this name.
rates = View("rates", "rate", records(RateInfo), which="name", seconds=["per"])
concurrency = View("concurrency", "concurrency", records(ConcurrencyInfo), which="name")
breakers = View("breakers", "breaker", records(BreakerInfo), seconds=["per", "open_for"])()


def set_(rule: RateRule) -> Call[str]:
    return _SET.call(str, **_named(rule))


def _named(rule: RateRule) -> dict[str, str | int]:
    return {"name": rule.name, "calls": rule.calls, "per": format_duration(rule.per), "burst": rule.burst}


def push(name: str, until: datetime | timedelta | str) -> Call[datetime]:
    """Allow no call of a key before `until`, or for this duration by the server's clock; returns when the next may."""
    check_name("name", name, 200)
    if not isinstance(until, datetime):
        if (length := parse_duration(until, option="duration")) > _LONGEST_PUSH:
            raise InvalidArgument(f"duration {format_duration(length)} is too long", hint="Pass at most 100 years")
        params = {"name": name, "until": format_duration(length)}
        return Call("rate_limit_push", _PUSH_FOR, params, lambda text: at(loads(text)))
    check_instant("until", until)
    return PUSH.call(lambda text: at(loads(text)), name=name, until=utc(until))


def set_concurrency(rule: ConcurrencyRule) -> Call[str]:
    return _SET_CONCURRENCY.call(str, name=rule.name, most=rule.most)


_SET_BREAKER = Declared("breaker_set(name text, failures int, per interval, open_for interval) -> text")
open_breaker = Simple(
    "breaker_open(name text, duration interval) -> timestamptz", lambda text: at(loads(text)), names=_NAME
)
drop_breaker = Simple("breaker_drop(name text) -> boolean", bool, names=_NAME)
close_breaker = Simple("breaker_close(name text) -> boolean", bool, names=_NAME)


def set_breaker(rule: BreakerRule) -> Call[str]:
    return _SET_BREAKER.call(str, **_breaker(rule))


def _breaker(rule: BreakerRule) -> dict[str, str]:
    per, open_for = format_duration(rule.per), format_duration(rule.open_for)
    return {"name": rule.name, "failures": str(rule.failures), "per": per, "open_for": open_for}


def registered(
    rates: Iterable[RateRule], concurrency: Iterable[ConcurrencyRule], breakers: Iterable[BreakerRule]
) -> str:
    """Return the rules that a worker registers at its start, from its app's code, as JSON."""
    permits = [{"name": rule.name, "most": rule.most, "skips": rule.skips} for rule in concurrency]
    rules = {"rates": list(map(_named, rates)), "concurrency": permits, "breakers": list(map(_breaker, breakers))}
    return json.dumps(rules)
