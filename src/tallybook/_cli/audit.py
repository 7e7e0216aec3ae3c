"""tallybook audit."""

from __future__ import annotations

import json
from typing import Any

import click

from tallybook._cli.common import limit_option, listing
from tallybook._cli.database import Db
from tallybook._cli.over_nodes import newest
from tallybook._cli.text import Columns
from tallybook._db import audit as calls
from tallybook._model.maintenance import AuditRow


def _pairs(found: dict[str, object]) -> str:
    return " ".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in found.items())


_COLUMNS: Columns = {
    "id": "id", "at": "at", "actor": "actor", "via": "via", "action": "action",
    "target": lambda row: _pairs(row.target), "done": lambda row: _pairs(row.done),
}  # fmt: skip


@listing(_COLUMNS, name="audit", empty="nothing was changed", merge=newest("at", "id"))
@click.option("--actor", metavar="NAME", help="Only changes of this user, API key or agent.")
@click.option("--action", metavar="VERB", help="Only this verb, like retry.")
@click.option("--before", type=int, metavar="ID", help="Only rows with a lower id, for the next page.")
@limit_option(1000, says="Show at most this many rows.")
def audit(db: Db, limit: int, **given: Any) -> list[AuditRow]:
    """List the audit log, newest first.

    It contains changes made on the dashboard, through the operator API, in Django's admin and over MCP, but not those
    made on the command line.
    """
    return db.run(calls.audits(**given, max_rows=limit))
