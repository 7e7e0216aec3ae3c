"""tallybook roles: database roles and their rights."""

from __future__ import annotations

import click

from tallybook._cli.common import command
from tallybook._cli.database import Db
from tallybook._cli.text import clean
from tallybook._db import roles as database


@command()
@click.option("--prefix", default=database.PREFIX, show_default=True, help="Prefix of the names of the five roles.")
@click.option("--existing", is_flag=True, help="Create no role: grant the rights to existing ones.")
@click.option("--sql", "only_sql", is_flag=True, help="Print the SQL; change nothing.")
@click.option("--forget", is_flag=True, help="Revoke the rights and make the functions public again.")
def roles(db: Db, prefix: str, existing: bool, only_sql: bool, forget: bool) -> str | None:
    """Create the database roles, with exactly their rights.

    They are producer, worker, operator, reader and metrics.

    Run it as the owner of the schema; safe to run twice. The functions then run with the owner's rights, and
    nobody but these roles may use them. Migrations keep it so.
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
        click.echo(
            f"warning: {where} belongs to {clean(owner)}, a superuser: functions called by the roles run with a superuser's"
            " rights. Install it as an ordinary owner",
            err=True,
        )
    done = database.create(db.conn, prefix, existing=existing)
    for name in done.names:
        click.echo(f"{name}: {'created' if name in done.created else 'exists already'}")
    return f"they have their rights in {where}; grant them to your logins: grant {done.names[0]} to your_login"
