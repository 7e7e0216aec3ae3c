"""tallybook breaker list, set, drop, open, close."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timedelta

import click

from tallybook._cli.common import DURATION, connect, dsn_option, json_option, print_json, print_table
from tallybook._cli.text import clean, local
from tallybook._db import breakers, sync
from tallybook._model.breaker import BreakerInfo, BreakerRule
from tallybook._model.durations import format_duration


@click.group()
def breaker() -> None:
    """List, change, open and close circuit breakers.

    After so many failures the jobs of a key wait.
    """


@breaker.command("list")
@dsn_option
@json_option
def list_(dsn: str | None, as_json: bool) -> None:
    """List the breakers and their keys. In JSON durations are seconds."""
    with connect(dsn) as conn:
        found = sync.run(conn, breakers.breakers())
    if as_json:
        print_json([json.dumps(asdict(one), default=_plain) for one in found])
        return
    titles = ("key", "opens after", "state", "failed in window", "waiting", "open until", "probe")
    print_table(titles, [_line(one) for one in found], empty="no breakers")


def _plain(value: timedelta | datetime) -> object:
    return value.total_seconds() if isinstance(value, timedelta) else value.isoformat()


def _line(one: BreakerInfo) -> tuple[object, ...]:
    return (
        one.name,
        f"{one.failures} per {format_duration(one.per)}, for {format_duration(one.open_for)}",
        one.state,
        one.failed_in_window,
        one.waiting,
        _shown(one.open_until),
        one.probe or "",
    )


def _shown(at: datetime | None) -> str:
    return local(at.isoformat()) if at else ""


@breaker.command("set")
@click.argument("name")
@click.argument("failures", type=int)
@click.argument("per", type=DURATION)
@click.argument("open_for", type=DURATION)
@dsn_option
def set_(name: str, failures: int, per: timedelta, open_for: timedelta, dsn: str | None) -> None:
    """Make or change a breaker: after FAILURES within PER it is open for OPEN_FOR, like `provider 5 1min 30s`."""
    rule = BreakerRule.checked(name, failures, per, open_for)
    with connect(dsn) as conn:
        said = sync.run(conn, breakers.set_(rule))
    click.echo(f"breaker {clean(name)!r} is {said}")


@breaker.command()
@click.argument("name")
@dsn_option
def drop(name: str, dsn: str | None) -> None:
    """Remove a breaker; who waits for it goes on."""
    with connect(dsn) as conn:
        gone = sync.run(conn, breakers.drop(name))
    if not gone:
        click.echo(f"there is no breaker {clean(name)!r}")
        raise SystemExit(1)
    click.echo(f"breaker {clean(name)!r} is removed")


@breaker.command("open")
@click.argument("name")
@click.argument("duration", type=DURATION, required=False)
@dsn_option
def open_(name: str, duration: timedelta | None, dsn: str | None) -> None:
    """Open the breaker of a key: no job of it starts for DURATION, or for what its rule says; then a probe does."""
    with connect(dsn) as conn:
        until = sync.run(conn, breakers.open_(name, duration))
    click.echo(f"the breaker of {clean(name)!r} is open until {_shown(until)}")


@breaker.command()
@click.argument("name")
@dsn_option
def close(name: str, dsn: str | None) -> None:
    """Close the breaker of a key: its jobs go on."""
    with connect(dsn) as conn:
        changed = sync.run(conn, breakers.close(name))
    click.echo(f"the breaker of {clean(name)!r} is closed" + ("" if changed else ", as it was"))
