"""Planner settings for functions: a line `-- profile: NAME` in a function's head is replaced by one of these.

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
_LINE = re.compile(r"^-- profile: (\w+)$", re.MULTILINE)


def applied(text: str) -> str:
    """Return the text of a SQL file with its profiles expanded. Raises KeyError for an unknown name."""
    return _LINE.sub(lambda match: PROFILES[match[1]], text)
