"""Debian's PgBouncer in transaction mode between the tests and their server.

`Pooler` is one process in front of one server; `dsn(...)` returns the DSN of a database through it.
"""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tallybook._embedded.directories import server_account

PACKAGE = "Debian package pgbouncer"
_PORT = 6432


def installed() -> str | None:
    """Return the path of PgBouncer, or None."""
    return shutil.which("pgbouncer", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")


class Pooler:
    """A PgBouncer for one server, on its own Unix socket; a context manager."""

    def __init__(
        self, server_dsn: str, *, mode: str = "transaction", pool_size: int = 50, rotate: bool = False
    ) -> None:
        given = conninfo_to_dict(server_dsn)
        target = " ".join(f"{key}={given[key]}" for key in ("host", "port", "user", "password") if given.get(key))
        self._user = str(given["user"])
        self._folder = Path(tempfile.mkdtemp(prefix="tbpool-"))
        self._folder.chmod(0o755)
        self._log = self._folder / "log"
        settings = {
            "listen_addr": "",
            "listen_port": _PORT,
            "unix_socket_dir": self._folder,
            "auth_type": "any",
            "pool_mode": mode,
            "default_pool_size": pool_size,
            "max_client_conn": 1000,
            "server_idle_timeout": 20,
            "server_round_robin": int(rotate),  # each transaction uses the session that was idle longest
            "logfile": self._log,
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        self._file = self._folder / "pgbouncer.ini"
        self._file.write_text("\n".join(["[databases]", f"* = {target}", "[pgbouncer]", *lines, ""]))

    def __enter__(self) -> Self:
        program = installed()
        assert program is not None
        command = [program, "-q", str(self._file)]
        account = server_account()
        if os.getuid() == 0 and account is not None:  # PgBouncer refuses to run as root
            shutil.chown(self._folder, account.uid, account.gid)
            self._process = subprocess.Popen(command, user=account.uid, group=account.gid, extra_groups=[])
        else:
            self._process = subprocess.Popen(command)
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError("PgBouncer did not start")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.dsn("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def dsn(self, dbname: str) -> str:
        """Return the DSN of one database through this pooler."""
        return make_conninfo(host=str(self._folder), port=str(_PORT), user=self._user, dbname=dbname)
