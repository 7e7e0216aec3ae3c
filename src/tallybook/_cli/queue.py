"""tallybook queue list, pause, resume."""

from __future__ import annotations

import getpass
import json
import socket
from typing import Any

import click

from tallybook._cli.common import Conn, connect, dsn_option, json_option, print_json, print_table
from tallybook._cli.text import clean, local
from tallybook._db import calls, sync
from tallybook._db.calls import Call
from tallybook.errors import UnknownQueue

__all__ = ["me", "queue"]

_NAMES = "select q.name from tallybook.queues q"

_LIST = """\
select json_build_object(
  'name', n.queue, 'available', n.available, 'running', n.running, 'scheduled', n.scheduled, 'retrying', n.retrying,
  'dead', n.dead, 'unserved', n.unserved,
  'workers', (select count(*) from tallybook.workers w where w.ended_at is null and n.queue = any (w.queues)),
  'paused_at', n.paused_at, 'paused_by', n.paused_by)::text
  from tallybook.queue_stats n order by n.queue"""


@click.group()
def queue() -> None:
    """List, pause and resume queues."""


@queue.command("list")
@dsn_option
@json_option
def list_(dsn: str | None, as_json: bool) -> None:
    """List the queues with how many of their jobs are in which state."""
    with connect(dsn) as conn:
        rows = [row[0] for row in conn.execute(_LIST).fetchall()]
    if as_json:
        print_json(rows)
        return
    titles = ("queue", "available", "running", "scheduled", "retrying", "dead", "unserved", "workers", "paused")
    empty = "no queues: a queue is born at its first enqueue, or when a worker serves it"
    print_table(titles, [_line(json.loads(row)) for row in rows], empty=empty)


def _line(row: dict[str, Any]) -> tuple[object, ...]:
    paused = f"since {local(row['paused_at'])} by {row['paused_by']}" if row["paused_at"] else ""
    counts = (row[key] for key in ("available", "running", "scheduled", "retrying", "dead", "unserved", "workers"))
    return (row["name"], *counts, paused)


@queue.command()
@click.argument("name")
@dsn_option
@click.option("--by", metavar="WHO", help="Shown as who paused it. [user@host]")
def pause(name: str, dsn: str | None, by: str | None) -> None:
    """Let no more jobs of this queue start, until resume. What runs goes on."""
    with connect(dsn) as conn:
        changed = _steer(conn, name, calls.pause(name, by or me()))
    click.echo(f"queue {clean(name)!r} is paused" if changed else f"queue {clean(name)!r} was paused already")


@queue.command()
@click.argument("name")
@dsn_option
def resume(name: str, dsn: str | None) -> None:
    """Let a paused queue run again."""
    with connect(dsn) as conn:
        changed = _steer(conn, name, calls.resume(name))
    click.echo(f"queue {clean(name)!r} runs again" if changed else f"queue {clean(name)!r} was not paused")


def _steer(conn: Conn, name: str, call: Call[bool]) -> bool:
    try:
        return sync.run(conn, call)
    except UnknownQueue:
        known = [row[0] for row in conn.execute(_NAMES).fetchall()]
        raise UnknownQueue(name, known) from None


def me() -> str:
    """Who types: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
