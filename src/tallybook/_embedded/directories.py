"""The directories that we make for ourselves, the user that the server runs as, and locks between processes.

PostgreSQL refuses to run as root. For root, the server runs as `postgres` if that user exists, else as `nobody`. For
any other user, it runs as that user, and there is no account (None). No code here, or elsewhere in the manager, changes
the owner or mode of a directory that it did not make.

A *run directory*, <tmp>/tallybook-run-XXXXXXXX, holds the server's socket and, for a temporary server, its data and
log. The process that made it holds its file `lock` (flock), and so do the guard and, by inheritance, every server
process. If the lock can be taken, all of them are gone, whatever was killed and in which order. The next process that
makes a run directory then removes this one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import shutil
import stat
import string
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from . import EmbeddedError, EmbeddedUnavailable

_RUN_PREFIX = "tallybook-run-"
_LONGEST_RUN_PARENT = 60  # a socket's path may have 107 bytes on Linux and 103 on macOS
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN = frozenset(string.ascii_letters + string.digits + "/._-+")


@dataclass(frozen=True)
class Account:
    """The user that root's server runs as, with its primary group and no other."""

    name: str
    uid: int
    gid: int

    def owns(self, path: Path) -> None:
        """Give a directory to this user. Call it only for directories that we have just made."""
        os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def reaches(self, path: Path) -> bool:
        """Return whether this user may walk to `path` and read it (run it, list it), by owner, group and mode.

        Access control lists are not checked. If one opens a path, an unneeded copy is made; if one closes it, the
        operating system's own error appears.
        """
        real = path.resolve()
        try:
            here = real.stat()
        except OSError:
            return False
        runs = stat.S_ISDIR(here.st_mode) or here.st_mode & stat.S_IXUSR
        return self.enters(real.parent) and self._may(here, stat.S_IROTH | (stat.S_IXOTH if runs else 0))

    def enters(self, directory: Path) -> bool:
        """Return whether this user can enter a directory, even without the right to list it."""
        real = directory.resolve()
        try:
            return all(self._may(part.stat(), stat.S_IXOTH) for part in (real, *real.parents))
        except OSError:
            return False

    def _may(self, info: os.stat_result, want: int) -> bool:
        shift = 6 if info.st_uid == self.uid else 3 if info.st_gid == self.gid else 0
        return (info.st_mode >> shift) & want == want


def server_account() -> Account | None:
    """Return the account that root's servers run as, or None when we are not root."""
    if os.geteuid() != 0:
        return None
    # Other programs run as `nobody`, too, and could then reach the server's socket; it is the last resort.
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedUnavailable(
        "PostgreSQL does not run as root, and this machine has neither a user postgres nor a user nobody. "
        "Run as another user, or add one: useradd --system postgres"
    )


def owner_uid(account: Account | None) -> int:
    """Return the uid that the server runs as and that owns its files."""
    return os.geteuid() if account is None else account.uid


def try_lock(path: Path) -> int | None:
    """Take the lock file and return its descriptor, or None while another process holds it."""
    descriptor = os.open(path, _LOCK_FILE, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Wait for the lock file without a limit, and hold it; yields its descriptor."""
    descriptor = os.open(path, _LOCK_FILE, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def cache_directory(account: Account | None) -> Path:
    """Return the directory for templates and copied binaries; make it if needed.

    $TALLYBOOK_CACHE if set; for root /var/cache/tallybook, which the server's user can reach; for others
    $XDG_CACHE_HOME/tallybook or ~/.cache/tallybook; else a private one in the system's temporary directory.
    """
    if named := os.environ.get("TALLYBOOK_CACHE"):
        directory = Path(named).absolute()
        _make(directory, account)
        if account is not None and not account.enters(directory):
            raise EmbeddedUnavailable(
                f"TALLYBOOK_CACHE is {named}, but the user {account.name}, as which root's PostgreSQL runs, "
                "cannot reach it. Name a directory whose parents can all be entered by others."
            )
        return directory
    candidates = [Path("/var/cache/tallybook")]
    if account is None:
        candidates = [Path(xdg).absolute() / "tallybook"] if (xdg := os.environ.get("XDG_CACHE_HOME")) else []
        with suppress(RuntimeError):  # no HOME and no entry in the password file
            candidates.append(Path.home() / ".cache" / "tallybook")
    for candidate in candidates:
        with suppress(OSError):
            _make(candidate, account)
            if os.access(candidate, os.W_OK | os.X_OK) and (account is None or account.enters(candidate)):
                return candidate
    return _private_cache(account)


def _make(directory: Path, account: Account | None) -> None:
    if directory.is_dir():
        return
    directory.mkdir(parents=True)
    if account is not None:
        directory.chmod(0o755)  # override a tight umask: the server's user must be able to enter


def _private_cache(account: Account | None) -> Path:
    directory = _temporary_parent(account) / f"tallybook-cache-{os.geteuid()}"
    mode = 0o755 if account else 0o700
    with suppress(FileExistsError):
        directory.mkdir(mode)
        directory.chmod(mode)  # override a tight umask: the server's user must be able to enter
    info = directory.lstat()
    # The name can be guessed and everyone can write to the parent, so another user may have made this as a trap.
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise EmbeddedUnavailable(f"{directory} is not a private directory of ours; set TALLYBOOK_CACHE to one that is")
    return directory


def redirected_parent(account: Account) -> Path:
    """Return the directory for root's persistent clusters whose own location the server's user cannot reach."""
    named = os.environ.get("TALLYBOOK_CACHE")
    directory = Path(named).absolute() / "data" if named else Path("/var/lib/tallybook")
    _make(directory, account)
    if not account.enters(directory):
        raise EmbeddedError(f"the user {account.name}, as which root's PostgreSQL runs, cannot reach {directory}")
    return directory


def _temporary_parent(account: Account | None) -> Path:
    for candidate in (Path(tempfile.gettempdir()).absolute(), Path("/tmp"), Path("/var/tmp")):
        # unix_socket_directories would split a path at a comma or a quote.
        short = len(os.fsencode(candidate)) <= _LONGEST_RUN_PARENT and _PLAIN.issuperset(str(candidate))
        if short and os.access(candidate, os.W_OK | os.X_OK) and (account is None or account.enters(candidate)):
            return candidate
    raise EmbeddedUnavailable("there is no temporary directory with a short path that the server's user can reach")


class RunDirectory:
    """One run directory and our hold on its lock."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.sockets = path / "sock"
        self.lock = lock

    @classmethod
    def make(cls, account: Account | None, *, for_data: Path | None = None) -> RunDirectory:
        """Make one, after removing those that nobody holds any more.

        The name is random. For the data directory `for_data`, whose lock must be held, it is always the same, and so is
        the socket's path.
        """
        parent = _temporary_parent(account)
        _sweep(parent)
        for _ in range(50):
            path = _new_directory(parent, for_data)
            lock = None
            with suppress(FileNotFoundError):
                lock = try_lock(path / "lock")
            if lock is not None and path.exists():
                made = cls(path, lock)
                made.sockets.mkdir(0o700)
                if account is not None:
                    # The server's user must be able to reach its sockets, but not root's own files here (log, locks).
                    path.chmod(0o711)
                    account.owns(made.sockets)
                return made
            # Another process removed it just before it was locked.
            if lock is not None:
                os.close(lock)
            time.sleep(0.01)
        raise EmbeddedError(f"run directories in {parent} are taken away while they are being made")

    def release(self) -> None:
        """Release the lock. The guard removes the directory; if it cannot, a later process does."""
        os.close(self.lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _new_directory(parent: Path, for_data: Path | None) -> Path:
    if for_data is not None:
        name = hashlib.sha256(f"{os.geteuid()} {for_data}".encode()).hexdigest()[:12]
        path = parent / f"{_RUN_PREFIX}{name}"
        # The removal keeps a directory only if a process holds it, or if it belongs to another user who guessed the
        # name. We must touch neither, so the socket's path is a different one this time.
        with suppress(FileExistsError):
            path.mkdir(0o700)
            return path
    return Path(tempfile.mkdtemp(prefix=_RUN_PREFIX, dir=parent))


def _sweep(parent: Path) -> None:
    for path in parent.glob(_RUN_PREFIX + "*"):
        try:
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                continue
            if not (path / "lock").exists():
                if time.time() - info.st_mtime > 600:  # a younger one may still be between mkdtemp and its lock
                    shutil.rmtree(path, ignore_errors=True)
                continue
            lock = try_lock(path / "lock")
        except OSError:
            continue  # another process is removing it now
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
