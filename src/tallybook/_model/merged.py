"""One list of jobs, merged from those of several nodes: by time, in pages, with a position in each node.

Also the sum of two rows of numbers.
"""

import heapq
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeVar

from tallybook._model.job_info import JobLine
from tallybook.errors import InvalidArgument

END = "."  # the position of a node whose list has ended


R = TypeVar("R")


class Row(NamedTuple, Generic[R]):
    """What another list shows, with the fields of a JobLine by which it is merged."""

    id: int
    enqueued_at: datetime
    cursor: str
    shown: R


J = TypeVar("J", bound="JobLine | Row[Any]")
Part = tuple[Sequence[R], str | None, datetime | None]
"""The result of one node: rows in its order, its next position, and the time up to which it has searched."""


def places(after: str | None) -> dict[str, str]:
    """Return the next position of each node's list by its name. Raises InvalidArgument for an invalid cursor."""
    found = dict(pair.rpartition("=")[::2] for pair in (after or "").split(",") if pair)
    if not all(found) or not all(found.values()):
        text = f"{(after or '')[:100]!r} is not a cursor of a list over nodes"
        raise InvalidArgument(text, hint="Pass the cursor as it was printed")
    return found


def goes_on(place: Mapping[str, str], name: str) -> bool:
    return place.get(name) != END


def merged(parts: Mapping[str, Part[J]], after: Mapping[str, str], most: int) -> Part[tuple[str, J]]:
    """Return the newest rows of all nodes with their nodes' names, the next position, and the time searched up to.

    A node that has searched less far back than the others holds them up: older rows wait for a later page, so that
    pages stay in order. A node without a part keeps its position.
    """
    short = {name: part[2] for name, part in parts.items() if part[1] and part[2] and len(part[0]) < most}
    last = max(short, key=lambda name: short[name] or datetime.min, default=None)
    horizon = None if last is None else short[last]

    def rows(name: str) -> list[tuple[str, J]]:
        return [(name, row) for row in parts[name][0] if horizon is None or name == last or row.enqueued_at >= horizon]

    everything = heapq.merge(*map(rows, parts), key=lambda pair: (pair[1].enqueued_at, pair[1].id), reverse=True)
    shown = list(everything)[:most]
    place = dict(after)
    for name, (found, more, _) in parts.items():
        mine = [row for node, row in shown if node == name]
        if len(mine) == len(found):
            place[name] = more or END
        elif mine:
            place[name] = mine[-1].cursor
    left = any(place.get(name) != END for name in (*parts, *place))
    more = ",".join(f"{name}={at}" for name, at in sorted(place.items())) if left else None
    return shown, more, horizon if len(shown) < most else None


def summed(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a thing on two nodes: sums of numbers, and of other values the first that is not null."""
    numbers = {name: value + other[name] for name, value in one.items() if isinstance(value, int)}
    return {**one, **{name: other.get(name) for name, value in one.items() if value is None}, **numbers}
