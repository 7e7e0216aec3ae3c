"""The modules of the package: no import cycle, not even for types, no long function. import-linter checks layers."""

import ast
import re
import tomllib
from graphlib import TopologicalSorter

import grimp
import pytest

from support.paths import ROOT


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """The imports of each module, without those that the layers contract ignores."""
    graph = grimp.build_graph("tallybook", include_external_packages=True, cache_dir=None)
    found = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    for left_out in settings["contracts"][0]["ignore_imports"]:
        importer, imported = left_out.split(" -> ")
        found[importer].remove(imported)
    return found


def test_there_is_no_import_cycle(imports: dict[str, set[str]]) -> None:
    """No module imports itself through others, at run time or for types: CycleError names a cycle's modules."""
    TopologicalSorter(imports).prepare()


def test_other_rooms_import_the_driver_from_db(imports: dict[str, set[str]]) -> None:
    """Outside `_db`, only these modules import psycopg; other modules use `_db/driver.py`."""
    # Each with its reason. The list only shrinks.
    allowed = {
        "tallybook": "a missing libpq is named, with what to do",
        "tallybook.contrib.fastapi": "public: what its dependency gives is a psycopg connection",
        "tallybook.contrib.flask": "public: what `transaction` gives is a psycopg connection",
        "tallybook.embedded": "makes and drops databases, whose names are quoted by psycopg.sql",
        "tallybook.extra.dashboard.database": "has a pool of its own",
        "tallybook.extra.demo.app": "an application, written as a user writes one",
        "tallybook.testing": "public: `travel` takes a psycopg connection; makes and drops databases",
    }
    outside = {module for module in imports if not module.startswith("tallybook._db")}
    assert {module for module in outside if imports[module] & {"psycopg", "psycopg_pool"}} == set(allowed)


def test_no_function_is_long() -> None:
    """No function of the package has more than 70 lines, including its signature and its docstring."""
    found = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in found.items() if lines > 70} == {}


def test_examples_import_what_is_public() -> None:
    """No example and no page imports a private module, because readers copy what they see."""
    shown = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    private = re.compile(r"^\s*(from|import) tallybook(\.\w+)*\._", re.MULTILINE)
    assert len(shown) > 60 and [path.name for path in shown if private.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("module", ["life/worker.py", "run/runner.py"])
def test_the_worker_and_the_runner_fit_on_a_few_screens(module: str) -> None:
    """The two modules that were longest have at most 300 lines."""
    assert len((ROOT / "src/tallybook/_worker" / module).read_text(encoding="utf-8").splitlines()) <= 300
