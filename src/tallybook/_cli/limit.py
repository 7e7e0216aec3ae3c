"""tallybook limit list, set, at-once, drop, push, calls; breaker list, set, drop, open, close."""

from datetime import timedelta

import click

from tallybook._cli.common import command, fail, limit_option, listing
from tallybook._cli.database import APP, Db
from tallybook._cli.output import Columns, clean, local, yes_no
from tallybook._model.durations import format_duration
from tallybook._model.rate import BreakerInfo, ConcurrencyInfo, RateInfo

_CALLS = """\
select to_json(c)::text from (
  select r.name, r.called_at, r.job_id, r.attempt, r.success from tallybook.rate_calls r
   where r.name = %s order by r.called_at desc limit %s) c"""

limit = click.Group("limit", help="List and change rate limits and concurrency limits.")


def _rule(one: RateInfo | ConcurrencyInfo) -> str:
    if isinstance(one, ConcurrencyInfo):
        return "none" if one.most is None else f"{one.most} running"
    if one.per is None:
        return "none"
    return f"{one.calls} per {format_duration(one.per)}" + (f", {one.burst} at once" if one.burst != 1 else "")


def _next(one: RateInfo | ConcurrencyInfo) -> str:
    if isinstance(one, ConcurrencyInfo):
        return "-"
    return local(one.next_call_at) + (" (pushed back)" if one.pushed_to else "")


_LIMITS: Columns = {
    "key": "name",
    "limit": _rule,
    "used": lambda one: one.held if isinstance(one, ConcurrencyInfo) else one.calls_in_window,
    "waiting": "waiting",
    "last call": lambda one: "-" if isinstance(one, ConcurrencyInfo) else local(one.last_call_at),
    "next call": _next,
}


@listing(_LIMITS, of=limit, empty="no limits")
def list_(db: Db) -> list[RateInfo | ConcurrencyInfo]:
    """List rate limits, then concurrency limits, each with its keys in use."""
    return [*db.run(APP.rate_limits.list()), *db.run(APP.concurrency_limits.list())]


@command("set", of=limit, nodes="each")
@click.option("--burst", type=int, default=1, show_default=True, help="Number of calls that may start together.")
def set_(db: Db, name: str, calls: int, per: timedelta, burst: int) -> str:
    """Set a rate limit of CALLS in any window of PER, like `provider 8 1min`."""
    return f"rate limit {clean(name)!r} is {db.run(APP.rate_limits.set(name, calls, per=per, burst=burst))}"


@command("at-once", of=limit, nodes="each")
def at_once(db: Db, name: str, most: int) -> str:
    """Set a concurrency limit of MOST jobs, like `customer 2`, `queue:reports 5`."""
    return f"concurrency limit {clean(name)!r} is {db.run(APP.concurrency_limits.set(name, most))}"


@command(of=limit, nodes="each")
def drop(db: Db, name: str) -> None:
    """Drop the limits with this name, of both kinds. Jobs that still name it fail."""
    kinds = {"rate": APP.rate_limits.drop, "concurrency": APP.concurrency_limits.drop}
    gone = [kind for kind, drop in kinds.items() if db.run(drop(name))]
    for kind in gone:
        click.echo(f"{kind} limit {clean(name)!r} is removed")
    if not gone:
        fail(f"there is no limit {clean(name)!r}")


@command(of=limit, nodes="each")
def push(db: Db, name: str, duration: timedelta) -> str:
    """Block a key for a while, like `provider:acme 5min`: its calls wait."""
    return f"the next call of {clean(name)!r} may start at {local(db.run(APP.rate_limits.push(name, duration)))}"


_CALLED: Columns = {
    "called": "called_at",
    "job": "job_id",
    "attempt": "attempt",
    "success": lambda row: "not ended" if row["success"] is None else yes_no(row["success"]),
}


@listing(_CALLED, name="calls", of=limit, empty="no calls")
@limit_option(10_000, 20, names=("-n", "most"))
def calls(db: Db, name: str, most: int) -> list[str]:
    """List the newest calls of a key, with their jobs and results."""
    return db.texts(_CALLS, (name, most))


breaker = click.Group(
    "breaker",
    help="List, change, open and close circuit breakers.\n\n"
    "A breaker makes the jobs of a key wait after a number of failures.",
)

_BREAKERS: Columns = {
    "key": "name",
    "opens after": lambda one: f"{one.failures} per {format_duration(one.per)}, for {format_duration(one.open_for)}",
    "state": "state", "failed in window": "failed_in_window", "waiting": "waiting", "open until": "open_until",
    "probe": "probe",
}  # fmt: skip


@listing(_BREAKERS, of=breaker, empty="no breakers")
def list_breakers(db: Db) -> list[BreakerInfo]:
    """List the breakers and their keys. In JSON, durations are in seconds."""
    return db.run(APP.breakers.list())


@command("set", of=breaker, nodes="each")
def set_breaker(db: Db, name: str, failures: int, per: timedelta, open_for: timedelta) -> str:
    """Set a breaker: FAILURES within PER open it for OPEN_FOR, like `acme 5 1min 30s`."""
    said = db.run(APP.breakers.set(name, failures, per=per, open_for=open_for))
    return f"breaker {clean(name)!r} is {said}"


@command("drop", of=breaker, nodes="each")
def drop_breaker(db: Db, name: str) -> str:
    """Drop a breaker. Jobs that name a key without any rule fail."""
    if not db.run(APP.breakers.drop(name)):
        fail(f"there is no breaker {clean(name)!r}")
    return f"breaker {clean(name)!r} is removed"


@command("open", of=breaker, nodes="each")
def open_(db: Db, name: str, duration: timedelta | None) -> str:
    """Open the breaker of a key for DURATION, or as long as its rule sets."""
    return f"the breaker of {clean(name)!r} is open until {local(db.run(APP.breakers.open(name, duration)))}"


@command(of=breaker, nodes="each")
def close(db: Db, name: str) -> str:
    """Close the breaker of a key: its jobs continue."""
    changed = db.run(APP.breakers.close(name))
    return f"the breaker of {clean(name)!r} is closed" + ("" if changed else ", as it was")
