"""The rooms of the package: no import cycle, imports for types included. The layers are import-linter's, see pyproject.toml."""

from __future__ import annotations

import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each module of the package imports, without the imports that the contract of the layers leaves out."""
    graph = grimp.build_graph("tallybook", include_external_packages=True, cache_dir=None)
    found = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    for left_out in settings["contracts"][0]["ignore_imports"]:
        importer, imported = left_out.split(" -> ")
        found[importer].remove(imported)
    return found


def test_there_is_no_import_cycle(imports: dict[str, set[str]]) -> None:
    """No module imports itself through others, at run time or for a type: CycleError names the modules of a cycle."""
    TopologicalSorter(imports).prepare()
