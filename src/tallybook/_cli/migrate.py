"""tallybook migrate, uninstall: the schema in the database."""

import sys
from datetime import timedelta

import click

from tallybook._cli.common import command, dsn_option, duration
from tallybook._cli.database import Db, connect, conninfo
from tallybook._cli.errors import Problem, problem, say
from tallybook._cli.text import clean
from tallybook._db import migrate as schema
from tallybook._db import nodes
from tallybook._db.migrate import is_installed
from tallybook._maintenance.services import rebase


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
    chosen = nodes.nodes(dsn, which)
    for one in everyone:
        if not any(one.name == other.name for other in chosen):
            continue
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
        hint = "It is part of all existing job ids. A new number needs a new installation"
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
