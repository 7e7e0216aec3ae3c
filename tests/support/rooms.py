"""The folders of the SQL (core, parts/..., read, ops), and the names of other folders that their functions use."""

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

SQL = Path(str(resources.files("tallybook"))) / "sql"
MADE = re.compile(
    r"^create (?:or replace )?(?:function|view|table|type|sequence) tallybook\.(\w+)", re.MULTILINE | re.IGNORECASE
)
NAMED = re.compile(r"tallybook\.(\w+)")


def texts() -> dict[str, str]:
    """Return the text of every SQL file by path, without comments."""
    files = [file for file in sorted(SQL.rglob("*.sql")) if file.parent.name != "migrations"]
    return {file.relative_to(SQL).as_posix(): re.sub(r"--[^\n]*", "", file.read_text("utf-8")) for file in files}


def room(path: str) -> str:
    """Return the room of a file: core, read, a part, or a room of ops."""
    words = path.split("/")
    return "/".join(words[:2]) if words[0] in ("parts", "ops") else words[0]


def named(files: dict[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield each reference across rooms once, as room and name of both sides."""
    home = {name: room(path) for path, text in files.items() for name in MADE.findall(text)}
    found = set()
    for path, text in files.items():
        begins = [*MADE.finditer(text)]
        for at, made in enumerate(begins):
            body = text[made.end() : begins[at + 1].start() if at + 1 < len(begins) else len(text)]
            for other in NAMED.findall(body):
                if home.get(other, room(path)) != room(path):
                    found.add((room(path), made[1], home[other], other))
    yield from sorted(found)
