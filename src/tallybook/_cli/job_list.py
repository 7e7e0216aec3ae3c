"""tallybook job list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click

from tallybook._cli.common import command, duration, limit_option, state_option
from tallybook._cli.database import Db
from tallybook._cli.enqueue import instant
from tallybook._cli.output import print_rows
from tallybook._cli.over_nodes import gathered
from tallybook._cli.text import Columns, local, short
from tallybook._cli.why import link_option
from tallybook._db.jobs import JOBS, MOST, STATES, JobFilter
from tallybook._model.job_info import JobInfo
from tallybook._model.merged import Part, goes_on, merged, places

_LOOKED = 1_000_000
"""The most rows that one command reads: about a second."""
# All columns of the view, except those that need a search in the history of each job: `job show` has them.
_READ = ", ".join(f"j.{one.name}" for one in fields(JobInfo) if one.name not in ("updated_at", "last_attempt_at"))
_LIST = f"""\
select r.id, r.cursor, r.enqueued_at, r.looked_to,
       (select to_json(s)::text from (select {_READ} from tallybook.job j where j.id = r.id) s)
  from {JOBS.called()} with ordinality as r order by r.ordinality"""  # noqa: S608


def when(value: str | datetime) -> datetime:
    """The type of an option: a time, or a duration before now."""
    if isinstance(value, str) and not value[:4].isdigit():
        return datetime.now(UTC) - duration(value)
    return instant(value)


class _Row(NamedTuple):
    id: int
    cursor: str
    enqueued_at: datetime
    looked_to: datetime
    text: str
    """The job's JSON, as the server writes it."""


@command("list", json=True, nodes=True, reads=True)
@click.option("--queue", help="Only this queue.")
@click.option("--task", help="Only this task.")
@state_option(*STATES)
@click.option("--unserved", is_flag=True, help="Only jobs whose task or args version no live worker knows.")
@link_option("With this link; repeatable.")
@click.option("--error", metavar="TEXT", help="Only if the last error contains this text, ignoring case.")
@click.option("--since", type=when, help="Enqueued since then, like '2 hours' (ago) or 2026-01-31T09:00Z.")
@click.option("--before", type=when, help="Enqueued before then.")
@click.option("--after", metavar="CURSOR", help="Continue a list: the value that its last page printed at the end.")
@limit_option()
def list_(db: Db, as_json: bool, after: str | None, limit: int, **given: Any) -> None:
    """List jobs, newest first."""
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value}
    which, names = JobFilter(**chosen), list[str]()
    if db.nodes:
        at = places(after)
        pairs, more, looked_to = merged(dict(gathered(db, lambda one: _read_on(one, which, at, limit))), at, limit)
        names, rows = [name for name, _ in pairs], [row.text for _, row in pairs]
    else:
        found, more, looked_to = _read(db, which, after, limit)
        rows = [row.text for row in found]
    empty = ("no such jobs" if chosen or after else "no jobs") + ("" if more is None else " so far")
    print_rows(_COLUMNS, rows, empty=empty, nodes=names, as_json=as_json)
    if more is None:
        return
    if len(rows) == limit:
        click.echo(f"the newest {len(rows)}; --limit shows more, --after {more} the next", err=True)
    else:
        click.echo(f"searched back to {local(looked_to)}; --after {more} continues", err=True)


def _read_on(db: Db, which: JobFilter, at: Mapping[str, str], limit: int) -> Part[_Row]:
    name = db.node or ""
    return _read(db, which, at.get(name), limit) if goes_on(at, name) else ([], None, None)


def _read(db: Db, which: JobFilter, after: str | None, limit: int) -> Part[_Row]:
    """Return the jobs, the cursor of the next page if there may be one, and the time back to which it has searched."""
    found, last = db.paged(_LIST, lambda after, most: which.params(after, most, _LOOKED), after, limit, MOST)
    return [_Row(*row) for row in found], *((last[1], last[3]) if last else (None, None))


def _note(row: dict[str, Any]) -> str:
    """Return the most useful note about a job in this state."""
    if row.get("unserved"):
        version = (row.get("options") or {}).get("version")
        return f"unserved: no living worker knows {'its task' if version is None else f'version {version} of its args'}"
    notes = {
        "scheduled": f"at {local(row['run_at'])}",
        "retrying": f"at {local(row['run_at'])}; last error: {row['last_error']}",
        "running": f"on {row['worker']} since {local(row['started_at'])}",
        "dead": f"{row['reason']}: {row['last_error']}",
        "cancelled": row["reason"] or "",
        "waiting": row["reason"] or "",
    }
    note = notes.get(row["state"], "")
    if row["state"] == "running" and (row.get("progress") is not None or row.get("progress_message")):
        done = "" if row["progress"] is None else f"{row['progress']:.0%} "
        note = f"{done}{row['progress_message'] or ''}, {note}"
    return f"{row['summary']} - {note}".removesuffix(" - ") if row.get("summary") else note


_COLUMNS: Columns = {
    "id": "id", "state": "state", "queue": "queue", "task": "task", "prio": "priority", "attempts": "attempts",
    "enqueued": "enqueued_at", "note": lambda row: short(_note(row)),
}  # fmt: skip
