"""Outcomes of handlers (outcome.py), and the subject that a handler reads (subject.py)."""

import contextlib
import pickle
from datetime import UTC, datetime, timedelta, timezone

import pytest

from tallybook import App, Complete, Drop, Kill, Reject, Reschedule
from tallybook._model.outcome import Cancel, Dead, Outcome, Snooze
from tallybook._model.subject import Subject, check_subject, subject_of
from tallybook._worker.run.frames import from_frame, to_frame
from tallybook.errors import ConfigError, SignatureError

SOON = timedelta(minutes=1)
THEN = datetime(2026, 1, 1, tzinfo=UTC)
WEEK = timedelta(weeks=1)
OF_SUBJECTS = [
    Reschedule(WEEK), Reschedule(THEN, args={"page": [1, {"a": 2}]}), Complete(), Complete(args={}), Drop(),
    Kill("gone"), Kill("gone", args={"page": 3}), Reject("502"),
    Reject("502", {"body": ["x"]}, ref_id="req-1", retry_in="5 min"),
]  # fmt: skip
ALL = [Snooze(SOON), Snooze(until=THEN), Cancel("gone"), Cancel(), Dead("closed"), *OF_SUBJECTS]


@pytest.mark.parametrize("outcome", ALL, ids=repr)
def test_outcomes_are_values(outcome):
    """An outcome is equal by value, hashable and picklable, and its repr is the call that makes it."""
    again = pickle.loads(pickle.dumps(outcome))  # noqa: S301
    assert again == outcome
    assert len({again, outcome}) == 1
    assert [other for other in ALL if other == outcome] == [outcome]
    assert repr(outcome).startswith(type(outcome).__name__ + "(")


@pytest.mark.parametrize("outcome", ALL, ids=repr)
def test_outcomes_can_be_raised_through_context_managers(outcome):
    """An outcome raised through a `with` block arrives as the same object."""

    @contextlib.contextmanager
    def block():
        yield

    with pytest.raises(Outcome) as caught, block():
        raise outcome
    assert caught.value is outcome


def test_outcomes_can_be_matched():
    """The worker and the tests of users can match outcomes with `match`."""
    match Snooze(SOON):
        case Snooze(delay, None):
            assert delay == SOON
    match Dead("why"):
        case Dead(reason):
            assert reason == "why"
    assert Snooze(until=THEN).until == THEN
    assert Snooze("5 min").delay == timedelta(minutes=5)


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
    """F39: a bare number, a negative delay and a naive datetime raise ConfigError where they are written."""
    with pytest.raises(ConfigError) as caught:
        Snooze(*args)
    assert caught.value.option == option


@pytest.mark.parametrize("outcome", OF_SUBJECTS, ids=repr)
def test_outcomes_come_back_from_a_process_as_they_were(outcome):
    """An outcome sent from a child process to its worker is unchanged."""
    assert from_frame(to_frame(outcome, "refresh")) == outcome


@pytest.mark.parametrize("text", ["+1 week", "1 week", " +7 days ", "+168 hours", "P7D", timedelta(days=7)])
def test_when_is_said_in_words(text):
    """S3-40: `Reschedule` accepts relative dates such as '+1 week'."""
    outcome = Reschedule(text)
    assert (outcome.when, outcome.run_in, outcome.run_at, outcome.delay) == (WEEK, WEEK, None, WEEK)


def test_when_is_an_instant():
    """S3-27: a past instant means now; an instant or a delay that is too large for timestamptz is capped."""
    assert (Reschedule(THEN).run_at, Reschedule(THEN).run_in, Reschedule(THEN).delay) == (THEN, None, timedelta(0))
    edge = datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))
    assert Reschedule(edge).run_at == datetime.max.replace(tzinfo=UTC)
    assert Reschedule(timedelta.max).run_in == timedelta(days=36_500)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Reschedule(60), "Reschedule.when"),
        (lambda: Reschedule("60"), "Reschedule.when"),
        (lambda: Reschedule("+1 month"), "Reschedule.when"),
        (lambda: Reschedule("-1 week"), "Reschedule.when"),
        (lambda: Reschedule(-WEEK), "Reschedule.when"),
        (lambda: Reschedule(datetime(2026, 1, 1)), "Reschedule.when"),
        (lambda: Reschedule(WEEK, args=[1]), "Reschedule.args"),
        (lambda: Complete(args={1: 2}), "Complete.args"),
        (lambda: Kill("x", args="y"), "Kill.args"),
        (lambda: Reject("x", ref_id=7), "Reject.ref_id"),
        (lambda: Reject("x", ref_id=""), "Reject.ref_id"),
        (lambda: Reject("x", retry_in=5), "Reject.retry_in"),
        (lambda: check_subject(42), "subject"),
        (lambda: check_subject(""), "subject"),
        (lambda: check_subject("x" * 513), "subject"),
        (lambda: check_subject("a\0b"), "subject"),
    ],
)
def test_what_cannot_be_meant_is_refused(make, option):
    """A wrong value raises ConfigError with the option's name at once."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.option == option


def test_outcomes_of_subjects_can_be_matched():
    """Tests of users can match outcomes of subjects with `match`."""
    match Reschedule("+1 week", args={"n": 1}):
        case Reschedule(when, new_args):
            assert (when, new_args) == (WEEK, {"n": 1})
    match Reject("no", {"code": 1}, ref_id="r"):
        case Reject(message, details, ref_id, retry_in):
            assert (message, details, ref_id, retry_in) == ("no", {"code": 1}, "r", None)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (None, None),
        ({"version": 2}, None),
        ({"subject": 5, "subject_name": "a"}, None),
        ({"subject": {}, "subject_name": None}, None),
        ({"subject": {}, "subject_name": "a"}, Subject("a", 0, None)),
        ({"subject": {"iterations": "x", "last_at": "never"}, "subject_name": "a"}, Subject("a", 0, None)),
        (
            {"subject": {"iterations": 3, "last_at": "2026-01-01T01:00:00+01:00"}, "subject_name": "a"},
            Subject("a", 3, THEN),
        ),
    ],
)
def test_what_a_row_says_of_its_subject(options, found):
    """ctx.subject is None for an ordinary job, and no content of a row stops its handler."""
    assert subject_of(options) == found


def test_new_args_are_bound_by_name():
    """New args are checked like those of a call; positional-only parameters are passed by name."""
    app = App("shop")

    @app.task
    def refresh(a: int, b: int = 1, /, c: int = 2, *, d: int = 3) -> None: ...

    for args in ({"a": 1}, {"a": 1, "b": 2, "d": 4}, {"d": 1, "c": 2, "b": 3, "a": 4}):
        assert refresh.args.bind_named(args) == args
    for args in ({}, {"b": 1}, {"a": 1, "e": 2}):
        with pytest.raises(SignatureError):
            refresh.args.bind_named(args)
