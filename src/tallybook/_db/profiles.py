"""Settings of the planner for functions: a line `-- profile: NAME` in a function's head stands for one of these.

A session keeps the plans that it made while the tables were empty, so what is to be read by an index says so.
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
"""hot: rows by an index, planned once. nested: row by row. batch: sets against sets. lookup: rows by an index, planned for
what is asked. whole: all of some tables. nojit: whatever the planner takes, without the compiler's start."""
_LINE = re.compile(r"^-- profile: (\w+)$", re.MULTILINE)


def applied(text: str) -> str:
    """The text of a SQL file with its profiles written out. KeyError: there is none of that name."""
    return _LINE.sub(lambda match: PROFILES[match[1]], text)
