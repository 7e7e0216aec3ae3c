"""Trace tests since a commit: `python tools/test_names.py COMMIT` prints old -> new, and tests that are gone.

A test is matched by its file, renames included, and its name; else by its name or its docstring anywhere in tests/.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def tests(commit: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield path, name and docstring of each test function of a commit."""
    for path in git("ls-tree", "-r", "--name-only", commit, "tests").splitlines():
        if path.endswith(".py"):
            for node in ast.walk(ast.parse(git("show", f"{commit}:{path}"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                    yield path, node.name, ast.get_docstring(node)


def main(commit: str) -> None:
    renamed = {}
    for line in git("diff", "-M40%", "--diff-filter=R", "--name-status", commit, "HEAD", "--", "tests").splitlines():
        _, old, new = line.split("\t")
        renamed[old] = new
    before = list(tests(commit))
    now = list(tests("HEAD"))
    same = {(renamed.get(path, path), name) for path, name, _ in before} & {(path, name) for path, name, _ in now}
    new: dict[str | None, list[str]] = defaultdict(list)  # by name and by docstring: tests without an old one so far
    for path, name, docstring in now:
        if (path, name) not in same:
            new[name].append(f"{path}::{name}")
            new[docstring].append(f"{path}::{name}")
    counts: Counter[str] = Counter()
    for path, name, docstring in before:
        there = (renamed.get(path, path), name)
        found = ["::".join(there)] if there in same else new[name] or (new[docstring] if docstring else [])
        counts["unchanged" if found == [f"{path}::{name}"] else "found" if found else "gone"] += 1
        if found != [f"{path}::{name}"]:
            print(f"{path}::{name} -> {' or '.join(found) or 'gone'}")
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))


if __name__ == "__main__":
    main(sys.argv[1])
