"""One data directory: which process may use it now, and what is in it.

NAME.lock lies beside the directory. Its lock (flock) is taken before anything in the directory is touched. The guard
and every server process inherit it, so it is free when the last of them is gone. The number in the file is the pid of
the process that started the server.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import EmbeddedBusy, EmbeddedError
from .binaries import INITDB, UNFINISHED, environment, fingerprint
from .directories import Account, cache_directory, locked, owner_uid, redirected_parent, try_lock


@dataclass(frozen=True)
class Postmaster:
    """The contents of a postmaster.pid, as far as they have been written."""

    pid: int
    port: int | None
    sockets: Path | None
    ready: bool


def read_postmaster(data: Path) -> Postmaster | None:
    """Return the contents of postmaster.pid, current or stale; None if it is missing or not written yet."""
    try:
        lines = (data / "postmaster.pid").read_text(errors="replace").splitlines()
        pid = abs(int(lines[0]))  # negative for a server in single-user mode
    except (OSError, ValueError, IndexError):
        return None
    lines += [""] * (8 - len(lines))
    return Postmaster(
        pid=pid,
        port=int(lines[3]) if lines[3].isdecimal() else None,
        sockets=Path(lines[4]) if lines[4] else None,
        ready=lines[7].strip() == "ready",
    )


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # kill() also finds zombies. In a container whose first process does not reap them, they stay for good.
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return True


def is_postmaster_of(pid: int, data: Path) -> bool:
    """Return whether a running process can be the server of this data directory; True in doubt.

    After a crash, another program may have the pid that postmaster.pid still names.
    """
    if not is_running(pid):
        return False
    process = Path(f"/proc/{pid}")
    with suppress(OSError):
        if not (process / "comm").read_text().startswith("postgres"):
            return False
    with suppress(OSError):  # unreadable to other users; a postmaster works in its data directory
        return (process / "cwd").readlink() == data
    return True


_LOG_LINES = 20
_POLL = 0.02
_SECONDS_FOR_A_DYING_SERVER = 20.0


class Cluster:
    """A data directory at a fixed path, for servers of one major version."""

    def __init__(self, path: Path, version: int) -> None:
        # Only the parent is resolved: the directory itself may be a link of ours.
        self.path = path.parent.resolve() / path.name
        self.version = version

    def beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def take(self, *, attach: bool, deadline: float) -> int | Postmaster:
        """Take the lock for a new server and return its descriptor.

        If a server runs already: with `attach`, return it once it is ready; without, raise EmbeddedBusy. If the process
        that started a server is dead, its guard is about to stop that server, so wait for its end.
        """
        if not attach:
            deadline = min(deadline, time.monotonic() + _SECONDS_FOR_A_DYING_SERVER)
        while True:
            lock = self._try_lock()
            postmaster = self._postmaster()
            if lock is not None and postmaster is None:
                self.clear_stale()
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock
            starter = None
            if lock is None:
                with suppress(OSError, ValueError):
                    starter = int(self.beside(".lock").read_text())
            else:
                os.close(lock)  # another program, for example pg_ctl, started the server
            if postmaster is not None and (starter is None or is_running(starter)):
                if not attach:
                    raise self._busy(postmaster.pid, starter)
                if postmaster.ready and postmaster.sockets is not None:
                    return postmaster
            if time.monotonic() > deadline:
                raise self._busy(postmaster.pid if postmaster else None, starter)
            time.sleep(_POLL)

    def prepare(self, programs: Path, account: Account | None, *, durable: bool) -> None:
        """Make the cluster if there is none, else check that we can run it. The lock must be held."""
        target = self._place(account)
        found = target / "PG_VERSION"
        if not target.exists() or not any(target.iterdir()):
            new_cluster(target, programs, account, durable=durable)
        elif not found.is_file():
            raise EmbeddedError(f"{target} is not empty and not a PostgreSQL data directory; name another one")
        elif (there := found.read_text().strip()) != str(self.version):
            raise EmbeddedError(f"{target} holds data of PostgreSQL {there}, which version {self.version} cannot read")
        elif (owner := target.stat().st_uid) != (us := owner_uid(account)):
            raise EmbeddedError(f"{target} belongs to uid {owner}, but its server would run as uid {us}")

    def clear_stale(self) -> None:
        """Remove what a dead server wrote about itself. The lock must be held, by us or by our guard.

        PostgreSQL itself would refuse to start if the pid now belongs to a zombie or to another program.
        """
        if self._postmaster() is None:
            (self.path / "postmaster.pid").unlink(missing_ok=True)

    def end_abandoned(self) -> None:
        """Wait until a server of ours whose guard was killed is gone; the kernel has signalled it, where it can."""
        deadline = time.monotonic() + _SECONDS_FOR_A_DYING_SERVER
        while (lock := self._try_lock()) is None:
            if (postmaster := self._postmaster()) is not None:
                with suppress(ProcessLookupError):
                    os.kill(postmaster.pid, signal.SIGQUIT)
            if time.monotonic() > deadline:
                raise EmbeddedError(f"the server in {self.path} has lost its guard and does not stop")
            time.sleep(_POLL)
        os.close(lock)

    def _postmaster(self) -> Postmaster | None:
        """Return the server that runs on the data; None if there is none, or only the file of a dead one."""
        data = self.path.resolve()
        postmaster = read_postmaster(data)
        return postmaster if postmaster is not None and is_postmaster_of(postmaster.pid, data) else None

    def _try_lock(self) -> int | None:
        path = self.beside(".lock")
        try:
            return try_lock(path)
        except PermissionError as error:
            raise EmbeddedError(f"cannot lock {self.path}: {path} belongs to another user") from error

    def _busy(self, pid: int | None, starter: int | None) -> EmbeddedBusy:
        by = f", started by process {starter}" if starter else ""
        if pid is None:
            return EmbeddedBusy(f"{self.path} is held by a server that neither becomes ready nor stops{by}")
        return EmbeddedBusy(
            f"{self.path} is in use by PostgreSQL (pid {pid}{by}). "
            "Stop that one first, or start with attach=True to use it too.",
            pid=pid,
        )

    def _place(self, account: Account | None) -> Path:
        if self.path.exists():
            return self.path.resolve()
        self.path.unlink(missing_ok=True)  # our own link, whose target was removed
        if account is None or account.enters(self.path.parent):
            return self.path
        # A link instead of opening up root's directories. Its target has a random name: a user who removes the link to
        # start afresh must not find the old data again.
        elsewhere = Path(tempfile.mkdtemp(prefix=f"{self.path.name}-", dir=redirected_parent(account)))
        self.path.symlink_to(elsewhere)
        return elsewhere


def new_cluster(target: Path, bin_directory: Path, account: Account | None, *, durable: bool) -> None:
    """Make `target` a fresh data directory that belongs to the server's user; with `durable`, sync it to disk.

    `target` may exist as an empty directory. The server's user must be able to reach its parent.
    """
    cache = cache_directory(account)
    with locked(cache / "template.lock") as lock:
        template = _template(cache, bin_directory, account, lock)
        # Copy under the lock, too: a process that holds it may delete a broken template.
        for left in target.parent.glob(f".{target.name}{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}{UNFINISHED}", dir=target.parent))
        try:
            if account is not None:
                unfinished.chmod(0o711)  # for the server's user, who owns only its contents
            _copy(template, unfinished / "data")
            if durable:
                _run(bin_directory, account, "--sync-only", str(unfinished / "data"))
            (unfinished / "data").rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _template(cache: Path, bin_directory: Path, account: Account | None, lock: int) -> Path:
    name = f"template-{fingerprint(bin_directory)}-{owner_uid(account)}"
    template = cache / name
    for left in cache.glob(f"template-*{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    if (template / "PG_VERSION").is_file() and (template / "global" / "pg_control").is_file():
        return template
    shutil.rmtree(template, ignore_errors=True)  # emptied by a user, or by a cache cleaner
    unfinished = Path(tempfile.mkdtemp(prefix=name + UNFINISHED, dir=cache))
    if account is not None:
        account.owns(unfinished)
    # initdb inherits the lock: if we are killed, no process removes the directory while initdb still runs.
    # It syncs to disk (80 ms here), else a power cut could leave a template that looks complete but has empty files.
    _run(bin_directory, account, *INITDB, str(unfinished), lock=lock)
    unfinished.rename(template)
    return template


def _run(bin_directory: Path, account: Account | None, *arguments: str, lock: int | None = None) -> None:
    identity: Any = {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}
    done = subprocess.run(
        [bin_directory / "initdb", *arguments[:-1], "-D", arguments[-1]],
        env=environment(),
        cwd="/",  # the server's user may not be able to enter the current one
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        pass_fds=() if lock is None else (lock,),
        **identity,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-_LOG_LINES:])
        raise EmbeddedError(f"{bin_directory / 'initdb'} failed with status {done.returncode}:\n{tail}")


def _copy(source: Path, target: Path) -> None:
    """Copy a data directory with owners, modes and times; share blocks if the file system can."""
    fast = ["-Rpc"] if sys.platform == "darwin" else ["-a", "--reflink=auto"]
    problem = ""
    for options in (fast, ["-Rp"]):  # every POSIX system knows the second
        done = subprocess.run(
            ["cp", *options, source, target], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        problem = done.stderr.strip()
        shutil.rmtree(target, ignore_errors=True)
    raise EmbeddedError(f"cannot copy {source} to {target}: {problem}")
