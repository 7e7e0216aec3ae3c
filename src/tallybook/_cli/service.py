"""tallybook service list, every."""

from __future__ import annotations

from datetime import timedelta

import click

from tallybook._cli.common import Columns, command, listing
from tallybook._cli.database import Db
from tallybook._cli.text import clean, local
from tallybook._db import history
from tallybook._model.durations import format_duration
from tallybook._model.history import ServiceInfo

service = click.Group("service", help="List and change the maintenance services.")


def _took(one: ServiceInfo) -> str:
    return "" if one.last_took is None else f"{one.last_took.total_seconds() * 1000:.1f} ms"


_COLUMNS: Columns = {
    "service": "name", "every": "every", "last run": lambda one: local(one.last_run_at) or "never", "took": _took,
    "effect": "last_effect",
}  # fmt: skip


@listing(_COLUMNS, of=service, empty="no services")
def list_(db: Db) -> list[ServiceInfo]:
    """List the services with their last run. JSON has seconds."""
    return db.run(history.services)


@command(of=service)
def every(db: Db, name: str, duration: timedelta) -> str:
    """Set the longest time between checks, like `rescue 10s`. Workers follow in 5 s."""
    changed = db.run(history.service_every(name, duration))
    shown = f"service {clean(name)} runs every {format_duration(duration)}"
    return f"{shown} at least" if changed else f"{shown} already"
