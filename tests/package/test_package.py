"""The package: what is in the sdist and the wheel, and that the README's first job works from an installed one.

pip needs an index here. Where there is none these tests fail with what pip says; they are never skipped.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import psycopg
import pytest

import tallybook
from support.paths import ROOT
from tallybook._embedded.binaries import binaries

PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(*command: str | Path, cwd: Path, fails: bool = False, **environment: str) -> str:
    """Run a command without any setting of this process; what it printed, on both streams."""
    bare = {"PATH": os.defpath, "HOME": os.environ.get("HOME", str(cwd)), **environment}
    bare |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=bare, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, f"{shlex.join(map(str, command))}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it, as `python -m build` makes them of what git knows."""
    folder = tmp_path_factory.mktemp("built")
    clean = folder / "tree"
    listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=folder)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (clean / name).parent.mkdir(parents=True, exist_ok=True)
            (clean / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", clean, cwd=folder)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def empty(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has Tallybook without extras, and nothing else."""
    return installed(built[1], "", tmp_path_factory.mktemp("empty"))


def installed(wheel: Path, extras: str, folder: Path) -> Path:
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    run(python, *PIP, f"{wheel}{extras}", cwd=folder)
    return python


def test_the_wheel_has_what_runs_and_nothing_else(built: tuple[Path, Path]) -> None:
    """Issue 8: the wheel has every file of src/tallybook, SQL, templates, static files and py.typed among them, and no other."""
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        about = {Path(name).name for name in wheel.namelist()} - {Path(name).name for name in names}
    source = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "src", cwd=ROOT)
    assert names == {name.removeprefix("src/") for name in source.split() if (ROOT / name).is_file()}
    assert "tallybook/py.typed" in names and "tallybook/sql/core/enqueue/enqueue.sql" in names
    assert {"LICENSE", "METADATA", "entry_points.txt"} <= about


def test_the_sdist_has_what_a_packager_needs(built: tuple[Path, Path]) -> None:
    """Issue 8: the sdist has the license, the README, the sources, the tests and the docs."""
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"LICENSE", "README.md", "pyproject.toml", "CHANGELOG.md", "docs/tutorial.md", "tests/conftest.py"}
    assert needed <= names and "src/tallybook/sql/migrations/0001_initial.sql" in names
    assert not [name for name in names if re.search(r"(^|/)(\.venv|\.peers|\.cache|site|__pycache__|\.git)(/|$)", name)]


def test_it_works_without_extras(empty: Path, tmp_path: Path) -> None:
    """Issue 8: without extras only the four packages of the core come along; the command and the import work."""
    listed = run(empty, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check", cwd=tmp_path)
    names = {line.partition("==")[0].lower().replace("_", "-") for line in listed.splitlines() if "==" in line}
    own = {"tallybook", "psycopg", "psycopg-pool", "click", "cronsim", "typing-extensions"}
    assert names - {"pip", "setuptools"} == own
    version = tallybook.__version__
    assert run(empty, "-c", "import tallybook; print(tallybook.__version__)", cwd=tmp_path) == f"{version}\n"
    assert run(empty.with_name("tallybook"), "--version", cwd=tmp_path) == f"tallybook {version}\n"


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("-c", "import tallybook.web"), "web"),
        (("-m", "tallybook", "web"), "web"),
        (("-m", "tallybook", "demo"), "embedded"),
        (("-c", "from tallybook.embedded import temporary_server as t; t().__enter__()"), "embedded"),
        (("-c", "import tallybook.contrib.fastapi"), "fastapi"),
        (("-c", "import tallybook.contrib.flask"), "flask"),
        (("-c", "import tallybook as t, tallybook.otel as o; o.instrument(t.App('a'))"), "otel"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_what_is_missing_is_named(empty: Path, tmp_path: Path, words: tuple[str, ...], extra: str) -> None:
    """Issue 8: what needs an extra that is not installed ends with the command that installs it."""
    assert f"pip install 'tallybook[{extra}]'" in run(empty, *words, cwd=tmp_path, fails=True).splitlines()[-1]


def test_a_missing_libpq_is_named(empty: Path, tmp_path: Path) -> None:
    """Issue 8: where psycopg finds no libpq, the import ends with the command that brings one."""
    said = run(empty, "-c", "import tallybook", cwd=tmp_path, fails=True, PSYCOPG_IMPL="binary").splitlines()[-1]
    assert said == "To get psycopg with its own libpq: pip install 'tallybook[binary]'"


@pytest.mark.direct("an installed worker against a server of its own")
def test_the_first_job_of_the_readme_runs_from_the_package(
    built: tuple[Path, Path], tmp_path: Path, empty_dsn: str
) -> None:
    """Issue 8: the README's files and commands, as written, in an environment that has nothing but tallybook[demo]."""

    def readme(language: str) -> list[str]:
        """The code blocks of one language of the README's first job."""
        part = (ROOT / "README.md").read_text(encoding="utf-8").split("## A first job\n")[1].split("\n## ")[0]
        return re.findall(rf"^```{language}\n(.*?)^```", part, re.MULTILINE | re.DOTALL)

    python = installed(built[1], "[demo]", tmp_path)
    for block in readme("python"):
        title = re.match(r"# (\w+\.py)\n", block)
        assert title
        (tmp_path / title[1]).write_text(block, encoding="utf-8")
    (commands,) = readme("sh")
    export, *lines = [re.split(r"  +# ", line) for line in commands.splitlines()]
    assert export[0].startswith("export TALLYBOOK_DSN=") and [line[0] for line in lines] == [
        "tallybook migrate", "python signup.py", "tallybook worker -A app:app",
    ]  # fmt: skip
    environment = {
        "TALLYBOOK_DSN": empty_dsn,
        "PATH": f"{python.parent}{os.pathsep}{os.defpath}",
        "PYTHONUNBUFFERED": "1",
    }
    run("sh", "-c", lines[0][0], cwd=tmp_path, **environment)
    assert run("sh", "-c", lines[1][0], cwd=tmp_path, **environment) == f"{lines[1][1]}\n"
    command = shlex.split(lines[2][0])
    with subprocess.Popen(
        [python.with_name(command[0]), *command[1:]], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == f"{lines[2][1]}\n"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(40) == 0
    with psycopg.connect(empty_dsn) as conn:
        found = conn.execute("select id, task, state from tallybook.job").fetchall()
    assert found == [(1, "send_welcome", "completed")]
    brought = run(python, "-c", "import tallybook.embedded as e; print(e.binaries())", cwd=tmp_path).strip()
    assert brought.startswith(str(tmp_path)) and str(binaries()) not in brought
