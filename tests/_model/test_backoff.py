"""How long a failed job waits (backoff.py)."""

import math
from dataclasses import FrozenInstanceError
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallybook._model.backoff import DEFAULT, Constant, Exponential, Linear
from tallybook.errors import ConfigError

MINUTE = timedelta(minutes=1)


def minutes(policy, count=5):
    return [policy.delay(failures) / MINUTE for failures in range(1, count + 1)]


def test_exponential_without_jitter_is_exact():
    """Exponential(5 min) is 5, 10, 20, 40, 80 min, and six hours at most."""
    assert minutes(Exponential(5 * MINUTE), 8) == [5, 10, 20, 40, 80, 160, 320, 360]


def test_factor_and_cap_are_options():
    """Another factor and another cap, by keyword."""
    assert minutes(Exponential(MINUTE, factor=3, cap=timedelta(minutes=20))) == [1, 3, 9, 20, 20]


def test_full_jitter_draws_from_zero_to_the_delay():
    """With jitter the delay is the drawn share of the exact one."""
    policy = Exponential(5 * MINUTE, jitter=True)
    assert policy.delay(2, lambda: 0.0) == timedelta(0)
    assert policy.delay(2, lambda: 0.5) == 5 * MINUTE
    assert timedelta(0) <= policy.delay(2) <= 10 * MINUTE


def test_default_policy():
    """A task without a policy waits up to 5, 10, 20 s, ..., drawn evenly, at most 6 hours."""
    assert Exponential(timedelta(seconds=5), jitter=True) == DEFAULT
    assert DEFAULT.delay(1, lambda: 1.0) == timedelta(seconds=5)
    assert DEFAULT.delay(50, lambda: 1.0) == timedelta(hours=6)


def test_constant_and_linear():
    """Constant is always the same; linear grows by its step, by default its first delay."""
    assert minutes(Constant(MINUTE)) == [1] * 5
    assert minutes(Linear(MINUTE)) == [1, 2, 3, 4, 5]
    assert minutes(Linear(MINUTE, timedelta(minutes=5), timedelta(minutes=12))) == [1, 6, 11, 12, 12]


policies = st.sampled_from(
    [
        DEFAULT,
        Exponential(MINUTE),
        Exponential(MINUTE, factor=1e300),
        Exponential(timedelta(0)),
        Linear(MINUTE),
        Exponential(MINUTE, cap=timedelta.max),
        Linear(MINUTE, cap=timedelta.max),
        Constant(MINUTE),
    ]
)


@given(policies, st.integers(0, 10**12))
def test_no_number_of_failures_overflows(policy, failures):
    """The delay is never negative and never beyond the cap, however often a job has failed."""
    cap = getattr(policy, "cap", MINUTE)
    assert timedelta(0) <= policy.delay(failures) <= cap
    assert policy.delay(10_000) <= cap


def test_delay_of_zero_stays_zero():
    """A first delay of zero means at once, also where the power overflows."""
    assert Exponential(timedelta(0)).delay(10_000) == timedelta(0)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Exponential(5), "Exponential.first"),
        (lambda: Exponential("5 min"), "Exponential.first"),
        (lambda: Exponential(-MINUTE), "Exponential.first"),
        (lambda: Exponential(MINUTE, factor=0.5), "Exponential.factor"),
        (lambda: Exponential(MINUTE, factor=math.nan), "Exponential.factor"),
        (lambda: Exponential(MINUTE, factor=math.inf), "Exponential.factor"),
        (lambda: Exponential(MINUTE, factor="2"), "Exponential.factor"),
        (lambda: Exponential(timedelta(days=1)), "Exponential.cap"),
        (lambda: Constant(None), "Constant.every"),
        (lambda: Linear(MINUTE, step=-MINUTE), "Linear.step"),
    ],
)
def test_wrong_options_are_named(make, option):
    """A wrong value raises ConfigError with the option's name; a first delay above the cap is a mistake as well."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.option == option


def test_policies_are_values():
    """Policies are frozen, equal by value and hashable."""
    assert Exponential() == Exponential()
    assert len({Linear(MINUTE), Linear(MINUTE)}) == 1
    with pytest.raises((FrozenInstanceError, TypeError)):
        Exponential().factor = 3
