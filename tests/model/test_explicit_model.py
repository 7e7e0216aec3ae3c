"""The protocol as two small Python models, explored in every interleaving; `pytest -s` prints the number of states.

`support/protocol_model.py`: one job, two workers, rescue, cancel, crashes that lose claims, lost answers.
`support/cursor_model.py`: one lane's windows and holes; producers commit late. `support/explore.py` searches them.
Negative controls remove one guard at a time: each removal breaks a promise.
"""

from dataclasses import fields, replace

import pytest

from support import cursor_model, protocol_model
from support.cursor_model import explore_cursor
from support.explore import Explored, Step, explore
from support.protocol_model import NOTHING_YET, explore_protocol


def held(explored: Explored) -> None:
    """Assert that no promise broke and that an end is reachable; print the extent of the search."""
    print(f"\n  {explored}")
    assert not explored.broken, str(explored)
    assert explored.ends


@pytest.mark.slow
def test_every_interleaving_keeps_the_promises() -> None:
    """F1, F2, F3, F5, F7, F8, P3, P5: any two of kill, zombie, crash with lost claims and lost answer, at any time."""
    explored = explore_protocol(faults=2)
    held(explored)
    assert explored.states > 40_000


@pytest.mark.slow
def test_every_interleaving_of_three_faults_keeps_the_promises() -> None:
    """F1, F2, F3, F5, F7, F8: any three faults, at any time."""
    held(explore_protocol(faults=3))


@pytest.mark.slow
def test_workers_that_go_on_record_around_a_crash_keep_the_promises() -> None:
    """F5: if a worker crashes between its start and its first claim, no other worker gets its number."""
    held(explore_protocol(faults=2, start=NOTHING_YET))


@pytest.mark.parametrize(
    ("guard", "promise"),
    [
        ("random_lease", "I3"),  # a counter value repeats after a crash that lost its claim
        ("checks_lease", "I4"),
        ("names_attempt", "I4"),
        ("one_outcome", "P5"),
        ("gate", "liveness"),  # a claim of a given-up worker commits, and nothing looks for it any more
        ("durable_ends", "P3"),
        ("looks_again", "I16"),
        ("lasting_cancel", "I16"),
        ("cancel_reaches_back", "I16"),
        ("durable_numbers", "liveness"),  # two live workers share a number: the first to die is never rescued
    ],
)
@pytest.mark.slow
def test_without_a_guard_of_the_protocol_a_promise_breaks(guard: str, promise: str) -> None:
    """Negative control: without any one guard of the protocol, the model finds a broken promise."""
    start = NOTHING_YET if guard == "durable_numbers" else None
    rules = replace(protocol_model.Rules(), **{guard: False})
    explored = explore_protocol(rules, faults=2, start=start)
    print(f"\n  {explored}")
    assert explored.broken.startswith(promise), str(explored)


@pytest.mark.parametrize(("producers", "batch", "crashes"), [(2, 1, 1), (3, 1, 0), (3, 2, 0), (3, 3, 1)], ids=str)
def test_every_commit_order_is_claimed_exactly_once(producers: int, batch: int, crashes: int) -> None:
    """S1-10: an entry that commits late is claimed late, once, even if others never commit and a crash loses claims."""
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
    """Negative control: without holes, windows or the lane's lock, the model finds a broken promise."""
    explored = explore_cursor(replace(cursor_model.Rules(), **{guard: False}), producers=3, batch=2)
    print(f"\n  {explored}")
    assert explored.broken.startswith(promise), str(explored)


def test_every_guard_of_the_models_has_its_negative_control() -> None:
    """Each rule of a model has a variant without it."""
    for rules, test in (
        (protocol_model.Rules, test_without_a_guard_of_the_protocol_a_promise_breaks),
        (cursor_model.Rules, test_without_a_guard_of_the_cursor_a_promise_breaks),
    ):
        marks = {mark.name: mark for mark in test.pytestmark}  # type: ignore[attr-defined]
        cases = marks["parametrize"].args[1]
        assert {case[0] for case in cases} == {field.name for field in fields(rules)}


def test_the_checker_sees_a_dead_end_and_a_broken_promise() -> None:
    """A dead end is found and its path reported, and so is a broken promise; faults are no progress."""

    def counting(n: int) -> list[Step[int]]:
        return [Step("up", n + 1)] if n < 3 else [Step("a fault", 0, progress=False)] if n == 5 else []

    assert explore(0, counting, lambda n: "", lambda n: n == 3).broken == ""
    assert explore(0, counting, lambda n: "two" if n == 2 else "", lambda n: n == 3).trace == ["up", "up", "2"]
    stuck = explore(5, counting, lambda n: "", lambda n: n == 3)
    assert stuck.broken.startswith("liveness")
    assert stuck.trace == ["5"]
