"""Lines of comments in our SQL files that the installation reads.

    --> text                                  above a table, a view or a column: installed as COMMENT ON
    -- profile: NAME                          above a function: planner settings that are added to its head
    -- rights: worker, operator               a function: these roles may call it, and it runs with the owner's rights
    -- rights: worker, as the caller          a function that runs with the caller's rights: it uses no table itself, or
                                              runs the caller's own query
    -- rights: operator; reader (id, state)   a view: all columns, or these; functions in a view need the right, too

A session keeps plans from the time when the tables were empty, so functions that must use an index have a profile. The
rights are for `tallybook roles`. A public function or view without grants has `nobody`. Internal ones without such a
line have no grants.
"""

import re
from collections.abc import Iterator

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


_BY_INDEX = "set jit = off set enable_seqscan = off set enable_bitmapscan = off"
_ONCE = "set plan_cache_mode = force_generic_plan"
PROFILES = {
    "hot": f"{_ONCE} {_BY_INDEX}",
    "nested": f"{_ONCE} {_BY_INDEX}\nset enable_hashjoin = off set enable_mergejoin = off",
    "batch": f"{_ONCE} {_BY_INDEX}\nset enable_nestloop = off set enable_mergejoin = off",
    "lookup": _BY_INDEX,
    "whole": "set jit = off set plan_cache_mode = force_custom_plan set work_mem = '64MB'",
    "nojit": "set jit = off",
}
"""hot: rows by an index, planned once. nested: row by row. batch: sets against sets. lookup: rows by an index, planned
per call. whole: all of some tables. nojit: the planner's choice, without the start-up cost of JIT."""
_PROFILED = re.compile(
    r"^-- profile: (\w+)\n((?:--[^\n]*\n)*create or replace function (?:(?!\$\$).)*?)"
    r"((?:\n(?:set|--) [^\n]*)*)\s(as \$\$)",
    re.MULTILINE | re.DOTALL,
)


def profiled(text: str) -> str:
    """Return the text of a SQL file with its profiles expanded, each in the head of the function below its line.

    A `set` of the function itself comes after them, so it has the last word. Raises KeyError for an unknown name,
    ValueError for a line `-- profile:` that no function follows.
    """
    done = _PROFILED.sub(lambda match: f"{match[2]}\n{PROFILES[match[1]]}{match[3]}\n{match[4]}", text)
    if left := re.search(r"^-- profile:.*", done, re.MULTILINE):
        raise ValueError(f"no function is below: {left[0]}")
    return done


# The roles of a line, whether it is for a function or a view, and the name.
_SAID = re.compile(r"^-- rights: (.+(?:\n--   .+)*)\ncreate or replace (function|view) tallybook\.(\w+)", re.MULTILINE)
_RIGHTS = """\
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
_RIGHTS_END = "\n) v(kind, name, roles, columns) $$;\n"


def rights(texts: list[str]) -> str:
    """Return the function tallybook._rights() for the lines of these files."""
    rows = [row for text in texts for line, what, name in _SAID.findall(text) for row in _rows(line, what, name)]
    return _RIGHTS + ",\n".join(sorted(rows)) + _RIGHTS_END


def _rows(line: str, what: str, name: str) -> Iterator[str]:
    for clause in re.sub(r"\n--\s+", " ", line).split("; "):
        roles, _, columns = clause.removesuffix(")").partition(" (")
        given = roles.removesuffix(", as the caller")
        kind = "view" if what == "view" else "definer" if given == roles else "caller"
        to = "" if given == "nobody" else given.replace(" ", "")
        shown = f"'{columns}'" if columns else "null"
        yield f"  ('{kind}', '{name}', '{{{to}}}', {shown})"
