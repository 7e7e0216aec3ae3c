"""A primary and a hot standby that streams from it, both embedded servers; the database `shop` has Tallybook."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

from support.clusters import as_server
from support.waiting import wait_until
from tallybook._db.migrate import migrate
from tallybook._embedded.account import server_account
from tallybook._embedded.binaries import binaries
from tallybook._embedded.template import reachable_binaries
from tallybook.embedded import Server, temporary_server

_STREAMS = "select count(*) from pg_stat_replication where state = 'streaming'"


@contextmanager
def streaming() -> Iterator[tuple[Server, Server]]:
    """Yield both servers for the block; the standby has received all earlier changes."""
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
            wait_until(lambda: conn.execute(_STREAMS).fetchone() == (1,), "the standby streams")
        yield primary, standby
