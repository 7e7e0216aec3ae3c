"""tallybook migrate, uninstall; service list, every; history list, set, held; audit; roles; doctor."""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import click

from tallybook._cli.common import command, dsn_option, duration, limit_option, listing
from tallybook._cli.database import APP, Db, connect, conninfo, newest
from tallybook._cli.errors import Problem, problem, say
from tallybook._cli.output import Columns, clean, local, print_json, print_pairs, yes_no
from tallybook._db import migrate as schema
from tallybook._db import nodes
from tallybook._db import roles as database
from tallybook._db.doctor import examine
from tallybook._db.migrate import is_installed
from tallybook._maintenance.services import rebase
from tallybook._model.durations import format_duration
from tallybook._model.maintenance import LEVELS, AuditRow, Finding, HeldRange, RetentionInfo, ServiceInfo


@click.command()
@dsn_option
@click.option("--sql", "only_sql", is_flag=True, help="Print the whole installation as SQL; change nothing.")
@click.option("--node", type=click.IntRange(0, 1023), help="Node number of this database in its job ids, set once. [0]")
@click.option(
    "--nodes", "which", metavar="NODES", help="Migrate one node after the other: all, or names like north,south."
)
@click.option("--wait", type=duration, help='Wait this long for the server, like "1 min".')
def migrate(dsn: str | None, only_sql: bool, node: int | None, which: str | None, wait: timedelta | None) -> None:
    """Install or upgrade the schema.

    You can run it again, from several places at once, and while producers and workers run. It is one transaction. If
    the database was moved from another cluster, workers can claim its jobs afterwards. With --nodes, a node that fails
    does not stop the others; the exit code is then 1, and you can run the command again.
    """
    if which is not None and (only_sql or node is not None):
        raise click.UsageError("--nodes cannot be combined with --sql or --node: the list of nodes has the numbers")
    if only_sql:
        click.echo(schema.script(node=node or 0), nl=False)
    elif which is not None:
        _each(conninfo(dsn), which, wait)
    else:
        _one(dsn, node, wait)


def _each(dsn: str, which: str, wait: timedelta | None) -> None:
    failed = 0
    everyone = nodes.numbered(nodes.nodes(dsn))
    chosen = [one for one in everyone if one in nodes.chosen(everyone, which)]
    for one in chosen:
        try:
            _one(one.dsn, nodes.number_for(one, everyone), wait, f"{one.name}: ")
        except Exception as error:
            found = problem(error)
            if found is None:
                raise
            failed += 1
            say(f"{one.name}: {found.message}", found.hint)
    if failed:
        click.echo(f"{failed} of {len(chosen)} nodes failed; the others are done", err=True)
        sys.exit(1)


def _one(dsn: str | None, node: int | None, wait: timedelta | None, label: str = "") -> None:
    with connect(dsn, schema=False, wait=wait) as conn:
        before = schema.info(conn)
        done = schema.migrate(
            conn,
            node=node or 0,
            on_step=lambda name: click.echo(f"{label}applying {name}"),
            on_wait=lambda by: click.echo(f"{label}tables are in use by {clean(by)}; trying again", err=True),
        )
        after = schema.info(conn)
        moved, foreign = rebase(conn), nodes.foreign_ids(conn)
        where = f"schema tallybook (version {after.version}) of database {conn.info.dbname!r}"
    if not done and after.version > after.expected:
        said = f"nothing to do: {where} is newer than this program ({after.expected}) and supports it"
    elif not done:
        said = f"nothing to do: {where} is up to date"
    elif before.version == 0:
        said = f"installed {where}, node {after.node}".replace(" of database", " in database")
    elif before.version == after.version:
        said = f"replaced the functions and views of {where}"
    else:
        said = f"upgraded {where} from version {before.version}"
    click.echo(label + said)
    if moved.rebased:
        click.echo(f"{label}{moved}")
    if node is not None and node != after.node:
        hint = "It is part of all existing job ids. `tallybook uninstall` removes them, and you can install it again"
        raise Problem(f"the node number stays {after.node}: it is set at the first installation", hint=hint)
    if foreign:
        raise Problem(foreign[0], hint=foreign[1])


@command(schema=False)
def uninstall(db: Db, yes: bool) -> str:
    """Remove the schema and all jobs.

    This includes their history and results. Nothing outside the schema `tallybook` changes.
    """
    database = db.conn.info.dbname
    if not is_installed(db.conn):
        return f"nothing to do: no schema tallybook in database {database!r}"
    if not yes:
        if not sys.stdin.isatty():
            text = f"nothing was removed from database {database!r}: there is no terminal to confirm on"
            raise Problem(text, hint="Pass --yes to remove all jobs and their history", exit_code=2)
        row = db.conn.execute("select count(*) from tallybook.worker w where w.ended_at is null").fetchone()
        if row and row[0]:
            click.echo(f"{row[0]} workers are registered as running; stop them first", err=True)
        click.echo(f"This removes all jobs, their history and their results from database {database!r}.", err=True)
        typed = click.prompt("Type the name of the database to continue", default="", show_default=False, err=True)
        if typed != database:
            raise Problem("that is not its name: nothing was removed")
    schema.uninstall(db.conn)
    return f"removed schema tallybook from database {database!r}"


service = click.Group("service", help="List and change the maintenance services.")

_SERVICES: Columns = {
    "service": "name", "every": "every", "last run": lambda one: local(one.last_run_at) or "never",
    "took": lambda one: "" if one.last_took is None else f"{one.last_took.total_seconds() * 1000:.1f} ms",
    "effect": "last_effect",
}  # fmt: skip


@listing(_SERVICES, of=service, empty="no services")
def list_services(db: Db) -> list[ServiceInfo]:
    """List the services with their last run. In JSON, times are in seconds."""
    return db.run(APP.services.list())


@command(of=service)
def every(db: Db, name: str, duration: timedelta) -> str:
    """Set the longest time between checks, like `rescue 10s`; applies within 5 s."""
    changed = db.run(APP.services.set(name, duration))
    shown = f"service {clean(name)} checks every {format_duration(duration)}"
    return f"{shown} at least" if changed else f"{shown} already"


history = click.Group("history", help="Show and change retention periods.")


@listing({"class": "name", "kept": "keep", "what": "what"}, of=history, empty="none")
def list_retentions(db: Db) -> list[RetentionInfo]:
    """Show retention periods. In JSON, they are in seconds."""
    return db.run(APP.history.list())


@command("set", of=history)
def set_(db: Db, name: str, keep: timedelta) -> str:
    """Change a retention period, like `brief 2h`; applies within a minute."""
    changed = db.run(APP.history.set(name, keep))
    return f"{clean(name)} is kept for {format_duration(keep)}" + ("" if changed else " already")


_HELD: Columns = {
    "class": "name", "from transaction": "lower", "to": "upper", "due since": "due_at", "open jobs": "open_jobs",
    "held by": "why",
}  # fmt: skip


@listing(_HELD, name="held", of=history, empty="nothing is held")
def held(db: Db) -> list[HeldRange]:
    """List history that is past its retention but still held, and why."""
    return db.run(APP.history.held())


def _pairs(found: dict[str, object]) -> str:
    return " ".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in found.items())


_AUDITED: Columns = {
    "id": "id", "at": "at", "actor": "actor", "via": "via", "action": "action",
    "target": lambda row: _pairs(row.target), "done": lambda row: _pairs(row.done),
}  # fmt: skip


@listing(_AUDITED, name="audit", empty="nothing was changed", merge=newest("at", "id"))
@click.option("--actor", metavar="NAME", help="Only changes of this user, API key or agent.")
@click.option("--action", metavar="VERB", help="Only this verb, like retry.")
@click.option("--before", type=int, metavar="ID", help="Only rows with a lower id, for the next page.")
@limit_option(1000, says="Show at most this many rows.")
def audit(db: Db, limit: int, **given: Any) -> list[AuditRow]:
    """List the audit log, newest first.

    It contains changes made on the dashboard, through the operator API, in Django's admin and over MCP, but not those
    made on the command line.
    """
    return db.run(APP.audit.list(**given, max_rows=limit))


@command()
@click.option("--prefix", default=database.PREFIX, show_default=True, help="Prefix of the names of the five roles.")
@click.option("--existing", is_flag=True, help="Create no role: grant the rights to existing ones.")
@click.option("--sql", "only_sql", is_flag=True, help="Print the SQL; change nothing.")
@click.option("--forget", is_flag=True, help="Revoke the rights and make the functions public again.")
def roles(db: Db, prefix: str, existing: bool, only_sql: bool, forget: bool) -> str | None:
    """Create the database roles and grant them their rights.

    The roles are producer, worker, operator, reader and metrics.

    Run it as the owner of the schema; you can safely run it again. The functions then run with the owner's rights, and
    only these roles may use them. Later migrations preserve these rights.
    """
    if forget and (existing or only_sql):
        raise click.UsageError("--forget cannot be combined with --existing or --sql")
    if only_sql:
        click.echo(database.script(prefix, existing=existing), nl=False)
        return None
    where = f"schema tallybook of database {db.conn.info.dbname!r}"
    if forget:
        found = database.forget(db.conn)
        if not found:
            return f"nothing to do: {where} has no roles"
        return f"revoked all rights in {where} from {', '.join(map(clean, found))}; the roles still exist"
    if owner := database.superuser_owner(db.conn):
        risk = "functions called by the roles run with a superuser's rights. Install it as an ordinary owner"
        click.echo(f"warning: {where} belongs to {clean(owner)}, a superuser: {risk}", err=True)
    done = database.create(db.conn, prefix, existing=existing)
    for name in done.names:
        click.echo(f"{name}: {'created' if name in done.created else 'exists already'}")
    return f"they have their rights in {where}; grant them to your logins: grant {done.names[0]} to your_login"


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
