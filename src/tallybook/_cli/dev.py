"""tallybook dev: a PostgreSQL, the schema, and a worker that restarts when the code changes; tallybook demo."""

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
from tallybook._cli.output import clean, working
from tallybook._db import migrate
from tallybook._db.driver import conninfo_to_dict
from tallybook._db.link import dsn_for_people
from tallybook._worker.life.supervisor import DSN_OF_PARENT, WRONG, Child
from tallybook._worker.run.ending import exit_text
from tallybook.errors import QueueUnavailable, TallybookError

_WAITING = "select count(*) from tallybook.job where state in ('available', 'scheduled')"
_LOOK_EVERY = 0.5
_PATIENCE = 12.0  # above the child's own 2 s for running jobs and 5 s for aborted ones
_MOST_FILES = 20_000
_NOT_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"})
_Files = dict[str, tuple[int, int]]


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
        code = asyncio.run(_run(child, None if no_reload else root))
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
        psql, look = "psql", "select id, state, task, queue, last_error from tallybook.job order by id desc limit 10"
        if shutil.which(psql) is None:  # then that of the embedded PostgreSQL
            with suppress(ImportError, TallybookError):
                from tallybook.embedded import binaries

                if (found := binaries(18) / "psql").exists():
                    psql = shlex.quote(str(found))
        click.echo(f"database: {dsn}")
        click.echo("In another terminal, for programs and commands, and to list the newest jobs:")
        click.echo(f"export TALLYBOOK_DSN={shlex.quote(dsn)}")
        click.echo(f"{psql} {shlex.quote(dsn)} -c {shlex.quote(look)}")
    if waiting:
        click.echo(f"{waiting} jobs are waiting from an earlier run")
    click.echo("Ctrl-C stops everything")


async def _run(child: Child, root: Path | None) -> int:
    """Run the worker until a signal, and again after each change below the root; return 0, or 1 if it failed."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if stopping.done():
            child.send(signal.SIGTERM)  # the worker's second signal, too: it aborts
        else:
            stopping.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    seen = await asyncio.to_thread(_look, root) if root else {}
    code = 0
    while not stopping.done():
        await child.start()
        changed = asyncio.ensure_future(_changed(root, seen)) if root else loop.create_future()
        ended = asyncio.ensure_future(child.ended())
        await asyncio.wait((stopping, changed, ended), return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not stopping.done() and not changed.done():
            then = "Ctrl-C ends this" if root is None else "it restarts when the code changes"
            click.echo(f"the worker {exit_text(ended.result())}; {then}", err=True)
            await asyncio.wait((stopping, changed), return_when=asyncio.FIRST_COMPLETED)
        if changed.done():
            name, seen = changed.result()
            click.echo(f"{clean(name)} changed, restarting the worker", err=True)
        changed.cancel()
        code = await child.stop(_PATIENCE)
        await ended
    return 1 if code not in (0, WRONG) else 0


async def _changed(root: Path, seen: _Files) -> tuple[str, _Files]:
    """Wait until a file is added, removed or changed; return its name, and all files."""
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        now = await asyncio.to_thread(_look, root)
        if different := sorted(dict(now.items() ^ seen.items())):
            return different[0].removeprefix(f"{root}/"), now


def _look(root: Path) -> _Files:
    """Return time and size of every .py file below the root, without hidden directories and environments."""
    found: _Files = {}
    for folder, folders, files in os.walk(root):
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


@click.command()
@click.option(
    "--input", "input_", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.csv",
    help="CSV file with your own rows.",
)  # fmt: skip
@click.option("--plain", is_flag=True, help="Print plain lines, even on a terminal.")
def demo(input_: Path | None, plain: bool) -> None:
    """Send webhooks with failures, on a temporary PostgreSQL.

    It sends form submissions as webhooks, some of which fail, kills a worker in the middle, and counts the deliveries.
    """
    from tallybook.extra.demo import run

    sys.exit(run(input_, plain=plain or None))
