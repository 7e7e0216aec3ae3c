"""The table of endpoints: by it requests are served, the OpenAPI document is written and the docs page is checked."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tallybook.extra.operator import dead_letters, fields, jobs, queues, schedules, workers
from tallybook.extra.operator.operations import Operation
from tallybook.extra.operator.problems import Problem

NODE = fields.text(name="node", about="The node, where the API is over several.", most=64, example="south")


def _by_node(operation: Operation) -> Operation:
    """What is about no job, whose id leads to its node, is told the node."""
    if any(one.name == "job" for one in operation.in_path):
        return operation
    return replace(operation, in_query=(*operation.in_query, NODE))


OPERATIONS: tuple[Operation, ...] = tuple(
    map(
        _by_node,
        (
            *jobs.OPERATIONS,
            *dead_letters.OPERATIONS,
            *queues.OPERATIONS,
            *schedules.OPERATIONS,
            *workers.OPERATIONS,
        ),
    )
)


def _pattern(operation: Operation) -> re.Pattern[str]:
    # A name may have a slash, which the server has decoded; what follows a name in a path is fixed, so there is one way to read it.
    forms = {
        f"{{{one.name}}}": f"(?P<{one.name}>{'.*' if one.schema['type'] == 'string' else '[^/]+'})"
        for one in operation.in_path
    }
    parts = [forms.get(part) or re.escape(part) for part in re.split(r"(\{\w+\})", operation.path)]
    return re.compile("".join(parts), re.DOTALL)


_PATHS: dict[str, dict[str, Operation]] = {}
for _one in OPERATIONS:
    _PATHS.setdefault(_one.path, {})[_one.method] = _one
# Longer ones first: /jobs/7/why is no job.
_TABLE = [
    (_pattern(next(iter(methods.values()))), methods)
    for _, methods in sorted(_PATHS.items(), key=lambda pair: -len(pair[0].split("/")))
]


def found(method: str, path: str) -> tuple[Operation, dict[str, Any]]:
    """The operation of a request, and the texts in its path. A Problem (404, 405)."""
    for pattern, methods in _TABLE:
        if match := pattern.fullmatch(path):
            if method not in methods:
                allowed = {"Allow": ", ".join(sorted(methods))}
                raise Problem("method", f"{path[:200]} has other methods", headers=allowed)
            return methods[method], match.groupdict()
    raise Problem("unknown", "there is no such path", hint="See openapi.json")
