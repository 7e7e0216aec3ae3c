"""The pages of the docs: their parts, and runs of their code."""

import re
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT, clean_environment

FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return [body for found, body in FENCED.findall(page.read_text(encoding="utf-8")) if found == language]


def statements(block: str) -> list[str]:
    """Return the statements of one SQL block; each ends with a semicolon at the end of a line."""
    bare = re.sub(r"--[^\n]*", "", block)
    assert bare.strip().endswith(";"), f"a statement without its semicolon: {block}"
    return [statement.strip() for statement in re.split(r";[ ]*\n", bare) if statement.strip()]


def section(page: str, heading: str) -> str:
    """Return the text below one heading, up to the next heading of level 1 or 2."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", text(page), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no heading {heading!r}"
    return found[2]


def code(page: str, heading: str, language: str) -> list[str]:
    """Return the fenced blocks of one language below one heading."""
    return [body for found, body in FENCED.findall(section(page, heading)) if found == language]


def table(part: str, first_title: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this title."""
    lines = iter(part.splitlines())
    for line in lines:
        if line.startswith(f"| {first_title} |"):
            break
    else:
        raise AssertionError(f"there is no table with the column {first_title!r}")
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    assert rows, f"the table with the column {first_title!r} is empty"
    return rows


def words(rows: list[list[str]], column: int = 0) -> list[str]:
    """Return the words in backticks in one column."""
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row[column])]


def project(folder: Path, page: str) -> list[str]:
    """Write the Python files of a page, whose first lines have their names, and return the names."""
    written = []
    for block in blocks(ROOT / page, "python"):
        title = re.match(r"# (\w+\.py)\n", block)
        if title:
            (folder / title[1]).write_text(block, encoding="utf-8")
            written.append(title[1])
    return written


def python(folder: Path, dsn: str, *arguments: str, program: Path | str = sys.executable, **environment: str) -> str:
    """Run Python in this folder with TALLYBOOK_DSN, and return its output."""
    env = {**clean_environment(), "TALLYBOOK_DSN": dsn, **environment}
    done = subprocess.run(
        [program, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
