"""tallybook audit."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from tallybook._cli.common import connect, dsn_option, json_option, print_json, print_table
from tallybook._cli.text import local
from tallybook._db import audit as calls
from tallybook._db import sync


@click.command()
@click.option("--actor", metavar="NAME", help="Only what this user, or this API key, has changed.")
@click.option("--action", metavar="VERB", help="Only this verb, like retry.")
@click.option("--before", type=int, metavar="ID", help="Older than this row: the last of the page before.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="At most so many rows.")
@dsn_option
@json_option
def audit(
    actor: str | None, action: str | None, before: int | None, limit: int, dsn: str | None, as_json: bool
) -> None:
    """List what people have changed.

    By pages and by the API, newest first.
    """
    with connect(dsn) as conn:
        found = sync.run(conn, calls.audits(actor=actor, action=action, before=before, max_rows=limit))
    if as_json:
        print_json([json.dumps({**asdict(row), "at": row.at.isoformat()}) for row in found])
        return
    titles = ("id", "at", "actor", "via", "action", "target", "done")
    lines = [
        (row.id, local(row.at.isoformat()), row.actor, row.via, row.action, _pairs(row.target), _pairs(row.done))
        for row in found
    ]
    print_table(titles, lines, empty="nothing was changed")


def _pairs(found: dict[str, object]) -> str:
    return " ".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in found.items())
