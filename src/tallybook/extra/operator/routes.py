"""The table of endpoints, used to serve requests, to build the OpenAPI document and to check the docs page."""

import re
from dataclasses import replace
from itertools import chain
from typing import Any

from tallybook.extra.operator import dead_letters, fields, jobs, queues, schedules, workers
from tallybook.extra.operator.operations import Operation
from tallybook.extra.operator.problems import Problem

NODE = fields.text("node", "The node, if the API serves several.", most=64, example="south")
_NOUNS = (jobs.OPERATIONS, dead_letters.OPERATIONS, queues.OPERATIONS, schedules.OPERATIONS, workers.OPERATIONS)
# An operation about a job has no field `node`: the id of the job determines the node.
OPERATIONS: tuple[Operation, ...] = tuple(
    one if any(field.name == "job" for field in one.in_path) else replace(one, in_query=(*one.in_query, NODE))
    for one in chain(*_NOUNS)
)


def _pattern(operation: Operation) -> re.Pattern[str]:
    # A name may contain a slash, which the server has decoded. The rest of the path is fixed: one match is possible.
    kinds = {one.name: ".*" if one.schema["type"] == "string" else "[^/]+" for one in operation.in_path}
    forms = {f"{{{name}}}": f"(?P<{name}>{kind})" for name, kind in kinds.items()}
    parts = [forms.get(part) or re.escape(part) for part in re.split(r"(\{\w+\})", operation.path)]
    return re.compile("".join(parts), re.DOTALL)


# Each path has one method. Longer paths first: /jobs/7/why is not a job.
_TABLE = [(_pattern(one), one) for one in sorted(OPERATIONS, key=lambda one: -one.path.count("/"))]


def found(method: str, path: str) -> tuple[Operation, dict[str, Any]]:
    """Return the operation of a request and the texts in its path. Raises a Problem (404, 405)."""
    for pattern, operation in _TABLE:
        if match := pattern.fullmatch(path):
            if method != operation.method:
                raise Problem("method", f"{path[:200]} does not have this method", headers={"Allow": operation.method})
            return operation, match.groupdict()
    raise Problem("unknown", "there is no such path", hint="See openapi.json")
