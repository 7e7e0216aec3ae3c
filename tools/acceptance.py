"""make acceptance: print every row of docs/acceptance.md, the tests that name it, and whether they pass.

    python tools/acceptance.py              run the tests in two processes against one server, print every row
    python tools/acceptance.py --report F   run nothing, read pytest's report F (make test-all writes one)
    python tools/acceptance.py --list       run nothing, print every row with its tests

A test names a row in its docstring or its name: S1-05, S1-04..06, "S1-04, 05, 06", test_s1_05_... A row is shown if at
least one test names it, all tests that name it pass, and docs/acceptance.md does not list it as open. Exit code 1 if a
test does not pass.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "docs" / "acceptance.md"
FOLDERS = ("tests", "examples")
# As in tests/conftest.py.
SETTINGS = {"max_prepared_transactions": "20", "max_connections": "200"}

_ROW = re.compile(r"^\| (S\d-\d\d) \| ([^|]+) \|$", re.MULTILINE)
_OPEN = re.compile(r"^- (S\d-\d\d): (.+)$", re.MULTILINE)
_NAMED = re.compile(r"(?<![A-Za-z0-9])[Ss](\d)[-_](\d\d)(?!\d)((?:(?:\.\.|, ?| and )(?:[Ss]\1-)?\d\d\b)*)")
_NEXT = re.compile(r"(\.\.|, ?| and )(?:[Ss]\d-)?(\d\d)")


@dataclass(frozen=True, order=True)
class Test:
    """One test function: its file, relative to the repository, and its name in the file."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}::{self.name}"


@dataclass
class Results:
    """The outcomes of each test; a parametrized test has several."""

    ends: dict[Test, list[str]] = field(default_factory=lambda: defaultdict(list))
    crashed: bool = False

    def of(self, test: Test) -> str:
        """Return passed, FAILED, skipped, or not run."""
        ends = self.ends.get(test, [])
        if "failed" in ends:
            return "FAILED"
        return "passed" if "passed" in ends else "skipped" if ends else "not run"


def rows(text: str) -> dict[str, str]:
    """Return the title of every row by id, in order."""
    return dict(_ROW.findall(text))


def missing(text: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return what each open row still lacks. Exit if the list names an unknown row."""
    found = dict(_OPEN.findall(text))
    if wrong := sorted(found.keys() - known.keys()):
        sys.exit(f"docs/acceptance.md lists {', '.join(wrong)} as open, but has no such rows")
    return found


def named_in(text: str) -> list[str]:
    """Return the rows that a text names."""
    found: list[str] = []
    for match in _NAMED.finditer(text):
        system, last = match[1], int(match[2])
        numbers = [last]
        for joint, number in _NEXT.findall(match[3]):
            numbers += range(last + 1, int(number) + 1) if joint == ".." else [int(number)]
            last = int(number)
        found += [f"S{system}-{number:02}" for number in numbers]
    return found


def tests_of(path: Path) -> Iterator[tuple[Test, list[str]]]:
    """Yield the tests of one file with the rows that each names."""
    where = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text("utf-8"), str(path))
    for node, within in _functions(tree, ""):
        named = named_in(node.name) + named_in(ast.get_docstring(node) or "")
        yield Test(where, f"{within}{node.name}"), list(dict.fromkeys(named))


def _functions(tree: Any, within: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _functions(node, f"{within}{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node, within


def survey(known: Mapping[str, str]) -> dict[str, list[Test]]:
    """Return the tests of every row. Exit if a test names an unknown row."""
    found: dict[str, list[Test]] = {row: [] for row in known}
    wrong = []
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py"))
    for path in files:
        for test, named in tests_of(path):
            for row in named:
                if row in found:
                    found[row].append(test)
                else:
                    wrong.append(f"{test} names {row}, which is not in docs/acceptance.md")
    if wrong:
        sys.exit("\n".join(wrong))
    return found


def run(tests: list[Test]) -> Results:
    """Run these tests in two processes against one server and return the results."""
    environment = dict(os.environ)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if not environment.get("TALLYBOOK_TEST_DSN"):
            from tallybook.embedded import temporary_server

            version = int(environment.get("TALLYBOOK_TEST_PG") or 18)
            server = stack.enter_context(temporary_server(version, settings=SETTINGS))
            environment["TALLYBOOK_TEST_DSN"] = server.dsn()
        report = Path(folder) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-n", "2", "--tb=short", "-p", "no:cacheprovider"),
            *("--junitxml", str(report), "-o", "junit_family=xunit1"),
            *map(str, tests),
        ]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
        return read(report, crashed=done.returncode not in (0, 1))


def read(report: Path, *, crashed: bool = False) -> Results:
    """Return the results in pytest's report."""
    results = Results(crashed=crashed)
    if not report.exists():
        results.crashed = True
        return results
    for case in ElementTree.parse(report).iter("testcase"):
        path = (case.get("file") or "").replace(os.sep, "/")
        module = path.removesuffix(".py").replace("/", ".")
        classes = (case.get("classname") or "").removeprefix(module).strip(".")
        name = (case.get("name") or "").partition("[")[0]
        test = Test(path, "::".join([*filter(None, classes.split(".")), name]))
        kinds = {child.tag for child in case}
        end = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        results.ends[test].append(end)
    return results


def say(
    known: Mapping[str, str], found: Mapping[str, list[Test]], results: Results | None, lacks: Mapping[str, str]
) -> int:
    """Print every row and return the exit code."""
    shown, failed = 0, False
    for row, title in known.items():
        ends = [results.of(test) if results else "" for test in found[row]]
        verdict = _verdict(ends, ran=results is not None)
        if row in lacks and verdict != "FAILED":
            verdict = "open"
        shown += verdict in ("shown", "named")
        failed = failed or any(end in ("FAILED", "not run") for end in ends)
        print(f"{row}  {verdict:<6}  {title}")
        if row in lacks:
            print(f"{'':15}open: {lacks[row]}")
        for test, end in zip(found[row], ends, strict=True):
            print(f"{'':15}{test}" + (f"  {end}" if end else ""))
    if results is None:
        print(f"acceptance: {shown} of {len(known)} rows have tests; no test was run")
        return 0
    if results.crashed:
        print("pytest itself failed, see above: tests that it did not reach count as not run")
    print(f"acceptance: {shown} of {len(known)} rows shown")
    return 1 if failed or results.crashed else 0


def _verdict(ends: list[str], *, ran: bool) -> str:
    if "FAILED" in ends:
        return "FAILED"
    if not ends:
        return "open"
    if not ran:
        return "named"
    return "shown" if set(ends) == {"passed"} else "open"


def main() -> int:
    parser = argparse.ArgumentParser(description="Print every row of docs/acceptance.md with the tests that show it.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--list", action="store_true", help="print rows and tests, run nothing")
    which.add_argument("--report", type=Path, help="print the results in this report of pytest, run nothing")
    arguments = parser.parse_args()
    if arguments.report and not arguments.report.exists():
        parser.error(f"no report {arguments.report}; make test-all writes one")
    text = ROWS.read_text("utf-8")
    known = rows(text)
    lacks = missing(text, known)
    found = survey(known)
    if arguments.list:
        return say(known, found, None, lacks)
    tests = sorted({test for named in found.values() for test in named})
    return say(known, found, read(arguments.report) if arguments.report else run(tests), lacks)


if __name__ == "__main__":
    sys.exit(main())
