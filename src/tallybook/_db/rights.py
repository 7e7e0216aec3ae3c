"""The rights on functions and views for `tallybook roles`: a line `-- rights: ...` above their creation.

    -- rights: worker, operator               a function: these roles may call it, and it runs with the owner's rights
    -- rights: worker, as the caller          a function that runs with the caller's rights: it uses no table itself, or
                                              runs the caller's own query
    -- rights: operator; reader (id, state)   a view: all columns, or these; functions in a view need the right, too

A public function or view without grants has `nobody`. Internal ones without such a line have no grants.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# The roles of a line, whether it is for a function or a view, and the name.
_SAID = re.compile(r"^-- rights: (.+(?:\n--   .+)*)\ncreate or replace (function|view) tallybook\.(\w+)", re.MULTILINE)
_HEAD = """\
-- _rights(): the rights of roles, one row each; generated from the lines `-- rights:` of all files.
--
--   definer   a function that runs with the owner's rights and a fixed search_path, since its callers have no rights on
--             tables. It must not execute text from outside: tests/db/test_roles.py checks all functions that it calls.
--   caller    a function that runs with the caller's rights
--   view      all columns, or those named in columns
-- Old overloads of a name have its rights. The roles that get the rights are in tallybook.role.
create or replace function tallybook._rights() returns table (kind text, name text, roles text[], columns text)
language sql immutable as $$ select v.kind, v.name, v.roles::text[], v.columns from (values
"""
_TAIL = "\n) v(kind, name, roles, columns) $$;\n"


def function(texts: list[str]) -> str:
    """Return the function tallybook._rights() for the lines of these files."""
    rows = [row for text in texts for line, what, name in _SAID.findall(text) for row in _rows(line, what, name)]
    return _HEAD + ",\n".join(sorted(rows)) + _TAIL


def _rows(line: str, what: str, name: str) -> Iterator[str]:
    for clause in re.sub(r"\n--\s+", " ", line).split("; "):
        roles, _, columns = clause.removesuffix(")").partition(" (")
        given = roles.removesuffix(", as the caller")
        kind = "view" if what == "view" else "definer" if given == roles else "caller"
        to = "" if given == "nobody" else given.replace(" ", "")
        shown = f"'{columns}'" if columns else "null"
        yield f"  ('{kind}', '{name}', '{{{to}}}', {shown})"
