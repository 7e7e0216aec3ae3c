"""tallybook dev: a PostgreSQL, the schema, and a worker that restarts when the code changes."""

import asyncio
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from tallybook._cli.common import dsn_option, queues_option
from tallybook._cli.database import connect, conninfo
from tallybook._cli.errors import Problem
from tallybook._cli.loading import app_option, home
from tallybook._cli.output import working
from tallybook._cli.text import clean
from tallybook._db import migrate
from tallybook._db.driver import conninfo_to_dict
from tallybook._db.link import dsn_for_people
from tallybook._worker.life.supervisor import DSN_OF_PARENT, WRONG, Child
from tallybook._worker.run.ending import how
from tallybook.errors import QueueUnavailable, TallybookError

_WAITING = "select count(*) from tallybook.job where state in ('available', 'scheduled')"
_LOOK_EVERY = 0.5
_PATIENCE = 12.0  # above the child's own 2 s for running jobs and 5 s for aborted ones
_MOST_FILES = 20_000
_NOT_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"})


@click.command()
@app_option
@dsn_option
@click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), default=Path(".tallybook"), show_default=True,
    help="Where the embedded PostgreSQL keeps its data.",
)  # fmt: skip
@queues_option
@click.option("--no-reload", is_flag=True, help="Do not watch the code.")
def dev(target: str, dsn: str | None, data: Path, queues: str | None, no_reload: bool) -> None:
    """Start a database and a worker.

    It starts a private PostgreSQL server, installs the schema and runs a worker; Ctrl-C stops both. The worker restarts
    when a .py file below the app's directory changes. The data is kept. --dsn or TALLYBOOK_DSN select another database;
    `manage.py tallybook dev` uses the one in the settings.
    """
    root = home(target)
    with _database(dsn or os.environ.get("TALLYBOOK_DSN"), data) as found:
        with connect(found) as conn:
            jobs = conn.execute(_WAITING).fetchone()
        _greet(found, jobs[0] if jobs else 0)
        words = ["worker", "-A", target, "--stop-timeout", "2 s"]
        words += ["--queues", queues] if queues else []
        # By the environment, since every user of the machine can see a password on a command line.
        child = Child(words, env={"TALLYBOOK_DSN": found, DSN_OF_PARENT: found, "TALLYBOOK_DIRECT_DSN": ""})
        code = asyncio.run(_Dev(child, None if no_reload else root).run())
    sys.exit(code)


@contextmanager
def _database(dsn: str | None, data: Path) -> Iterator[str]:
    """Yield the conninfo of a database with the schema installed."""
    if dsn:
        try:
            _install(dsn)
        except QueueUnavailable as error:
            if dsn == os.environ.get("TALLYBOOK_DSN"):
                error.hint = "TALLYBOOK_DSN selects this server; unset it to start a private one"
            raise
        yield dsn
        return
    try:
        from tallybook.embedded import Server
    except ImportError as error:
        raise Problem(str(error), hint="Set a database with --dsn or TALLYBOOK_DSN", exit_code=2) from error
    _make(data)
    server = Server(data / "pg18", 18)
    try:
        with working(f"starting PostgreSQL 18 in {data / 'pg18'}"):
            server.start(attach=True)
        if server.attached:
            click.echo("another process started this server and will stop it", err=True)
        _install(server.dsn())
        yield server.dsn()
    finally:
        server.stop()


def _install(dsn: str) -> None:
    with connect(dsn, schema=False) as conn:
        for step in migrate.migrate(conn):
            click.echo(f"applied {step}", err=True)


def _make(data: Path) -> None:
    try:
        data.mkdir(parents=True, exist_ok=True)
        if not any(data.iterdir()):  # never in a directory that has other things, such as the project's
            (data / ".gitignore").write_text("*\n")
    except OSError as error:
        raise Problem(f"cannot write to {data}: {error.strerror}", hint="Pass another directory with --data") from error


def _greet(dsn: str, waiting: int) -> None:
    if conninfo_to_dict(conninfo(dsn)).get("password"):
        click.echo(f"database: {dsn_for_people(dsn)}")
    else:
        look = "select id, state, task, queue, last_error from tallybook.job order by id desc limit 10"
        click.echo(f"database: {dsn}")
        click.echo("In another terminal, for programs and commands, and to list the newest jobs:")
        click.echo(f"export TALLYBOOK_DSN={shlex.quote(dsn)}")
        click.echo(f"{_psql()} {shlex.quote(dsn)} -c {shlex.quote(look)}")
    if waiting:
        click.echo(f"{waiting} jobs are waiting from an earlier run")
    click.echo("Ctrl-C stops everything")


def _psql() -> str:
    """Return the command for psql: that of the embedded PostgreSQL if there is no other."""
    if shutil.which("psql") is None:
        with suppress(ImportError, TallybookError):
            from tallybook.embedded import binaries

            if (found := binaries(18) / "psql").exists():
                return shlex.quote(str(found))
    return "psql"


class _Dev:
    """One worker process, and a watcher of the code."""

    def __init__(self, child: Child, root: Path | None) -> None:
        self._child, self._root = child, root
        self._stopping = asyncio.Event()
        self._seen: dict[str, tuple[int, int]] = {}

    def _stop(self) -> None:
        if self._stopping.is_set():
            self._child.send(signal.SIGTERM)  # the worker's second signal, too: it aborts
        self._stopping.set()

    async def run(self) -> int:
        """Run until a signal; return 0, or 1 if the worker failed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)
        self._seen = await asyncio.to_thread(self._look)
        stopping = asyncio.ensure_future(self._stopping.wait())
        while not self._stopping.is_set():
            await self._child.start()
            changed = asyncio.ensure_future(self._changed())
            ended = asyncio.ensure_future(self._child.ended())
            await asyncio.wait((stopping, changed, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not self._stopping.is_set() and not changed.done():
                then = "Ctrl-C ends this" if self._root is None else "it restarts when the code changes"
                click.echo(f"the worker {how(ended.result())}; {then}", err=True)
                await asyncio.wait((stopping, changed), return_when=asyncio.FIRST_COMPLETED)
            if changed.done():
                click.echo(f"{clean(changed.result())} changed, restarting the worker", err=True)
            changed.cancel()
            code = await self._child.stop(_PATIENCE)
            await ended
        return 1 if code not in (0, WRONG) else 0

    async def _changed(self) -> str:
        """Wait until a file is added, removed or changed; return its name."""
        if self._root is None:
            return str(await asyncio.get_running_loop().create_future())
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            now = await asyncio.to_thread(self._look)
            before, self._seen = self._seen, now
            if different := sorted(dict(now.items() ^ before.items())):
                return different[0].removeprefix(f"{self._root}/")

    def _look(self) -> dict[str, tuple[int, int]]:
        """Return time and size of every .py file below the root, without hidden directories and environments."""
        found: dict[str, tuple[int, int]] = {}
        for folder, folders, files in os.walk(self._root or "/nowhere"):
            code = (name for name in folders if not name.startswith(".") and name not in _NOT_CODE)
            folders[:] = [name for name in code if not Path(folder, name, "pyvenv.cfg").exists()]
            for name in files:
                if name.endswith(".py"):
                    with suppress(OSError):
                        stat = Path(folder, name).stat()
                        found[f"{folder}/{name}"] = (stat.st_mtime_ns, stat.st_size)
            if len(found) > _MOST_FILES:
                break
        return found
