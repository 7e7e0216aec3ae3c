"""tallybook service list, every."""

from __future__ import annotations

import json
from datetime import timedelta

import click

from tallybook._cli.common import DURATION, connect, dsn_option, json_option, print_json, print_table
from tallybook._cli.text import clean
from tallybook._db import services, sync
from tallybook._model.durations import format_duration
from tallybook._model.service import ServiceInfo


@click.group()
def service() -> None:
    """List the maintenance that workers do, and how often."""


@service.command("list")
@dsn_option
@json_option
def list_(dsn: str | None, as_json: bool) -> None:
    """List the services with their last run, how long it took and how much it changed. In JSON durations are seconds."""
    with connect(dsn) as conn:
        found = sync.run(conn, services.services())
    if as_json:
        print_json([_json(one) for one in found])
        return
    titles = ("service", "every", "last run", "took", "effect")
    print_table(titles, [_line(one) for one in found], empty="no services")


def _json(one: ServiceInfo) -> str:
    return json.dumps(
        {
            "name": one.name,
            "every": one.every.total_seconds(),
            "last_run_at": None if one.last_run_at is None else one.last_run_at.isoformat(),
            "last_took": None if one.last_took is None else one.last_took.total_seconds(),
            "last_effect": one.last_effect,
        }
    )


def _line(one: ServiceInfo) -> tuple[object, ...]:
    ran = "never" if one.last_run_at is None else one.last_run_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    took = "" if one.last_took is None else f"{one.last_took.total_seconds() * 1000:.1f} ms"
    return (one.name, format_duration(one.every), ran, took, "" if one.last_effect is None else one.last_effect)


@service.command()
@click.argument("name")
@click.argument("duration", type=DURATION)
@dsn_option
def every(name: str, duration: timedelta, dsn: str | None) -> None:
    """Change how often workers look after a service at least, like `rescue 10s`. Running workers follow within 5 s."""
    with connect(dsn) as conn:
        changed = sync.run(conn, services.service_every(name, duration))
    shown = f"service {clean(name)} runs every {format_duration(duration)}"
    click.echo(f"{shown} at least" if changed else f"{shown} already")
