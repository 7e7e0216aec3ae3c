"""The primary, and a standby before a failover; both on the run's small disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from chaos.breaks import BREAKS
from chaos.places import Place
from chaos.proxy import Proxy
from tallybook._db.migrate import migrate
from tallybook._embedded.directories import server_account
from tallybook.embedded import EmbeddedError, Server, binaries

DATABASE = "chaos"
STANDBY = "chaos_standby"
VERSION = 18
# The operating system survives all faults here, so a commit that was handed to it survives without fsync. Full pages
# are still written: a promoted server of 18 considers recovery consistent from its first record on, and panics at a
# page that a later WAL record cuts off.
SETTINGS = {
    "fsync": "off",
    "max_connections": "150",
    "max_wal_size": "256MB",
    "wal_keep_size": "128MB",
    "hot_standby": "on",
    "wal_sender_timeout": "5s",
    "wal_receiver_timeout": "5s",
}
_STANDBYS = "select 1 from pg_stat_replication where application_name = %s"
# An effect is a row without a unique key: a second effect is counted, not prevented.
TABLES = """
create table effect (job_id bigint not null, attempt int not null, key bigint not null, worker text not null,
                     at timestamptz not null default clock_timestamp());
"""


class Servers:
    """Two server directories, `a` and `b`; one has the primary."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._account = server_account()
        self._servers = {name: self._server(name) for name in ("a", "b")}
        self.primary = "a"
        self.replication: Proxy | None = None
        self.promotions = 0

    def _server(self, name: str, **more: str) -> Server:
        return Server(self._place.disk / name, VERSION, {**SETTINGS, **more})

    @property
    def server(self) -> Server:
        """The primary."""
        return self._servers[self.primary]

    @property
    def other(self) -> str:
        return "b" if self.primary == "a" else "a"

    def socket(self) -> str:
        """Return the primary's current socket, which the proxies connect to."""
        return f"{self._place.links / self.primary}/.s.PGSQL.5432"

    def dsn(self, *, port: int | None = None, durable: bool = True) -> str:
        """Return a client's DSN: of both hosts, using the writable one, or of the proxy on `port`.

        durable  commits wait for the standby if there is one, so that a commit acknowledged to a producer survives a
                 failover. Workers do not wait, so that their last claims, ends and effects are lost with the primary:
                 this is the wanted fault, and breaks no promise.
        """
        links = self._place.links
        where = f"host=127.0.0.1 port={port}" if port else f"host={links}/a,{links}/b port=5432,5432"
        level = "on" if durable else "local"
        return (
            f"{where} dbname={DATABASE} user=postgres sslmode=disable gssencmode=disable connect_timeout=10 "
            f"target_session_attrs=read-write options='-c synchronous_commit={level}'"
        )

    def start(self, broken: str | None) -> None:
        """Start the first primary with database, schema and the table of effects, without the fence `broken`."""
        self._up(self.primary)
        self.server.create_database(DATABASE)
        with self.connect() as conn:
            migrate(conn)
            conn.execute(TABLES)
            if broken is not None:
                BREAKS[broken].apply(conn)

    def connect(self, **kwargs: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """Return the harness's own connection, without a proxy."""
        return psycopg.connect(
            self.server.dsn(DATABASE),
            **{"autocommit": True, "application_name": "judge", "connect_timeout": 5, **kwargs},
        )

    def ask(self, sql: str, params: Sequence[object] = (), *, seconds: float = 60.0) -> list[tuple[Any, ...]]:
        """Return the rows of one statement; retry for `seconds` while the server is down. Coroutines use a thread."""
        until = time.monotonic() + seconds
        while True:
            try:
                with self.connect() as conn:
                    conn.execute("set synchronous_commit = local")
                    cursor = conn.execute(sql, params)
                    return list(cursor.fetchall()) if cursor.description else []
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL the postmaster and all its processes."""
        self.server.kill()

    def ensure_up(self) -> bool:
        """Start the primary if it has exited; return whether it had."""
        if self.server.pid is not None:
            return False
        self._up(self.primary)
        return True

    def _up(self, name: str) -> None:
        server = self._servers[name].start()
        link = self._place.links / name
        target = conninfo_to_dict(server.dsn())["host"]
        if not link.is_symlink() or str(link.readlink()) != target:
            link.unlink(missing_ok=True)
            link.symlink_to(str(target))

    async def failover(self, say: Callable[[str], None], dies: Callable[[], None], *, dark: float) -> None:
        """Build a standby, cut it off, kill the primary `dark` seconds later, promote the standby.

        Producers' commits wait for the synchronous standby before it is cut off, so no acknowledged commit is lost.
        Claims, ends and effects do not wait; those of the dark seconds are lost.
        """
        assert self.replication is not None
        await asyncio.to_thread(self._build_standby, self.replication.port)
        await asyncio.to_thread(self._synchronous)
        await asyncio.sleep(1.0)
        self.replication.half_open()
        await asyncio.sleep(dark)
        lost = await asyncio.to_thread(self._behind)
        dies()
        await asyncio.to_thread(self._promote)
        self.replication.reset()
        self.replication.heal()
        say(f"promoted {self.primary}; the standby lacked the last {lost} bytes of WAL")

    def _build_standby(self, port: int) -> None:
        name = self.other
        old = self._servers[name]
        old.stop("immediate")
        data = self._place.disk / name
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(mode=0o700)
        as_server: dict[str, Any] = {}
        if self._account is not None:
            self._account.owns(data)
            as_server = {"user": self._account.uid, "group": self._account.gid, "extra_groups": ()}
        self.ask("checkpoint")
        socket = conninfo_to_dict(self.server.dsn())["host"]
        subprocess.run(
            [self._program("pg_basebackup"), "-D", str(data), "-h", str(socket), "-U", "postgres", "-X", "stream",
             "-c", "fast", "--no-sync"],
            check=True, capture_output=True, cwd="/", timeout=120, **as_server,
        )  # fmt: skip
        signal = data / "standby.signal"
        signal.touch()
        if self._account is not None:
            os.chown(signal, self._account.uid, self._account.gid)
        source = (
            f"host=127.0.0.1 port={port} user=postgres sslmode=disable gssencmode=disable application_name={STANDBY}"
        )
        self._servers[name] = self._server(name, primary_conninfo=source)
        self._up(name)

    def _program(self, name: str) -> str:
        """Return the path of a program of the server's version that the server's user can reach."""
        from tallybook._embedded.binaries import reachable_binaries

        return str(reachable_binaries(binaries(VERSION), self._account) / name)

    def _synchronous(self) -> None:
        """Make the standby synchronous and wait until it has all commits that producers know of."""
        self._until("the standby streams", f"{_STANDBYS} and state = 'streaming'")
        with self.connect() as conn:
            conn.execute(f"alter system set synchronous_standby_names = '{STANDBY}'")
            conn.execute("select pg_reload_conf()")
        self._until("the standby is synchronous", f"{_STANDBYS} and sync_state = 'sync'")
        # Once the standby has this position, it also has all earlier commits, because WAL is ordered.
        ((lsn,),) = self.ask("select pg_current_wal_insert_lsn()::text")
        self._until("the standby has caught up", f"{_STANDBYS} and flush_lsn >= %s::pg_lsn", lsn)

    def _until(self, what: str, sql: str, *params: object, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not self.ask(sql, (STANDBY, *params)):
            if time.monotonic() > until:
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            time.sleep(0.05)

    def _behind(self) -> int:
        """Return how many bytes of WAL the standby lacks."""
        ((here,),) = self.ask("select (pg_current_wal_flush_lsn() - '0/0')::bigint")
        with psycopg.connect(self._servers[self.other].dsn(), autocommit=True) as conn:
            row = conn.execute(
                "select (coalesce(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) - '0/0')::bigint"
            ).fetchone()
        assert row is not None
        return int(here) - int(row[0])

    def _promote(self) -> None:
        self.server.kill()
        self.server.stop("immediate")
        (self._place.links / self.primary).unlink(missing_ok=True)
        self.primary = self.other
        with psycopg.connect(self.server.dsn(), autocommit=True) as conn:
            conn.execute("select pg_promote(true, 60)")
        self.promotions += 1

    def log_lines(self, *needles: str) -> dict[str, int]:
        """Return how often each needle is in the servers' logs."""
        found = dict.fromkeys(needles, 0)
        for path in self._logs():
            with suppress(OSError):
                text = path.read_text(errors="replace")
                for needle in needles:
                    found[needle] += text.count(needle)
        return found

    def _logs(self) -> list[Path]:
        return sorted(self._place.disk.glob("*.log*"))

    def stop(self) -> None:
        """Stop both servers and ignore errors."""
        for server in self._servers.values():
            with suppress(EmbeddedError):
                server.stop("immediate")
