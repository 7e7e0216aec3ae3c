"""Backoff: the delay after a failure, and exceptions after which a retry cannot help (backoff.py)."""

import asyncio
import json
import math
from dataclasses import FrozenInstanceError
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.hostile import hostile
from tallybook import Constant, Exponential, Linear
from tallybook._model.backoff import DEFAULT, as_policy, checked_no_retry, delay_after, from_json, is_final, to_json
from tallybook.errors import ConfigError, PayloadError, SignatureError

MINUTE = timedelta(minutes=1)


def minutes(policy, count=5):
    return [policy.delay(failures) / MINUTE for failures in range(1, count + 1)]


def test_exponential_without_jitter_is_exact():
    """Exponential(5 min) gives 5, 10, 20, 40, 80 min, ..., capped at six hours."""
    assert minutes(Exponential(5 * MINUTE), 8) == [5, 10, 20, 40, 80, 160, 320, 360]


def test_factor_and_cap_are_options():
    """`factor` and `cap` are keyword options."""
    assert minutes(Exponential(MINUTE, factor=3, cap=timedelta(minutes=20))) == [1, 3, 9, 20, 20]


def test_full_jitter_draws_from_zero_to_the_delay():
    """With jitter, the delay is the exact delay times a random number from 0 to 1."""
    policy = Exponential(5 * MINUTE, jitter=True)
    assert policy.delay(2, lambda: 0.0) == timedelta(0)
    assert policy.delay(2, lambda: 0.5) == 5 * MINUTE
    assert timedelta(0) <= policy.delay(2) <= 10 * MINUTE


def test_default_policy():
    """A task without a policy waits a uniformly random time up to 5, 10, 20 s, ..., at most 6 hours."""
    assert Exponential(timedelta(seconds=5), jitter=True) == DEFAULT
    assert DEFAULT.delay(1, lambda: 1.0) == timedelta(seconds=5)
    assert DEFAULT.delay(50, lambda: 1.0) == timedelta(hours=6)


def test_constant_and_linear():
    """Constant always gives the same delay; Linear grows by its step, which defaults to the first delay."""
    assert minutes(Constant(MINUTE)) == [1] * 5
    assert minutes(Linear(MINUTE)) == [1, 2, 3, 4, 5]
    assert minutes(Linear(MINUTE, timedelta(minutes=5), timedelta(minutes=12))) == [1, 6, 11, 12, 12]


@given(
    st.sampled_from(
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
    ),
    st.integers(0, 10**12),
)
def test_no_number_of_failures_overflows(policy, failures):
    """The delay is never negative and never beyond the cap, however often a job has failed."""
    cap = getattr(policy, "cap", MINUTE)
    assert timedelta(0) <= policy.delay(failures) <= cap
    assert policy.delay(10_000) <= cap


def test_delay_of_zero_stays_zero():
    """A first delay of zero stays zero, even where the power overflows."""
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
        (lambda: Exponential(jitter="no"), "Exponential.jitter"),
        (lambda: Constant(None), "Constant.every"),
        (lambda: Linear(MINUTE, step=-MINUTE), "Linear.step"),
    ],
)
def test_wrong_options_are_named(make, option):
    """A wrong value raises ConfigError with the option's name; so does a first delay above the cap."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.option == option


def test_policies_are_values():
    """Policies are frozen, equal by value and hashable."""
    assert Exponential() == Exponential()
    assert len({Linear(MINUTE), Linear(MINUTE)}) == 1
    with pytest.raises((FrozenInstanceError, TypeError)):
        Exponential().factor = 3


@given(
    st.lists(st.timedeltas(timedelta(0), timedelta(days=400_000)), min_size=3, max_size=3),
    st.one_of(st.floats(1, 1e308), st.integers(1, 10**400)),
    st.booleans(),
    st.sampled_from(["constant", "linear", "linear with a step", "exponential"]),
    st.integers(1, 10**6),
)
def test_a_policy_travels_as_json(durations, factor, jitter, kind, failures):
    """S2-07: a policy written as JSON reads back as an equal policy, to the microsecond, and never overflows."""
    step, *others = durations
    first, cap = sorted(others)
    policy = {
        "constant": Constant(first),
        "linear": Linear(first, cap=cap),
        "linear with a step": Linear(first, step, cap),
        "exponential": Exponential(first, factor=factor, cap=cap, jitter=jitter),
    }[kind]
    back = from_json(json.loads(json.dumps(to_json(policy))))
    assert back == policy
    assert timedelta(0) <= back.delay(failures)


def test_the_json_form():
    """The JSON form is as docs/retries.md shows; omitted options have the defaults of the class."""
    full = {"exponential": {"first": "5 min", "factor": 2, "cap": "6 hours", "jitter": False}}
    assert to_json(Exponential(5 * MINUTE)) == full
    assert from_json({"exponential": {"first": "300 s"}}) == Exponential(5 * MINUTE)
    assert from_json({"exponential": {}}) == Exponential()
    assert from_json({"constant": {"every": "30 s"}}) == Constant(timedelta(seconds=30))
    assert to_json(Linear(MINUTE)) == {"linear": {"first": "1 min", "cap": "6 hours"}}
    assert from_json({"linear": {"first": "1 min", "step": "0 s", "cap": "PT2H"}}).delay(9) == MINUTE


words = st.sampled_from(["exponential", "constant", "linear", "first", "factor", "cap", "jitter", "every", "step"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("5 min"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | words, inner, max_size=4),
    max_leaves=6,
)


@given(st.one_of(values, st.dictionaries(st.sampled_from(["exponential", "constant", "linear"]), values, max_size=1)))
def test_any_json_is_a_policy_or_a_config_error(value):
    """S2-07: any JSON in a row reads as a policy or raises a ConfigError with the option's name."""
    try:
        policy = from_json(value)
    except ConfigError as error:
        assert error.option is not None
    else:
        assert from_json(to_json(policy)) == policy


@pytest.mark.parametrize(
    ("value", "option"),
    [
        ("standard", "retry"),
        ({}, "retry"),
        ({"constant": {}, "linear": {}}, "retry"),
        ({"quadratic": {"first": "5 min"}}, "retry"),
        ({"constant": {}}, "retry.constant"),
        ({"constant": "5 min"}, "retry.constant"),
        ({"constant": {"every": "5 min", "cap": "1 h"}}, "retry.constant.cap"),
        ({"constant": {"every": 300}}, "retry.constant.every"),
        ({"constant": {"every": "300"}}, "retry.constant.every"),
        ({"linear": {"cap": "1 h"}}, "retry.linear"),
        ({"exponential": {"first": "1 day"}}, "Exponential.cap"),
        ({"exponential": {"factor": "2"}}, "Exponential.factor"),
        ({"exponential": {"jitter": 1}}, "retry.exponential.jitter"),
    ],
)
def test_wrong_json_is_named(value, option):
    """S2-07: ConfigError names the path of a wrong value; nothing is guessed."""
    with pytest.raises(ConfigError) as caught:
        from_json(value)
    assert caught.value.option == option


class Own:
    def delay(self, failures, rng=None):
        return MINUTE


@pytest.mark.parametrize("policy", [lambda failures: MINUTE, Own(), as_policy(lambda failures: MINUTE)])
def test_code_does_not_travel(policy):
    """S2-07: a policy that is code has no JSON form; the hint is to name it with `app.retry_policy`."""
    with pytest.raises(ConfigError, match=r"app\.retry_policy"):
        to_json(policy)


class Callable2:
    def __call__(self, failures, error):
        return failures * MINUTE if isinstance(error, ValueError) else None


@pytest.mark.parametrize(
    ("policy", "after", "delay"),
    [
        (lambda failures: failures * MINUTE, 3, 3 * MINUTE),
        (lambda failures: None, 1, None),
        (lambda failures, error: None if isinstance(error, ValueError) else MINUTE, 1, None),
        (Callable2(), 2, 2 * MINUTE),
        (Callable2().__call__, 2, 2 * MINUTE),
        (lambda failures, cap=5: MINUTE if cap == 5 else None, 1, MINUTE),
        (lambda failures, error=None: MINUTE if error is not None else None, 1, MINUTE),
        (lambda *args: MINUTE * len(args), 1, MINUTE),
        (Own(), 1, MINUTE),
        (Constant(MINUTE), 1, MINUTE),
    ],
)
def test_a_function_is_a_policy(policy, after, delay):
    """S2-07: a function of the failures, or of the failures and the error, is a policy; None ends the attempts."""
    assert delay_after(as_policy(policy), after, ValueError()) == delay


@pytest.mark.parametrize(
    "wrong",
    [
        MINUTE,
        5,
        "standard",
        Exponential,
        Own,
        lambda: MINUTE,
        lambda a, b, c: MINUTE,
        lambda *, failures: MINUTE,
        asyncio.sleep,
    ],
)
def test_what_is_no_policy(wrong):
    """S2-07: a number, a class, a function of other arguments and an async one are refused at declaration."""
    with pytest.raises(ConfigError) as caught:
        as_policy(wrong)
    assert caught.value.option == "retry"


# Exceptions after which a retry cannot help
CLASSES = (ValueError, KeyError)
Marked = type("Marked", (Exception,), {"no_retry": True})


class Bottomless(ExceptionGroup):
    @property
    def exceptions(self):
        return (self, self)


def nested(error, depth):
    for _ in range(depth):
        error = ExceptionGroup("x", [error])
    return error


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ValueError(), True),
        (UnicodeError(), True),
        (TypeError(), False),
        (SystemExit(1), False),
        (Marked(), True),
        (type("HalfMarked", (Exception,), {"no_retry": "yes"})(), False),
        (PayloadError("$", "no", task="t"), True),
        (SignatureError("t", "no"), True),
        (ExceptionGroup("x", [ValueError(), KeyError()]), True),
        (ExceptionGroup("x", [ValueError(), TypeError()]), False),
        (ExceptionGroup("x", [ValueError(), ExceptionGroup("y", [Marked(), KeyError()])]), True),
        (ExceptionGroup("x", [ValueError(), ExceptionGroup("y", [OSError(), KeyError()])]), False),
        (nested(ValueError(), 5_000), True),
        (nested(TypeError(), 5_000), False),
        (hostile(Exception, no_retry=KeyboardInterrupt)(), False),
        (hostile(ExceptionGroup, exceptions=SystemExit)("x", [ValueError()]), False),
        (Bottomless("x", [ValueError()]), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_final_is_what_is_of_a_class_or_says_so(error, final):
    """An error of a listed class, a marked one and a group of only such errors are final; an unreadable one is not."""
    assert is_final(error, CLASSES) is final


def test_a_cause_does_not_count():
    """The cause of an error does not make it final: the handler chose to raise another error."""
    error = OSError()
    error.__cause__ = ValueError()
    assert not is_final(error, CLASSES)


def test_a_group_can_be_named_itself():
    """The class of an exception group can be listed, too."""
    assert is_final(ExceptionGroup("x", [OSError()]), (ExceptionGroup,))
    assert not is_final(OSError(), ())


@pytest.mark.parametrize("wrong", ["ValueError", ValueError(), (ValueError, int), (ValueError, "x"), 3, None])
def test_wrong_classes_are_refused(wrong):
    """A value that is not an exception class raises ConfigError with the option's name."""
    with pytest.raises(ConfigError) as caught:
        checked_no_retry(wrong)
    assert caught.value.option == "no_retry"


def test_one_class_and_any_collection_are_taken():
    """One class, a list, a set and an empty tuple are accepted."""
    assert (
        checked_no_retry(ValueError)
        == checked_no_retry([ValueError])
        == checked_no_retry({ValueError})
        == (ValueError,)
    )
    assert checked_no_retry(()) == ()
