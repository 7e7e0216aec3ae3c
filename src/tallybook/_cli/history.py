"""tallybook history list, set, held."""

from __future__ import annotations

from datetime import timedelta

import click

from tallybook._cli.common import Columns, command, listing
from tallybook._cli.database import Db
from tallybook._cli.text import clean
from tallybook._db import history as calls
from tallybook._model.durations import format_duration
from tallybook._model.history import HeldRange, RetentionInfo

history = click.Group("history", help="Show and change retention periods.")


@listing({"class": "name", "kept": "keep", "what": "what"}, of=history, empty="none")
def list_(db: Db) -> list[RetentionInfo]:
    """Show retention periods. JSON has seconds."""
    return db.run(calls.retentions)


@command("set", of=history)
def set_(db: Db, name: str, keep: timedelta) -> str:
    """Change a retention period, like `brief 2h`. Workers follow within a minute."""
    changed = db.run(calls.retention_set(name, keep))
    return f"{clean(name)} is kept for {format_duration(keep)}" + ("" if changed else " already")


_HELD: Columns = {
    "class": "name", "from transaction": "lower", "to": "upper", "due since": "due_at", "open jobs": "open_jobs",
    "held by": "why",
}  # fmt: skip


@listing(_HELD, name="held", of=history, empty="nothing is held")
def held(db: Db) -> list[HeldRange]:
    """List history that is past its retention but still held, and why."""
    return db.run(calls.held())
