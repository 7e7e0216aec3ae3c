"""tallybook breaker list, set, drop, open, close."""

from __future__ import annotations

from datetime import timedelta

import click

from tallybook._cli.common import Columns, command, fail, listing
from tallybook._cli.database import Db
from tallybook._cli.text import clean, local
from tallybook._db import rates
from tallybook._model.breaker import BreakerInfo, BreakerRule
from tallybook._model.durations import format_duration

breaker = click.Group(
    "breaker",
    help="List, change, open and close circuit breakers.\n\nAfter a number of failures the jobs of a key wait.",
)


def _rule(one: BreakerInfo) -> str:
    return f"{one.failures} per {format_duration(one.per)}, for {format_duration(one.open_for)}"


_COLUMNS: Columns = {
    "key": "name", "opens after": _rule, "state": "state", "failed in window": "failed_in_window", "waiting": "waiting",
    "open until": "open_until", "probe": "probe",
}  # fmt: skip


@listing(_COLUMNS, of=breaker, empty="no breakers")
def list_(db: Db) -> list[BreakerInfo]:
    """List the breakers and their keys. JSON has seconds."""
    return db.run(rates.breakers)


@command("set", of=breaker, nodes="each")
def set_(db: Db, name: str, failures: int, per: timedelta, open_for: timedelta) -> str:
    """Set a breaker: FAILURES within PER open it for OPEN_FOR, like `acme 5 1min 30s`."""
    said = db.run(rates.set_breaker(BreakerRule.checked(name, failures, per, open_for)))
    return f"breaker {clean(name)!r} is {said}"


@command(of=breaker, nodes="each")
def drop(db: Db, name: str) -> str:
    """Drop a breaker. Jobs that name a key without any rule fail."""
    if not db.run(rates.drop_breaker(name)):
        fail(f"there is no breaker {clean(name)!r}")
    return f"breaker {clean(name)!r} is removed"


@command("open", of=breaker, nodes="each")
def open_(db: Db, name: str, duration: timedelta | None) -> str:
    """Open the breaker of a key for DURATION, or as long as its rule sets."""
    return f"the breaker of {clean(name)!r} is open until {local(db.run(rates.open_breaker(name, duration)))}"


@command(of=breaker, nodes="each")
def close(db: Db, name: str) -> str:
    """Close the breaker of a key: its jobs continue."""
    changed = db.run(rates.close_breaker(name))
    return f"the breaker of {clean(name)!r} is closed" + ("" if changed else ", as it was")
