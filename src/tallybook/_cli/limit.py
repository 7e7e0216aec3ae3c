"""tallybook limit list, set, at-once, drop, push, calls."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from tallybook._cli.common import DURATION, connect, dsn_option, json_option, print_json, print_table
from tallybook._cli.text import clean, local
from tallybook._db import rates, sync
from tallybook._db.stored import loads
from tallybook._model.durations import format_duration
from tallybook._model.rate import ConcurrencyRule, RateInfo, RateRule

_CALLS = """\
select to_json(c)::text from (
  select r.name, r.called_at, r.job_id, r.attempt, r.success from tallybook.rate_calls r
   where r.name = %s order by r.called_at desc limit %s) c"""


@click.group()
def limit() -> None:
    """List and change limits: of rates, and of what runs at once."""


@limit.command("list")
@dsn_option
@json_option
def list_(dsn: str | None, as_json: bool) -> None:
    """List the limits and their keys, with how many jobs wait at each. In JSON durations are seconds."""
    with connect(dsn) as conn:
        found, at_once = sync.run(conn, rates.rates()), sync.run(conn, rates.concurrency())
    if as_json:
        rows_of = [asdict(one) for one in found] + [asdict(one) for one in at_once]
        print_json([json.dumps(row, default=_plain) for row in rows_of])
        return
    titles = ("key", "limit", "in window", "waiting", "last call", "next call")
    print_table(titles, [_line(one) for one in found], empty="no rate limits")
    if at_once:
        click.echo()
        rows = [(one.name, "none any more" if one.most is None else one.most, one.held, one.waiting) for one in at_once]
        print_table(("key", "at once", "held", "waiting"), rows, empty="no concurrency limits")


def _plain(value: Any) -> object:
    return value.total_seconds() if isinstance(value, timedelta) else value.isoformat()


def _line(one: RateInfo) -> tuple[object, ...]:
    rule = "none any more"
    if one.per is not None:
        rule = f"{one.calls} per {format_duration(one.per)}" + (f", {one.burst} at once" if one.burst != 1 else "")
    next_call = _shown(one.next_call_at)
    pushed = " (pushed back)" if one.pushed_to else ""
    return (
        one.name,
        rule,
        one.calls_in_window,
        one.waiting,
        _shown(one.last_call_at),
        next_call + pushed,
    )


def _shown(at: datetime | None) -> str:
    return local(at.isoformat()) if at else ""


@limit.command("set")
@click.argument("name")
@click.argument("calls", type=int)
@click.argument("per", type=DURATION)
@click.option("--burst", type=int, default=1, show_default=True, help="How many may start at once.")
@dsn_option
def set_(name: str, calls: int, per: timedelta, burst: int, dsn: str | None) -> None:
    """Make or change a limit of CALLS in any window of PER, like `provider 8 1min`, `queue:mail 100 1s`."""
    rule = RateRule.checked(name, calls, per, burst)
    with connect(dsn) as conn:
        said = sync.run(conn, rates.set_(rule))
    click.echo(f"rate limit {clean(name)!r} is {said}")


@limit.command("at-once")
@click.argument("name")
@click.argument("most", type=int)
@dsn_option
def at_once(name: str, most: int, dsn: str | None) -> None:
    """Make or change a limit of MOST jobs that run at once, like `customer 2`, `queue:reports 5`."""
    rule = ConcurrencyRule(name, most)
    with connect(dsn) as conn:
        said = sync.run(conn, rates.set_concurrency(rule))
    click.echo(f"concurrency limit {clean(name)!r} is {said}")


@limit.command()
@click.argument("name")
@dsn_option
def drop(name: str, dsn: str | None) -> None:
    """Remove what this name has of both kinds of limits. Jobs that still name it fail."""
    with connect(dsn) as conn:
        gone = [
            kind
            for kind, call in (("rate", rates.drop(name)), ("concurrency", rates.drop_concurrency(name)))
            if sync.run(conn, call)
        ]
    for kind in gone:
        click.echo(f"{kind} limit {clean(name)!r} is removed")
    if not gone:
        click.echo(f"there is no limit {clean(name)!r}")
        raise SystemExit(1)


@limit.command()
@click.argument("name")
@click.argument("duration", type=DURATION)
@dsn_option
def push(name: str, duration: timedelta, dsn: str | None) -> None:
    """Let no call of a key start for so long, like `provider:acme 5min`."""
    with connect(dsn) as conn:
        until = sync.run(conn, rates.push(name, datetime.now(UTC) + duration))
    click.echo(f"the next call of {clean(name)!r} may start at {_shown(until)}")


@limit.command()
@click.argument("name")
@click.option("-n", "most", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many.")
@dsn_option
@json_option
def calls(name: str, most: int, dsn: str | None, as_json: bool) -> None:
    """List the newest calls of a key: when, of which job, and whether it succeeded."""
    with connect(dsn) as conn:
        rows = [row[0] for row in conn.execute(_CALLS, (name, most)).fetchall()]
    if as_json:
        print_json(rows)
        return
    found = [loads(row) for row in rows]
    words = {True: "yes", False: "no", None: "not ended"}
    lines = [(local(row["called_at"]), row["job_id"], row["attempt"], words[row["success"]]) for row in found]
    print_table(("called", "job", "attempt", "success"), lines, empty="no calls")
