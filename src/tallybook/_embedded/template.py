"""A new cluster within milliseconds: initdb once per version, copies after that.

A template is made under a temporary name and then renamed, and so is every copy. So everything with its final name is
complete, and the temporary name shows what an interrupted process left behind, which is then removed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import EmbeddedError, EmbeddedUnavailable
from .binaries import major_version, version_text
from .directories import Account, cache_directory, locked, owner_uid

SUPERUSER = "postgres"

# C and UTF8, because they are the same on every machine. Trust on the socket, because only the server's user (and root)
# can enter its directory. A password over TCP, where every user of the machine can connect.
_INITDB = (
    f"--username={SUPERUSER}", "--encoding=UTF8", "--locale=C", "--auth-local=trust", "--auth-host=scram-sha-256",
)  # fmt: skip
_INSTALLED = ("bin", "lib", "lib64", "share")
_UNFINISHED = ".unfinished-"
_LOG_LINES = 20


def environment() -> dict[str, str]:
    """Return the environment of the server and its tools, without our variables: it may be another user's process.

    PG* variables would change what the tools do, and macOS needs a locale before a postmaster starts. GLIBC_TUNABLES
    sets how the server allocates memory.
    """
    names = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "GLIBC_TUNABLES")
    return {"PATH": os.defpath, "LC_ALL": "C", **{name: os.environ[name] for name in names if name in os.environ}}


def new_cluster(target: Path, bin_directory: Path, account: Account | None, *, durable: bool) -> None:
    """Make `target` a fresh data directory that belongs to the server's user; with `durable`, sync it to disk.

    `target` may exist as an empty directory. The server's user must be able to reach its parent.
    """
    cache = cache_directory(account)
    with locked(cache / "template.lock") as lock:
        template = _template(cache, bin_directory, account, lock)
        # Copy under the lock, too: a process that holds it may delete a broken template.
        for left in target.parent.glob(f".{target.name}{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}{_UNFINISHED}", dir=target.parent))
        try:
            if account is not None:
                unfinished.chmod(0o711)  # for the server's user, who owns only its contents
            _copy(template, unfinished / "data")
            if durable:
                _run(bin_directory, account, "--sync-only", str(unfinished / "data"))
            (unfinished / "data").rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def reachable_binaries(bin_directory: Path, account: Account | None) -> Path:
    """Return a `bin` directory that the server's user can run: this one, or the one in our copy of the tree."""
    home = bin_directory.parent
    if account is None or _all_reachable(bin_directory, account):
        return bin_directory
    if not (home / "share").is_dir():
        raise EmbeddedUnavailable(
            f"PostgreSQL in {bin_directory} is out of reach of the user {account.name}, as which root's servers run, "
            "and is not a tree of bin, lib and share that could be copied. Install it elsewhere."
        )
    cache = cache_directory(account)
    copy = cache / f"install-{_fingerprint(bin_directory)}"
    with locked(cache / "install.lock"):
        if not copy.exists():
            _copy_installation(home, copy)
    return copy / home.parent.name / home.name / "bin"


def _template(cache: Path, bin_directory: Path, account: Account | None, lock: int) -> Path:
    name = f"template-{_fingerprint(bin_directory)}-{owner_uid(account)}"
    template = cache / name
    for left in cache.glob(f"template-*{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    if (template / "PG_VERSION").is_file() and (template / "global" / "pg_control").is_file():
        return template
    shutil.rmtree(template, ignore_errors=True)  # emptied by a user, or by a cache cleaner
    unfinished = Path(tempfile.mkdtemp(prefix=name + _UNFINISHED, dir=cache))
    if account is not None:
        account.owns(unfinished)
    # initdb inherits the lock: if we are killed, no process removes the directory while initdb still runs.
    # It syncs to disk (80 ms here), else a power cut could leave a template that looks complete but has empty files.
    _run(bin_directory, account, *_INITDB, str(unfinished), lock=lock)
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


def _fingerprint(bin_directory: Path) -> str:
    """Return a build's fingerprint: environments with one wheel share a template, two builds of a version do not."""
    size = (bin_directory / "postgres").stat().st_size
    text = f"{version_text(bin_directory)} {size} {' '.join(_INITDB)}"
    return f"pg{major_version(bin_directory)}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _libraries_beside(home: Path) -> list[Path]:
    """Return the libraries that wheels keep beside the tree and find relative to it (auditwheel, delocate)."""
    package = home.parent
    return [path for path in (package.parent / f"{package.name}.libs", package / ".dylibs") if path.is_dir()]


def _all_reachable(bin_directory: Path, account: Account) -> bool:
    home = bin_directory.parent
    if not all(account.reaches(bin_directory / name) for name in ("postgres", "initdb")):
        return False
    if not (home / "share").is_dir():
        return True  # part of the system, which everyone can read, not its own tree
    trees = [*(home / name for name in _INSTALLED if (home / name).is_dir()), *_libraries_beside(home)]
    return all(account.reaches(entry) for tree in trees for entry in (tree, *tree.iterdir()))


def _copy_installation(home: Path, copy: Path) -> None:
    for left in copy.parent.glob(f"install-*{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=copy.name + _UNFINISHED, dir=copy.parent))
    tree = unfinished / home.parent.name / home.name
    for name in _INSTALLED:
        if (home / name).is_dir():
            shutil.copytree(home / name, tree / name)  # follow links: their targets may be out of reach
    for libraries in _libraries_beside(home):
        shutil.copytree(libraries, unfinished / libraries.relative_to(home.parent.parent))
    for entry in (unfinished, *unfinished.rglob("*")):
        entry.chmod(0o755 if entry.is_dir() or entry.stat().st_mode & 0o100 else 0o644)
    unfinished.rename(copy)
