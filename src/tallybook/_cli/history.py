"""tallybook history list, set, held."""

from __future__ import annotations

import json
from datetime import timedelta

import click

from tallybook._cli.common import DURATION, connect, dsn_option, json_option, print_json, print_table
from tallybook._cli.text import clean, local
from tallybook._db import retention as calls
from tallybook._db import sync
from tallybook._model.durations import format_duration


@click.group()
def history() -> None:
    """How long history is kept, and what holds it."""


@history.command("list")
@dsn_option
@json_option
def list_(dsn: str | None, as_json: bool) -> None:
    """List how long what is kept. In JSON durations are seconds."""
    with connect(dsn) as conn:
        found = sync.run(conn, calls.retentions())
    if as_json:
        print_json(
            [json.dumps({"name": one.name, "keep": one.keep.total_seconds(), "what": one.what}) for one in found]
        )
        return
    print_table(
        ("class", "kept", "what"), [(one.name, format_duration(one.keep), one.what) for one in found], empty="none"
    )


@history.command("set")
@click.argument("name")
@click.argument("keep", type=DURATION)
@dsn_option
def set_(name: str, keep: timedelta, dsn: str | None) -> None:
    """Change how long something is kept, like `brief 2h`. Running workers follow within a minute."""
    with connect(dsn) as conn:
        changed = sync.run(conn, calls.set_(name, keep))
    click.echo(f"{clean(name)} is kept for {format_duration(keep)}" + ("" if changed else " already"))


@history.command()
@dsn_option
@json_option
def held(dsn: str | None, as_json: bool) -> None:
    """List the ranges of history that stay although their time is over, and why."""
    with connect(dsn) as conn:
        found = sync.run(conn, calls.held())
    if as_json:
        print_json(
            [
                json.dumps(
                    {
                        "name": one.name,
                        "lower": one.lower,
                        "upper": one.upper,
                        "due_at": None if one.due_at is None else one.due_at.isoformat(),
                        "open_jobs": one.open_jobs,
                        "why": one.why,
                    }
                )
                for one in found
            ]
        )
        return
    titles = ("class", "from transaction", "to", "due since", "open jobs", "held by")
    rows = [
        (
            one.name,
            one.lower,
            "" if one.upper is None else one.upper,
            "" if one.due_at is None else local(one.due_at.isoformat()),
            "" if one.open_jobs is None else one.open_jobs,
            clean(one.why),
        )
        for one in found
    ]
    print_table(titles, rows, empty="nothing is held")
