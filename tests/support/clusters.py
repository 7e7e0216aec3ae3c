"""Independent clusters, each from its own initdb and with its own system identifier.

    with cluster(epoch=1) as old, cluster() as new:          # the next transaction id: 4,294,968,000 and 700
        dump_and_restore(old.dsn("shop"), new.create_database("shop"))

The embedded servers of the other tests are copies of one cluster and share one identifier, also those of `streaming`:
a primary and a hot standby.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from support.database import one
from support.paths import clean_environment
from support.waiting import wait_until
from tallybook._db.migrate import migrate
from tallybook._embedded.binaries import SUPERUSER, binaries, environment, reachable_binaries
from tallybook._embedded.directories import server_account
from tallybook._embedded.guard import NOT_DURABLE
from tallybook.embedded import Server, temporary_server


def as_server() -> dict[str, Any]:
    """Return the options of a child process that runs as the server's user; root needs them."""
    account = server_account()
    return {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}


def _run(*command: str | Path, **options: Any) -> None:
    options |= {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def cluster(version: int | None = None, *, epoch: int = 0, **settings: str) -> Iterator[Server]:
    """Run a server on a new cluster, whose next transaction id is in this epoch (2^32 ids each)."""
    account = server_account()
    programs = reachable_binaries(binaries(version), account)
    home = Path(tempfile.mkdtemp(prefix="tallybook-cluster-"))
    try:
        home.chmod(0o711)
        data = home / "data"
        data.mkdir(mode=0o700)
        if account is not None:
            account.owns(data)
        options = {"env": environment(), "cwd": "/", **as_server()}
        words = (f"--username={SUPERUSER}", "--encoding=UTF8", "--locale=C", "--auth=trust", "--no-sync", "-D", data)
        _run(programs / "initdb", *words, **options)
        if epoch:
            _run(programs / "pg_resetwal", "--epoch", str(epoch), "-D", data, **options)
        given = {**NOT_DURABLE, "max_prepared_transactions": "20", "max_connections": "100", **settings}
        with Server(data, version, given) as server:
            yield server
    finally:
        shutil.rmtree(home, ignore_errors=True)


def next_xid(conn: psycopg.Connection[Any]) -> int:
    """Use and return the server's next transaction id."""
    return int(one(conn, "select pg_current_xact_id()::text::bigint"))


def burn(conn: psycopg.Connection[Any], ids: int) -> None:
    """Use up `ids` transaction ids, one per subtransaction with a write."""
    conn.execute("create temp table if not exists burnt (n int)")
    conn.execute(
        "create or replace procedure pg_temp.burn(ids int) language plpgsql as $$ begin"
        " for i in 1 .. ids loop begin insert into burnt values (i); raise 'undo';"
        " exception when raise_exception then end; end loop; end $$"
    )
    conn.execute("call pg_temp.burn(%s)", (ids,))


def dump(dsn: str, file: Path, *options: str, version: int | None = None) -> None:
    """Run pg_dump into a file, by default in custom format. Its `version` must not be older than the server."""
    _tool(version, "pg_dump", "--format=custom", f"--file={file}", *options, f"--dbname={dsn}")


def restore(file: Path, dsn: str, *options: str) -> None:
    """Run pg_restore on a custom dump; stop at the first error."""
    _tool(None, "pg_restore", "--exit-on-error", "--no-owner", *options, f"--dbname={dsn}", str(file))


def psql(file: Path, dsn: str) -> None:
    """Run psql on a text dump; stop at the first error."""
    _tool(None, "psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={file}", f"--dbname={dsn}")


def _tool(version: int | None, name: str, *arguments: str) -> None:
    _run(binaries(version) / name, *arguments, env=clean_environment())


@contextmanager
def streaming() -> Iterator[tuple[Server, Server]]:
    """Yield a primary, whose database `shop` has Tallybook, and its standby, which has received all earlier changes."""
    account = server_account()
    folder = Path(tempfile.mkdtemp(prefix="tbstandby-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if account is not None:
            shutil.chown(folder, account.uid, account.gid)
        primary = stack.enter_context(temporary_server(18))
        with psycopg.connect(primary.create_database("shop")) as conn:
            migrate(conn)
        programs = reachable_binaries(binaries(18), account)
        copy = [programs / "pg_basebackup", "-d", primary.dsn("postgres"), "-D", folder / "data", "-R", "-c", "fast"]
        subprocess.run(copy, check=True, timeout=60, capture_output=True, cwd=folder, **as_server())
        standby = stack.enter_context(Server(folder / "data", 18, {"fsync": "off"}))
        with psycopg.connect(primary.dsn("postgres"), autocommit=True) as conn:
            streams = "select count(*) from pg_stat_replication where state = 'streaming'"
            wait_until(lambda: conn.execute(streams).fetchone() == (1,), "the standby streams")
        yield primary, standby
