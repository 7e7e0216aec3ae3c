"""What handlers return or raise (outcome.py)."""

import contextlib
import pickle
from datetime import UTC, datetime, timedelta

import pytest

from tallybook._model.outcome import Cancel, Dead, Outcome, Snooze
from tallybook.errors import ConfigError

SOON = timedelta(minutes=1)
THEN = datetime(2026, 1, 1, tzinfo=UTC)
ALL = [Snooze(SOON), Snooze(until=THEN), Cancel("gone"), Cancel(), Dead("closed")]


@pytest.mark.parametrize("outcome", ALL, ids=repr)
def test_outcomes_are_values(outcome):
    """An outcome is equal by value, hashable, printed as it is written, and can be pickled."""
    again = pickle.loads(pickle.dumps(outcome))  # noqa: S301
    assert again == outcome
    assert len({again, outcome}) == 1
    assert [other for other in ALL if other == outcome] == [outcome]
    assert repr(outcome).startswith(type(outcome).__name__ + "(")


@pytest.mark.parametrize("outcome", ALL, ids=repr)
def test_outcomes_can_be_raised_through_context_managers(outcome):
    """An outcome raised deep in a handler, through `with` blocks, arrives as the very same value."""

    @contextlib.contextmanager
    def block():
        yield

    with pytest.raises(Outcome) as caught, block():
        raise outcome
    assert caught.value is outcome


def test_outcomes_can_be_matched():
    """The worker, and the user's tests, can take them apart with match."""
    match Snooze(SOON):
        case Snooze(delay, None):
            assert delay == SOON
    match Dead("why"):
        case Dead(reason):
            assert reason == "why"
    assert Snooze(until=THEN).until == THEN


@pytest.mark.parametrize(
    ("args", "option"),
    [
        ((), "Snooze"),
        ((SOON, THEN), "Snooze"),
        ((60,), "Snooze.delay"),
        ((-SOON,), "Snooze.delay"),
        ((None, datetime(2026, 1, 1)), "Snooze.until"),
    ],
)
def test_wrong_snoozes_are_refused(args, option):
    """F39: a bare number, a negative delay and a naive datetime are ConfigError where they are written."""
    with pytest.raises(ConfigError) as caught:
        Snooze(*args)
    assert caught.value.option == option
