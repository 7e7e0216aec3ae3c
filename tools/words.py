"""`make check`: check docs, help texts and strings of the code for rules of plain English.

A page has no phrase of `PHRASES` and no sentence of more than `MOST_WORDS` words. A help text fits one line of 80
columns. A docstring, an SQL comment or a message has no phrase of `PHRASES`. Code blocks, table rules, text in
backticks, SQL statements and the pages of `QUOTED` are left out.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from tallybook._cli import cli  # noqa: E402

MOST_WORDS = 40
PHRASES = re.compile(
    r"\bshall\b|\b(?:say|says|tell|tells)\b(?! which)|\b(?:goes|go|went) on\b|\b(?:is|are) over\b|upkeep"
    r"|\bstands? (?:in|under|at|before)\b|\bwhoever\b|\bputs? in\b|\bon record\b|\bthat there (?:is|are)\b"
    r"|\ball the same\b|\bon its way\b|\b(?:is|are) told\b|\bso (?:many|much|long)\b(?! as)|\bby itself\b"
    r"|\bwhatever the case\b",
    re.IGNORECASE,
)
# This page quotes the words of others.
QUOTED = {"docs/acceptance.md"}
FOLDERS = ("src", "bench", "chaos", "tools", "examples")
"""Folders whose modules and templates are checked."""
WORDS_THEMSELVES = {"tools/words.py"}
SQL = re.compile(r"\s*(?:select|insert|update|delete|with|create|alter|drop|set|do|lock)\s")


def prose(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without code, headings, link targets and text in backticks."""
    bare = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    bare = re.sub(r"<[^>]+>|`[^`]*`|\]\([^)]*\)", " x ", bare)
    rows = [line.strip("| ") for line in bare.splitlines() if line.startswith("|")]
    plain = "\n".join(line for line in bare.splitlines() if not line.startswith(("|", "#")))
    parts = [*re.split(r"\n\s*\n|\n\s*- |\n\s*\d+\. ", plain), *(cell for row in rows for cell in row.split("|"))]
    for part in parts:
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(part.split()))


def of_page(text: str) -> Iterator[str]:
    """Yield the findings of a page."""
    for sentence in prose(text):
        if found := PHRASES.search(sentence):
            yield f'"{found[0]}" in: {sentence[:100]}'
        words = [word for word in sentence.split() if word.strip(",.") not in ("x", "")]
        if len(words) > MOST_WORDS:
            yield f"{len(words)} words in one sentence: {sentence[:100]}"


def of_help(command: click.Command, path: str) -> Iterator[str]:
    """Yield the findings in the help of a command and its subcommands."""
    first = (command.help or "").strip().split("\n\n")[0].replace("\n", " ")
    texts = {
        path: first,
        **{f"{path} {one.opts[0]}": one.help or "" for one in command.params if isinstance(one, click.Option)},
    }
    for name, text in texts.items():
        if len(text) > 80:
            yield f"{name}: {len(text)} columns: {text}"
        if found := PHRASES.search(text):
            yield f'{name}: "{found[0]}" in: {text}'
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            yield from of_help(one, f"{path} {name}")


def of_code(text: str) -> Iterator[str]:
    """Yield the findings in the docstrings and messages of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 12:
            bare = re.sub(r"`[^`]*`", " x ", node.value)
            if not SQL.match(bare) and (found := PHRASES.search(bare)):
                context = " ".join(bare[max(0, found.start() - 40) : found.end() + 40].split())
                yield f'{node.lineno}: "{found[0]}" in: {context}'


def of_template(text: str) -> Iterator[str]:
    """Yield what is wrong with the visible words of an HTML template."""
    bare = re.sub(r"<(script|style)\b.*?</\1>|\{[{%#].*?[}%#]\}", " ", text, flags=re.DOTALL)
    for number, line in enumerate(re.sub(r"<[^>]*>", lambda tag: "\n" * tag[0].count("\n"), bare).splitlines(), 1):
        if found := PHRASES.search(line):
            yield f'{number}: "{found[0]}" in: {line.strip()[:100]}'


def of_sql(text: str) -> Iterator[str]:
    """Yield the findings in the comments and messages of an SQL file."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.findall(r"--(?! (?:rights|profile|rows)\b)(.*)|'([^']{13,})'", line)
        for bare in (re.sub(r"`[^`]*`", " x ", comment or message) for comment, message in found):
            if " " in bare.strip() and (odd := PHRASES.search(bare)):
                yield f'{number}: "{odd[0]}" in: {bare.strip()[:80]}'


def sql_files() -> list[Path]:
    """Return the SQL files to check."""
    return sorted((ROOT / "src/tallybook/sql").rglob("*.sql"))


def modules() -> list[Path]:
    """Return the modules to check."""
    found = [module for folder in FOLDERS for module in sorted((ROOT / folder).rglob("*.py"))]
    return [module for module in found if str(module.relative_to(ROOT)) not in WORDS_THEMSELVES]


def templates() -> list[Path]:
    """Return the HTML templates to check."""
    return [template for folder in FOLDERS for template in sorted((ROOT / folder).rglob("*.html"))]


def pages() -> list[Path]:
    """Return the pages to check: those that people read first."""
    return [
        *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((ROOT / "docs").glob("*.md")),
    ]


def main() -> int:
    """Print every finding; return 1 if there is one."""
    found = [
        f"{name}: {what}"
        for page in pages()
        if (name := str(page.relative_to(ROOT))) not in QUOTED
        for what in of_page(page.read_text(encoding="utf-8"))
    ]
    found += of_help(cli, "tallybook")
    checks = ((modules(), of_code), (templates(), of_template), (sql_files(), of_sql))
    found += [
        f"{file.relative_to(ROOT)}:{what}"
        for files, check in checks
        for file in files
        for what in check(file.read_text(encoding="utf-8"))
    ]
    plain = f"{len(pages())} pages, the help texts, {len(modules())} modules, {len(templates())} templates"
    plain += f" and {len(sql_files())} SQL files"
    print("\n".join(found) or f"words: {plain} are plain")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
