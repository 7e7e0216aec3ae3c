"""tallybook service list, every."""

from __future__ import annotations

from datetime import timedelta

import click

from tallybook._cli.common import Columns, command, listing
from tallybook._cli.database import Db
from tallybook._cli.text import clean, local
from tallybook._db import services
from tallybook._model.durations import format_duration
from tallybook._model.service import ServiceInfo

service = click.Group("service", help="List and change the maintenance services.")


_COLUMNS: Columns = {
    "service": "name", "every": "every", "last run": lambda one: local(one.last_run_at) or "never",
    "took": lambda one: "" if one.last_took is None else f"{one.last_took.total_seconds() * 1000:.1f} ms",
    "effect": "last_effect",
}  # fmt: skip


@listing(_COLUMNS, of=service, empty="no services")
def list_(db: Db) -> list[ServiceInfo]:
    """List the services with their last run. JSON has seconds."""
    return db.run(services.services)


@command(of=service)
def every(db: Db, name: str, duration: timedelta) -> str:
    """Set the longest time between checks, like `rescue 10s`. Workers follow in 5 s."""
    changed = db.run(services.service_every(name, duration))
    shown = f"service {clean(name)} runs every {format_duration(duration)}"
    return f"{shown} at least" if changed else f"{shown} already"
