"""The verbs over rate limits, as pure values like those of calls.py."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tallybook._db.calls import Call, instant
from tallybook._model.durations import format_duration
from tallybook._model.options import check_name
from tallybook._model.rate import RateInfo, RateRule
from tallybook.errors import ConfigError

__all__ = ["REGISTER", "drop", "push", "put", "rates", "registered"]

_PUT = """\
select tallybook.rate_limit_put(name => cast(%(name)s as text), calls => cast(cast(%(calls)s as text) as int),
  per => cast(cast(%(per)s as text) as interval), burst => cast(cast(%(burst)s as text) as int))"""
_DROP = "select tallybook.rate_limit_drop(name => cast(%(name)s as text))"
_PUSH = """\
select cast(to_json(tallybook.rate_limit_push(name => cast(%(name)s as text),
  until => cast(cast(%(until)s as text) as timestamptz))) as text)"""
# Durations as numbers: what an interval looks like depends on the user's settings.
_RATES = """\
select cast(coalesce(json_agg(json_build_object(
  'name', r.name, 'rule', r.rule, 'calls', r.calls, 'per', extract(epoch from r.per), 'burst', r.burst, 'calls_ever', r.calls_ever,
  'calls_in_window', r.calls_in_window, 'waiting', r.waiting, 'last_call_at', r.last_call_at, 'next_call_at', r.next_call_at,
  'pushed_to', r.pushed_to) order by r.name), '[]') as text)
  from tallybook.rate as r"""
REGISTER = "select tallybook._rate_limits_register(%s::text, %s::jsonb)"


def put(rule: RateRule) -> Call[str]:
    """Make or change a rule: created, changed or unchanged."""
    params = {
        "name": rule.name,
        "calls": str(rule.calls),
        "per": format_duration(rule.per),
        "burst": str(rule.burst),
    }
    return Call("rate_limit_put", _PUT, params, str)


def drop(name: str) -> Call[bool]:
    """Remove a rule; False: there is none."""
    check_name("name", name, 200)
    return Call("rate_limit_drop", _DROP, {"name": name}, bool)


def push(name: str, until: datetime) -> Call[datetime]:
    """No call of a key before then; when the next one may start."""
    check_name("name", name, 200)
    if not isinstance(until, datetime) or until.utcoffset() is None:
        raise ConfigError("until", until, "not an aware datetime", hint="Write datetime.now(UTC) + ...")
    return Call("rate_limit_push", _PUSH, {"name": name, "until": until.astimezone(UTC).isoformat()}, _instant)


def _instant(text: str) -> datetime:
    found = instant(json.loads(text))
    assert found is not None
    return found


def rates() -> Call[list[RateInfo]]:
    """All keys in use, and the rules that no key of their own name has used."""
    return Call("rates", _RATES, {}, _infos)


def _infos(found: str) -> list[RateInfo]:
    return [
        RateInfo(
            **{
                name: row[name]
                for name in ("name", "rule", "calls", "burst", "calls_ever", "calls_in_window", "waiting")
            },
            per=None if row["per"] is None else timedelta(seconds=row["per"]),
            last_call_at=instant(row["last_call_at"]),
            next_call_at=instant(row["next_call_at"]),
            pushed_to=instant(row["pushed_to"]),
        )
        for row in json.loads(found)
    ]


def registered(rules: list[RateRule]) -> str:
    """What a worker puts on record at its start: the rules of its app's code, as JSON."""
    return json.dumps(
        [
            {"name": rule.name, "calls": rule.calls, "per": format_duration(rule.per), "burst": rule.burst}
            for rule in rules
        ]
    )
