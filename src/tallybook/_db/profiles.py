"""Planner settings for functions: a line `-- profile: NAME` above one adds these settings to its head.

A session keeps plans from the time when the tables were empty, so functions that must use an index have a profile.
"""

from __future__ import annotations

import re

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
_HEAD = re.compile(
    r"^-- profile: (\w+)\n((?:--[^\n]*\n)*create or replace function (?:(?!\$\$).)*?)((?:\n(?:set|--) [^\n]*)*)\s(as \$\$)",
    re.MULTILINE | re.DOTALL,
)


def applied(text: str) -> str:
    """Return the text of a SQL file with its profiles expanded, each in the head of the function below its line.

    A `set` of the function itself comes after them, so it has the last word.

    Raises KeyError for an unknown name, ValueError for a line `-- profile:` that no function follows.
    """
    done = _HEAD.sub(lambda match: f"{match[2]}\n{PROFILES[match[1]]}{match[3]}\n{match[4]}", text)
    if left := re.search(r"^-- profile:.*", done, re.MULTILINE):
        raise ValueError(f"no function is below: {left[0]}")
    return done
