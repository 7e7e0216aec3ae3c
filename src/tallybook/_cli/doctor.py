"""tallybook doctor."""

import json
import sys
from collections import Counter
from collections.abc import Iterable

import click

from tallybook._cli.common import command
from tallybook._cli.database import Db
from tallybook._cli.output import clean, print_json, print_pairs, yes_no
from tallybook._db import migrate as schema
from tallybook._db.doctor import examine
from tallybook._model.maintenance import LEVELS, Finding

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


@command(json=True, schema=False, nodes="each")
@click.option("--verify", is_flag=True, help="Verify the counters even if the history is large.")
@click.option("--quiet", is_flag=True, help="Hide checks that are ok.")
@click.option("--info", is_flag=True, help="Check nothing: show what is installed in the database.")
def doctor(db: Db, as_json: bool, verify: bool, quiet: bool, info: bool) -> None:
    """Check the database for problems, with advice on each.

    It changes nothing and takes a few seconds, because each check has a time limit. Exit code 0 if every finding is ok
    or a note, 1 if there is a warning or a problem. With --info, exit code 1 unless this release can work with what is
    installed.
    """
    if info:
        if verify or quiet:
            raise click.UsageError("--info cannot be combined with --verify or --quiet")
        _show_installed(db, as_json)
        return
    show_findings(examine(db.conn, verify=verify), as_json, quiet=quiet, summary=not as_json)


def show_findings(found: Iterable[Finding], as_json: bool, *, quiet: bool = False, summary: bool = False) -> None:
    """Print findings as they come, each with its remedy below it. Exit with code 1 unless all are good."""
    counts: Counter[str] = Counter()
    shown, good = [], True
    for one in found:
        counts[one.level] += 1
        good = good and one.good
        if quiet and one.level == "ok":
            continue
        shown.append(one)
        if not as_json:
            mark = click.style((one.level if one.good else one.level.upper()).ljust(8), fg=_COLOURS[one.level])
            click.echo(f"{mark} {clean(one.name)}: {clean(one.finding)}")
            if one.advice:
                click.echo(f"{'':8}   -> {clean(one.advice)}")
    if as_json:
        print_json(shown)
    if summary:
        levels = [(counts[level], level) for level in reversed(LEVELS) if counts[level]]
        told = [f"{n} {level if n == 1 or level == 'ok' else level + 's'}" for n, level in levels]
        click.echo(f"\n{counts.total()} checks: {', '.join(told)}")
    if not good:
        sys.exit(1)


_INSTALLED = """\
select jsonb_build_object(
  'installed_at', i.installed_at, 'migrated_at', i.migrated_at,
  'cluster', case when i.system_identifier = c.system_identifier then 'this one' else 'another one' end,
  'queues', (select count(*) from tallybook.queues),
  'workers', (select count(*) from tallybook.workers w where w.ended_at is null),
  'bytes', (select sum(pg_total_relation_size(c.oid)) from pg_class c
             where c.relnamespace = 'tallybook'::regnamespace and c.relkind = 'r'))::text
  from tallybook.installed i, pg_control_system() c"""


def _show_installed(db: Db, as_json: bool) -> None:
    found = schema.info(db.conn)
    values: dict[str, object] = {
        "schema_version": found.version or None, "expected_version": found.expected,
        "routines_current": found.routines_current, "server_version": found.server, "database": db.conn.info.dbname,
        "node": found.node if found.version else None,
    }  # fmt: skip
    if found.version:
        values |= json.loads(next(iter(db.texts(_INSTALLED)), "{}"))
    if as_json:
        print_json(json.dumps(values, indent=1))
    else:
        print_pairs({name.replace("_", " "): "-" if value is None else yes_no(value) for name, value in values.items()})
        if found.version == 0:
            verdict = "not installed: run `tallybook migrate`"
        elif found.version > found.expected:
            then = "they are compatible" if found.works else "update the package tallybook here"
            verdict = f"newer than this program: {then}"
        else:
            verdict = "up to date" if found.current else "behind this program: run `tallybook migrate`"
        click.echo(verdict)
        if values.get("cluster") == "another one":
            click.echo("this database came from another cluster: run `tallybook migrate`, or start a worker")
    if not found.works:
        sys.exit(1)
