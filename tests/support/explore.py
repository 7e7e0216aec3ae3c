"""Breadth-first search of all reachable states of a small model, in plain Python.

A model is a start, a function that yields the steps from a state, a check, and a condition for the end. A step is a
name, the state after it, and whether it is progress, a step that the protocol does on its own. Faults and actions of
people are no progress: from every state, an end must be reachable by progress alone.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)


class Step(NamedTuple, Generic[State]):
    """One possible next step."""

    name: str
    state: State
    progress: bool = True


@dataclass
class Explored:
    """The result of a search. `broken` is empty if every state keeps every promise."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    broken: str = ""
    trace: list[str] = field(default_factory=list)
    """The shortest path to the first state that breaks a promise."""

    def __str__(self) -> str:
        found = f"{self.states:,} states, {self.steps:,} steps, {self.ends:,} of them ends"
        if not self.broken:
            return found
        return f"{found}; broken: {self.broken}\n  " + "\n  ".join(self.trace)


def explore(
    start: State,
    steps: Callable[[State], Iterable[Step[State]]],
    check: Callable[[State], str],
    is_end: Callable[[State], bool],
    *,
    most: int = 2_000_000,
) -> Explored:
    """Visit every state once. `check` returns the promise that a state breaks, or an empty string."""
    number = {start: 0}
    came_from: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]  # the states before each state, over progress only
    queue = deque([start])
    found = Explored()
    ends: list[int] = []
    states = [start]

    def trace(at: int) -> list[str]:
        names = []
        while at > 0:
            at, name = came_from[at]
            names.append(name)
        return [*reversed(names)]

    while queue:
        state = queue.popleft()
        here = number[state]
        if broken := check(state):
            found.states, found.broken = len(number), broken
            found.trace = [*trace(here), repr(state)]
            return found
        if is_end(state):
            ends.append(here)
        for step in steps(state):
            found.steps += 1
            there = number.get(step.state)
            if there is None:
                there = number[step.state] = len(number)
                assert there < most, "this model has no end"
                came_from.append((here, step.name))
                back.append([])
                states.append(step.state)
                queue.append(step.state)
            if step.progress:
                back[there].append(here)
    found.states, found.ends = len(number), len(ends)
    stuck = _not_leading_to(ends, back)
    if stuck is not None:
        found.broken = "liveness: from here no end can be reached any more"
        found.trace = [*trace(stuck), repr(states[stuck])]
    return found


def _not_leading_to(ends: list[int], back: list[list[int]]) -> int | None:
    """Return the first state from which none of these ends can be reached."""
    reached = bytearray(len(back))
    for end in ends:
        reached[end] = 1
    open_ = list(ends)
    while open_:
        for before in back[open_.pop()]:
            if not reached[before]:
                reached[before] = 1
                open_.append(before)
    at = reached.find(0)
    return None if at < 0 else at
