"""Comments of the database: lines `--> text` above a table, a view or a column are installed as COMMENT ON."""

from __future__ import annotations

import re

_MADE = re.compile(r"create (?:or replace )?(table|view) (tallybook\.\w+)")
_COLUMN = re.compile(r" +(\w+) ")
_MARK = re.compile(r" *--> (.*)")


def commented(text: str) -> str:
    """Return the text of a SQL file with its lines `-->` as COMMENT ON, each after the statement that it is in.

    Raises ValueError for such a line that is above nothing of these, or in a statement without an end.
    """
    done: list[str] = []
    notes: list[str] = []
    words: list[str] = []
    kind = name = ""
    for line in text.splitlines(keepends=True):
        if mark := _MARK.match(line):
            words.append(mark[1])
            continue
        done.append(line)
        if line.lstrip().startswith("--"):
            continue
        if made := _MADE.match(line):
            kind, name = made.groups()
        if words:
            column = _COLUMN.match(line)
            if not name or not (made or column):
                raise ValueError(f"no table, view or column is below: {' '.join(words)}")
            what = f"column {name}.{column[1]}" if column else f"{kind} {name}"
            quoted = " ".join(words).replace("'", "''")
            notes.append(f"comment on {what} is '{quoted}';\n")
            words = []
        if line.endswith(";\n"):
            done += notes
            notes, name = [], ""
    if words or notes:
        raise ValueError(f"no statement ends below: {' '.join(words or notes)}")
    return "".join(done)
