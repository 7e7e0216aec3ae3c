"""A small manager of a real PostgreSQL, for `tallybook dev`, the demo, the tests and users' tests.

    with temporary_server() as server:                      # removed completely at the end
        with psycopg.connect(server.dsn()) as conn: ...

    with Server(Path(".tallybook/pg18")) as server: ...     # keeps its data

Guarantees:

- No server is left behind, however the process that started it ends: a guard process holds the other end of a pipe
  (see _embedded/guard_main.py). If the guard is killed too, the kernel signals the postmaster (Linux).
- It changes owner and mode only of directories that it made itself. As root it runs the server as `postgres` or
  `nobody`, and copies files that this user cannot reach.
- The server listens only on a Unix socket in a private directory; with `tcp=True` also on 127.0.0.1 with a random
  password.

Known limits: Linux and macOS only, only Linux is tested. On macOS a server outlives its guard if that is killed by
SIGKILL, until the next start on the same data. A copy of the process made by a C library's fork() (not by Python's)
keeps the server running as long as the copy lives.
"""

import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

if sys.platform == "win32":
    raise ImportError("tallybook.embedded runs on Linux and macOS only; on Windows, use a PostgreSQL of your own")

import psycopg
from psycopg import sql

from ._embedded import EmbeddedBusy, EmbeddedError, EmbeddedStartFailed, EmbeddedUnavailable
from ._embedded.binaries import SUPERUSER, binaries, default_version, installed_versions, reachable_binaries
from ._embedded.cluster import Cluster, Postmaster, is_running
from ._embedded.directories import Account, RunDirectory, server_account
from ._embedded.guard import NOT_DURABLE, Guard, Setting, checked, command_line

__all__ = [
    "EmbeddedBusy", "EmbeddedError", "EmbeddedStartFailed", "EmbeddedUnavailable", "Server", "binaries",
    "default_version", "installed_versions", "temporary_server",
]  # fmt: skip

_PORT = 5432  # names the socket in its private directory; no two servers share one
_POLL = 0.02
_LARGEST_LOG = 10_000_000


class Server:
    """A PostgreSQL server on one data directory, created if it does not exist; a context manager.

    data_dir  kept when the server stops, with `NAME.log` and `NAME.lock` beside it. For root, if the server's user
              cannot reach it, it becomes a symbolic link to a directory in /var/lib/tallybook.
    version   major version; None: that of TALLYBOOK_PG_BIN, else 18. Must match existing data.
    settings  of postgresql.conf, passed on the command line. Settings of the listen addresses are refused.
    tcp       listen on 127.0.0.1 too, with a new password at each start, which is part of `dsn()`.
    port      the TCP port; None: a free one. Without `tcp` it only names the socket.
    """

    def __init__(
        self,
        data_dir: Path | str,
        version: int | None = None,
        settings: Mapping[str, Setting] | None = None,
        port: int | None = None,
        *,
        tcp: bool = False,
    ) -> None:
        self.version = default_version() if version is None else version
        self._cluster = Cluster(Path(data_dir), self.version)
        self.data_dir = self._cluster.path
        self.settings = checked(settings or {})
        self.log_path = self._cluster.beside(".log")
        self._wanted_port = port
        self._tcp = tcp
        self._account: Account | None = None
        self._run: RunDirectory | None = None
        self._is_temporary = False
        self._guard: Guard | None = None
        self._attached: Postmaster | None = None
        self._sockets: Path | None = None
        self._port = port or _PORT
        self._password = ""

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.pid else "not running"
        return f"<Server PostgreSQL {self.version} in {self.data_dir}, {state}>"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The postmaster's process number; None when no server runs."""
        if self._attached is not None:
            return self._attached.pid if is_running(self._attached.pid) else None
        return None if self._guard is None or self._guard.exited() else self._guard.pid

    @property
    def guard_pid(self) -> int | None:
        """The guard's process number; None when there is none, as for a server that we attached to."""
        return self._guard.process_id if self._guard is not None else None

    @property
    def attached(self) -> bool:
        """True when the server was started by another process, which will also stop it."""
        return self._attached is not None

    def dsn(self, dbname: str = "postgres") -> str:
        """Return a URI for one database, for psycopg, asyncpg, SQLAlchemy, Django and psql.

        It is the same at each start, except for the TCP password and a random port.
        Raises EmbeddedError if the server is not started.
        """
        if self._sockets is None:
            raise EmbeddedError(f"the server in {self.data_dir} is not started, so there is nothing to connect to")
        if self._tcp and self._attached is None:
            return f"postgresql://{SUPERUSER}:{self._password}@127.0.0.1:{self._port}/{quote(dbname, safe='')}"
        return self._socket_dsn(dbname)

    def start(self, *, attach: bool = False, timeout: float = 60.0) -> Self:
        """Start the server, on a new cluster if there is none, and return when it accepts connections.

        Does nothing if it runs already. If another process runs a server on this data directory, `attach` uses that
        server and `stop` only detaches; without `attach` EmbeddedBusy is raised. Waits for the end of a server whose
        starter has died. `timeout` is the total, in seconds.

        Raises EmbeddedUnavailable, EmbeddedBusy, EmbeddedStartFailed, and EmbeddedError if the data directory holds
        other files or another version.
        """
        if self.pid is not None:
            return self
        self._attached = None
        if self._guard is not None and not (self._guard.is_ours and self._guard.is_alive()):
            self._let_go()
        deadline = time.monotonic() + timeout
        self._account = server_account()
        programs = reachable_binaries(binaries(self.version), self._account)
        if self._guard is None:
            self.data_dir.parent.mkdir(parents=True, exist_ok=True)
            taken = self._cluster.take(attach=attach, deadline=deadline)
            if isinstance(taken, Postmaster):
                self._attached, self._sockets, self._port = taken, taken.sockets, taken.port or _PORT
                return self
            try:
                self._cluster.prepare(programs, self._account, durable=not self._is_temporary)
                self._open_guard(taken)
            finally:
                os.close(taken)  # the guard holds the lock from here on, and the server
        try:
            self._launch(programs, deadline)
        except BaseException:
            self.stop("immediate", timeout=0)
            raise
        return self

    def stop(self, mode: Literal["fast", "immediate"] = "fast", *, timeout: float = 60.0) -> None:
        """Stop the server and return when it has ended; does nothing if none runs.

        "fast" disconnects clients and writes all data to disk; after `timeout` seconds it becomes "immediate", which
        leaves crash recovery to the next start. An attached server keeps running.
        """
        if mode not in ("fast", "immediate"):
            raise ValueError(f"mode must be 'fast' or 'immediate', not {mode!r}")
        if self._guard is not None and not self._guard.exited():
            self._guard.stop(mode, timeout)
        self._let_go()

    def kill(self) -> None:
        """Kill the postmaster and all of its processes with SIGKILL, and return when they have ended.

        `start` brings the server back under the same DSN, through crash recovery. Until then or `stop` the data
        directory stays taken. Raises EmbeddedError for an attached server.
        """
        if self._attached is not None:
            raise EmbeddedError("another process started this server, and only that process may kill it")
        if self._guard is not None and not self._guard.exited():
            self._guard.kill()

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database, optionally as a copy of `template`, and return its DSN. Psycopg's errors pass through."""
        statement = sql.SQL("create database {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" template {}").format(sql.Identifier(template))
        self._execute(statement)
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, and disconnect its clients."""
        self._execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _open_guard(self, lock: int) -> None:
        if self._run is None:
            self._run = RunDirectory.make(self._account, for_data=self.data_dir)
        with suppress(FileNotFoundError):
            if self.log_path.stat().st_size > _LARGEST_LOG:
                self.log_path.rename(self._cluster.beside(".log.1"))
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._guard = Guard(self._run.path, self._account, log, (self._run.lock, lock))
        finally:
            os.close(log)

    def _launch(self, programs: Path, deadline: float) -> None:
        assert self._guard is not None and self._run is not None
        self._sockets = self._run.sockets
        for left in self._sockets.glob(".s.PGSQL.*"):
            left.unlink()  # of a killed server; the directory is for this one alone
        self._cluster.clear_stale()
        log_start = self.log_path.stat().st_size
        for attempt in range(3):
            if self._wanted_port is None and self._tcp:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    self._port = probe.getsockname()[1]
            data = self.data_dir.resolve()
            line = command_line(programs, data, self.settings, sockets=self._sockets, port=self._port, tcp=self._tcp)
            self._guard.start(line)
            if self._becomes_ready(deadline):
                break
            log = self.log_path.read_bytes()[log_start:].decode(errors="replace")
            tail = "\n".join(log.splitlines()[-20:])
            taken = self._tcp and self._wanted_port is None and "could not bind" in tail
            if not taken or attempt == 2:  # somebody else may take a free port before the server does
                what = "did not become ready in time" if self._guard.pid else "ended while starting"
                text = f"PostgreSQL {self.version} in {self.data_dir} {what}; see {self.log_path}"
                raise EmbeddedStartFailed(text, log_tail=tail)
        if self._tcp:
            self._set_password()

    def _becomes_ready(self, deadline: float) -> bool:
        assert self._guard is not None
        while time.monotonic() < deadline and not self._guard.exited(_POLL):
            with suppress(psycopg.OperationalError):
                psycopg.connect(self._socket_dsn("postgres"), connect_timeout=5).close()
                return True
        return False

    def _set_password(self) -> None:
        self._password = secrets.token_urlsafe(24)
        with psycopg.connect(self._socket_dsn("postgres"), autocommit=True) as conn:
            # Hashed here, so that the password itself shows up in no log and no pg_stat_activity.
            secret = conn.pgconn.encrypt_password(self._password.encode(), SUPERUSER.encode(), b"scram-sha-256")
            statement = sql.SQL("alter role {} password {}")
            conn.execute(statement.format(sql.Identifier(SUPERUSER), sql.Literal(secret.decode())))

    def _let_go(self) -> None:
        """Release a server that has ended or was attached, and its guard."""
        self._attached = self._sockets = None
        guard = self._guard
        if guard is not None and not guard.is_ours:
            if self._run is not None:
                self._run.release()
            self._guard = self._run = None
            return
        if guard is not None and not (self._is_temporary and guard.is_alive()):
            self._guard = None
            if not guard.close():
                self._cluster.end_abandoned()
        if self._guard is None and not self._is_temporary and self._run is not None:
            self._run.remove()  # the guard has done that already, unless it was killed
            self._run.release()
            self._run = None

    def _socket_dsn(self, dbname: str) -> str:
        name, host = quote(dbname, safe=""), quote(str(self._sockets), safe="/")
        return f"postgresql://{SUPERUSER}@/{name}?host={host}&port={self._port}"

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            conn.execute(statement)


@contextmanager
def temporary_server(
    version: int | None = None,
    settings: Mapping[str, Setting] | None = None,
    durable: bool = False,
    *,
    tcp: bool = False,
) -> Iterator[Server]:
    """Run a server on a new cluster for the length of the `with` block, and remove both at its end.

    Unless `durable`, nothing is forced to disk: commits survive `Server.kill()`, but not a crash of the machine. The
    server can be stopped, killed and started again inside the block. If this process dies, server and directory are
    removed within seconds. Errors as in `Server.start`.
    """
    # Their errors come before there is a directory that would have to be removed.
    version = default_version() if version is None else version
    settings = checked({**({} if durable else NOT_DURABLE), **(settings or {})})
    run = RunDirectory.make(server_account())
    server = Server(run.path / "data", version, settings, tcp=tcp)
    server._run = run
    server._is_temporary = True
    try:
        yield server.start()
    finally:
        server._is_temporary = False
        server.stop("immediate")
