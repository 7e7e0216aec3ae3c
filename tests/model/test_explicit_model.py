"""The protocol as two small models in plain Python, every interleaving of them; `pytest -s` prints how many states.

`support/protocol_model.py`: one job, two workers, rescue, cancel, crashes that forget claims, answers that are lost.
`support/cursor_model.py`: one lane's windows and holes under producers that commit late. `support/explore.py` walks them.
That the checker can see is shown by taking away one guard at a time: each time a promise breaks.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from support import cursor_model, protocol_model
from support.cursor_model import explore_cursor
from support.explore import Explored, Step, explore
from support.protocol_model import NOTHING_YET, explore_protocol


def held(explored: Explored) -> None:
    """No promise was broken; how much that says."""
    print(f"\n  {explored}")
    assert not explored.broken, str(explored)
    assert explored.ends


@pytest.mark.slow
def test_every_interleaving_keeps_the_promises() -> None:
    """F1, F2, F3, F5, F7, F8, P3, P5: any two of kill, zombie, crash with lost claims and lost answer, at any moment."""
    explored = explore_protocol(faults=2)
    held(explored)
    assert explored.states > 40_000


@pytest.mark.slow
def test_every_interleaving_of_three_faults_keeps_the_promises() -> None:
    """F1, F2, F3, F5, F7, F8: any three faults, at any moment."""
    held(explore_protocol(faults=3))


@pytest.mark.slow
def test_workers_that_go_on_record_around_a_crash_keep_the_promises() -> None:
    """F5: a crash between a worker's start and its first claim gives its number to nobody else."""
    held(explore_protocol(faults=2, start=NOTHING_YET))


@pytest.mark.parametrize(
    ("guard", "promise"),
    [
        ("random_lease", "I3"),  # a counter comes again after a crash that forgot its claim
        ("checks_lease", "I4"),
        ("names_attempt", "I4"),
        ("one_outcome", "P5"),
        ("gate", "liveness"),  # the claim of a worker that was given up commits, and nobody looks for it any more
        ("durable_ends", "P3"),
        ("looks_again", "I16"),
        ("lasting_cancel", "I16"),
        ("cancel_reaches_back", "I16"),
        ("durable_numbers", "liveness"),  # two live under one number: who dies first is never rescued
    ],
)
@pytest.mark.slow
def test_without_a_guard_of_the_protocol_a_promise_breaks(guard: str, promise: str) -> None:
    """Negative control: each guard of the protocol is needed, and the model can see it."""
    start = NOTHING_YET if guard == "durable_numbers" else None
    rules = replace(protocol_model.Rules(), **{guard: False})
    explored = explore_protocol(rules, faults=2, start=start)
    print(f"\n  {explored}")
    assert explored.broken.startswith(promise), str(explored)


@pytest.mark.parametrize(("producers", "batch", "crashes"), [(2, 1, 1), (3, 1, 0), (3, 2, 0), (3, 3, 1)], ids=str)
def test_every_commit_order_is_claimed_exactly_once(producers: int, batch: int, crashes: int) -> None:
    """S1-10: whatever commits late is claimed late, once, while others stay open for ever and a crash forgets claims."""
    held(explore_cursor(producers=producers, batch=batch, crashes=crashes))


@pytest.mark.parametrize(
    ("guard", "promise"),
    [
        ("holes", "the set that a claim took has changed"),
        ("window", "the set that a claim took has changed"),
        ("closed", "liveness"),
        ("lock", "an entry was claimed twice"),
    ],
)
def test_without_a_guard_of_the_cursor_a_promise_breaks(guard: str, promise: str) -> None:
    """Negative control: holes, windows and the lane's lock are each needed, and the model can see it."""
    explored = explore_cursor(replace(cursor_model.Rules(), **{guard: False}), producers=3, batch=2)
    print(f"\n  {explored}")
    assert explored.broken.startswith(promise), str(explored)


def test_every_guard_of_the_models_has_its_negative_control() -> None:
    """No rule of a model goes without a variant that lacks it."""
    for rules, test in (
        (protocol_model.Rules, test_without_a_guard_of_the_protocol_a_promise_breaks),
        (cursor_model.Rules, test_without_a_guard_of_the_cursor_a_promise_breaks),
    ):
        marks = {mark.name: mark for mark in test.pytestmark}  # type: ignore[attr-defined]
        cases = marks["parametrize"].args[1]
        assert {case[0] for case in cases} == {field.name for field in fields(rules)}


def test_the_checker_sees_a_dead_end_and_a_broken_promise() -> None:
    """A state that leads nowhere is found, with the way to it, and so is one that breaks a promise; faults are no progress."""

    def counting(n: int) -> list[Step[int]]:
        return [Step("up", n + 1)] if n < 3 else [Step("a fault", 0, progress=False)] if n == 5 else []

    assert explore(0, counting, lambda n: "", lambda n: n == 3).broken == ""
    assert explore(0, counting, lambda n: "two" if n == 2 else "", lambda n: n == 3).trace == ["up", "up", "2"]
    stuck = explore(5, counting, lambda n: "", lambda n: n == 3)
    assert stuck.broken.startswith("liveness")
    assert stuck.trace == ["5"]
