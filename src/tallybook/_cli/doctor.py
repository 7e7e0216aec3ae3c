"""tallybook doctor."""

from __future__ import annotations

import sys

import click

from tallybook._cli.common import command, print_json, row_json
from tallybook._cli.database import Db
from tallybook._cli.text import clean
from tallybook._db.doctor import examine
from tallybook._model.finding import LEVELS, Finding

_MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}
_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


@command(json=True, schema=False, nodes="each")
@click.option("--verify", is_flag=True, help="Verify the counters even if the history is large.")
@click.option("--quiet", is_flag=True, help="Hide checks that are ok.")
def doctor(db: Db, as_json: bool, verify: bool, quiet: bool) -> None:
    """Find problems of the database and advise on each.

    Changes nothing, and takes seconds: each check has a time limit. Exit code 0 if all is ok or a note, 1 if there is a
    warning or a problem.
    """
    found: list[Finding] = []
    for one in examine(db.conn, verify=verify):
        found.append(one)
        if not as_json and not (quiet and one.level == "ok"):
            show_finding(one)
    if as_json:
        print_json([row_json(one) for one in found if not (quiet and one.level == "ok")])
    else:
        _summary(found)
    if not all(one.good for one in found):
        sys.exit(1)


def show_finding(one: Finding) -> None:
    """Print a finding: a line, and the remedy below it."""
    mark = click.style(_MARKS[one.level].ljust(8), fg=_COLOURS[one.level])
    click.echo(f"{mark} {clean(one.name)}: {clean(one.finding)}")
    if one.advice:
        click.echo(f"{'':8}   -> {clean(one.advice)}")


def _summary(found: list[Finding]) -> None:
    counts = {level: sum(one.level == level for one in found) for level in reversed(LEVELS)}
    told = [f"{n} {level if n == 1 or level == 'ok' else level + 's'}" for level, n in counts.items() if n]
    click.echo(f"\n{len(found)} checks: {', '.join(told)}")
